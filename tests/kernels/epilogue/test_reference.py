"""The references of the fused kernels against torch's own operators (tier: no process)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

import hyperslab
from hyperslab.kernels import epilogue, normalization, reorder
from hyperslab.kernels.registry import OPERATORS

assert hyperslab.__name__  # importing it registers the operators

FORMATS = [torch.contiguous_format, torch.channels_last_3d]
POOLS = [([], False), ([2, 2, 2], False), ([2, 2, 2], True), ([1, 3, 2], False), ([3, 1, 1], True)]
SLOPES = [1.0, 0.0, 0.01]
SHAPE = (2, 3, 6, 6, 4)


def by_torch(x: torch.Tensor, slope: float, pool: Sequence[int], maximum: bool) -> torch.Tensor:
    if slope == 0:
        x = F.relu(x)
    elif slope != 1:
        x = F.leaky_relu(x, slope)
    if not pool:
        return x
    return F.max_pool3d(x, pool) if maximum else F.avg_pool3d(x, pool)


def awkward(shape: Sequence[int], memory_format: torch.memory_format) -> torch.Tensor:
    """With ties, zeros of both signs, infinities and NaN."""
    x = torch.randn(*shape, dtype=torch.float64)
    x[0] = (x[0] * 2).round() / 2
    x.view(-1)[::53] = torch.nan
    x.view(-1)[::37] = -0.0
    x.view(-1)[::61] = torch.inf
    x.view(-1)[::71] = -torch.inf
    return x.contiguous(memory_format=memory_format)


CHAINS = list(itertools.product(FORMATS, SLOPES, POOLS))


@pytest.mark.parametrize(("memory_format", "slope", "pooling"), CHAINS, ids=str)
def test_chain_without_scale(memory_format, slope, pooling) -> None:  # type: ignore[no-untyped-def]
    pool, maximum = pooling
    x = awkward(SHAPE, memory_format).requires_grad_()
    want = by_torch(x, slope, pool, maximum)
    y, marks = epilogue.chain_forward(x, None, slope, pool, maximum, True, x.dtype)
    torch.testing.assert_close(y, want, equal_nan=True)
    assert y.is_contiguous(memory_format=memory_format)
    g = torch.randn_like(want)
    g[:, :, ::2, 1] = torch.inf if g.shape[3] > 1 else 1.0
    (want_dx,) = torch.autograd.grad(want, x, g)
    g = g.contiguous(memory_format=memory_format)
    dx = epilogue.chain_backward(g, marks, None, None, None, slope, pool, maximum, x.shape, x.dtype)
    torch.testing.assert_close(dx, want_dx, equal_nan=True)
    assert dx.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize(("memory_format", "slope", "pooling"), CHAINS, ids=str)
def test_chain_with_batch_norm(memory_format, slope, pooling) -> None:  # type: ignore[no-untyped-def]
    """Moments, forward and backward of batch norm in training, put together from the four."""
    pool, maximum = pooling
    x = torch.randn(SHAPE, dtype=torch.float64).contiguous(memory_format=memory_format)
    weight, bias = torch.randn(2, SHAPE[1], dtype=torch.float64).unbind()
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    want = by_torch(F.batch_norm(x, None, None, weight, bias, True), slope, pool, maximum)
    g = torch.randn_like(want)
    want_gradients = torch.autograd.grad(want, leaves, g)

    x, weight, bias = (t.detach() for t in leaves)
    count = x.numel() // x.shape[1]
    total, square, around = epilogue.channel_sums(x, 0)
    mean = total / count
    torch.testing.assert_close(square, total * mean)
    std = (around / count + 1e-5).sqrt()
    norm = torch.stack([mean, weight / std, bias])[:, None]
    y, winners = epilogue.chain_forward(x, norm, slope, pool, maximum, True, x.dtype)
    torch.testing.assert_close(y, want.detach())
    g = g.contiguous(memory_format=memory_format)
    du, product = epilogue.chain_backward_sums(g, winners, x, norm, slope, pool, maximum)[:, 0]
    dweight = product / std
    b = -weight / std**2 * dweight / count
    through = torch.stack([b, -weight / std * du / count])[:, None]
    dx = epilogue.chain_backward(
        g, winners, x, norm, through, slope, pool, maximum, x.shape, x.dtype
    )
    torch.testing.assert_close((dx, dweight, du), want_gradients)


def test_normalisation_of_samples() -> None:
    x = torch.randn(2, 3, 4, 2, 2).requires_grad_()
    norm = torch.randn(3, 2, 3)
    mean, scale, shift = norm[..., None, None, None]
    want = F.relu((x - mean) * scale + shift)
    y, _ = epilogue.chain_forward(x, norm, 0.0, [], False, True, x.dtype)
    torch.testing.assert_close(y, want)
    g = torch.randn_like(want)
    sums = epilogue.chain_backward_sums(g, y.new_empty(0), x, norm, 0.0, [], False)
    du = (g * (want > 0)).double()
    torch.testing.assert_close(sums, torch.stack([du, du * (x - mean)]).sum((3, 4, 5)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    x = torch.full((1, 1, 8), 60000.0, dtype=dtype)
    y, _ = epilogue.chain_forward(x, None, 1.0, [8], False, False, dtype)
    assert torch.equal(y, x[..., :1])
    assert epilogue.channel_sums(x, 0)[0].item() == 8 * x[0, 0, 0].item()


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_sums_of_groups(groups: int) -> None:
    x = torch.randn(2, 6, 3, 2, dtype=torch.float64)
    got = epilogue.channel_sums(x.contiguous(memory_format=torch.channels_last), groups)
    slices = x.reshape(2 * groups, -1)
    count = slices.shape[1]
    around = slices.var(1, correction=0) * count
    torch.testing.assert_close(
        got, torch.stack([slices.sum(1), slices.mean(1) ** 2 * count, around])
    )


def test_parts_of_equal_numbers_have_no_variance() -> None:
    """Whatever rounding leaves of their means; numbers that differ do have one."""
    constants = torch.rand(500) * 1e6
    sizes = [3, 7, 5, 11, 13]

    def variance(*parts: torch.Tensor) -> torch.Tensor:
        made = torch.stack([epilogue.channel_sums(part, 0) for part in parts]).sum(0)
        given = (made, None, None, sum(sizes), 1e-5, 500, 1)
        versions = (normalization.normalisation, torch.ops.hyperslab.normalisation)
        return torch.stack([version(*given)[1][1, 0] for version in versions])

    parts = [constants.expand(n, 500) for n in sizes]
    assert not variance(*parts).any()
    assert (variance(parts[0] * (1 + 2.0**-20), *parts[1:]) > 0).all()


def test_reorder_keeps_values_and_casts() -> None:
    x = torch.randn(2, 3, 4, 5, 6)
    last = reorder.reorder(x, True, torch.bfloat16)
    assert last.is_contiguous(memory_format=torch.channels_last_3d)
    assert torch.equal(last, x.bfloat16())
    assert reorder.reorder(last, False, torch.bfloat16).is_contiguous()
    with pytest.raises(ValueError, match="4 or 5 dims"):
        reorder.reorder(x[..., 0, 0], True, x.dtype)


def test_one_voxel_keeps_its_format() -> None:
    """A result of one voxel a sample says by its strides in which order the marks are."""
    for memory_format in FORMATS:
        x = torch.randn(1, 3, 2, 2, 2).contiguous(memory_format=memory_format).requires_grad_()
        y, marks = epilogue.chain_forward(x, None, 0.0, [2] * 3, True, True, x.dtype)
        g = torch.randn_like(y)
        dx = epilogue.chain_backward(
            g, marks, None, None, None, 0.0, [2] * 3, True, x.shape, x.dtype
        )
        assert torch.equal(dx, torch.autograd.grad(F.max_pool3d(F.relu(x), 2), x, g)[0])


@pytest.mark.parametrize(
    ("pool", "maximum", "norm", "words"),
    [
        ([2, 3, 1], False, None, "do not cover"),
        ([2, 2], False, None, "do not cover"),
        ([4, 8, 16], True, None, "more than 256"),
        ([], False, torch.ones(3, 3, 3), "must be"),
        ([], False, torch.ones(2, 1, 3), "must be"),
    ],
)
def test_refuses(pool: list[int], maximum: bool, norm: torch.Tensor | None, words: str) -> None:
    x = torch.zeros(2, 3, 4, 8, 16)
    with pytest.raises(ValueError, match=words):
        torch.ops.hyperslab.chain_forward(x, norm, 0.0, pool, maximum, True, x.dtype)


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda operator: operator.name)
def test_is_registered(operator) -> None:  # type: ignore[no-untyped-def]
    assert str(getattr(torch.ops.hyperslab, operator.name).default._schema).endswith(
        operator.schema
    )


@pytest.mark.parametrize(("memory_format", "slope", "pooling"), CHAINS[::2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalised", [False, True])
def test_meta_forms(memory_format, slope, pooling, dtype, normalised) -> None:  # type: ignore[no-untyped-def]
    pool, maximum = pooling
    x = torch.randn(SHAPE).contiguous(memory_format=memory_format)
    norm = torch.ones(3, 1, SHAPE[1]) if normalised else None
    ops = torch.ops.hyperslab

    def run(device: str) -> list[torch.Tensor]:
        t = torch.empty_like(x, device=device).copy_(x)
        n = norm if norm is None else norm.to(device)
        y, marks = ops.chain_forward(t, n, slope, pool, maximum, True, dtype)
        results = [y, marks, ops.channel_sums(t, 0), ops.channel_sums(t, 3)]
        results.append(ops.reorder(t, True, dtype))
        results.append(ops.reorder(t, False, dtype))
        if n is not None:
            results.append(ops.chain_backward_sums(y, marks, t, n, slope, pool, maximum))
            sums = results[2]
            found = ops.normalisation(sums, n[0, 0], None, 9, 1e-5, SHAPE[1], 1)
            gradients = ops.parameter_gradients(sums[:2, None], *found, 1)
            results.extend([*found, *gradients])
            results.append(ops.through_statistics(gradients[2], *found, 9, 1))
        results.append(
            ops.chain_backward(
                y,
                marks,
                None if n is None else t,
                n,
                n if n is None else n[:2],
                slope,
                pool,
                maximum,
                SHAPE,
                dtype,
            )
        )
        return results

    for real, form in zip(run("cpu"), run("meta"), strict=True):
        assert (real.shape, real.stride(), real.dtype) == (form.shape, form.stride(), form.dtype)
        assert form.device.type == "meta"
