"""Operands with unusual strides, labels or types, and what else is cut (tier: a few gloo ranks).

Slices of packed parameters are strided, and filters that are one for all channels are expanded.
What a rule calls in place of torch's own function may read them as if they were dense.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.geometry import Cut, Partition
from tests.ranks import run_ranks

COVERS = {
    "elementwise": {"fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine"},
}


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values, each beside one that must not be read."""
    return torch.stack([x, torch.full_like(x, 1e3)], -1)[..., 0]


def cut_along(
    x: torch.Tensor, dim: int, grid: hs.Grid, bounds: tuple[int, ...] | None = None
) -> hs.Sharded:
    """This rank's part of a tensor, along any dim, at these bounds."""
    cut = Cut("depth", bounds) if bounds else Cut.balanced("depth", x.shape[dim], 2)
    whole = Partition.whole(x.shape)
    partition = whole.with_dim(dim, x.shape[dim], cut)
    part = x.detach()[partition.box(grid.coords).slices(whole.box(grid.coords))]
    return hs.Sharded.from_local(part, partition, grid).requires_grad_(x.requires_grad)


def full(x: Any) -> Any:
    return x.full() if isinstance(x, hs.Sharded) else x


def values(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(0, 40, count, dtype=torch.float64).sin().view(shape).to(dtype)


WITH_PARAMETERS: dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]]]] = {
    "conv3d": (lambda x, w, b: F.conv3d(x, w, b, padding=1), [(8, 4, 3, 3, 3), (8,)]),
    "by groups": (lambda x, w, b: F.conv3d(x, w, b, groups=4), [(8, 1, 3, 3, 3), (8,)]),
    "with an activation": (
        lambda x, w, b: F.relu(F.conv3d(x, w, b, stride=2, padding=1)),
        [(8, 4, 3, 3, 3), (8,)],
    ),
    "conv1d": (lambda x, w, b: F.conv1d(x[..., 0, 0], w, b), [(8, 4, 3), (8,)]),
    "expanded filters": (
        lambda x, w, b: F.conv3d(x, w.expand(4, 1, 3, 3, 3), b.expand(4), groups=4),
        [(1, 1, 3, 3, 3), (1,)],
    ),
    "conv_transpose3d": (
        lambda x, w, b: F.conv_transpose3d(x, w, b, stride=2),
        [(4, 8, 2, 2, 2), (8,)],
    ),
    "batch norm in evaluation": (
        lambda x, m, v, w, b: F.batch_norm(x, m.detach(), v.detach() ** 2 + 1, w, b),
        [(4,)] * 4,
    ),
    "running statistics in columns": (
        lambda x, w, b: F.batch_norm(
            x, strided(values(4)).to(x), strided(values(4) + 2).to(x), w, b
        ),
        [(4,)] * 2,
    ),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(4,)] * 2),
    "prelu": (lambda x, w: F.prelu(x, w), [(4,)]),
}


def strided_parameters(dtype: torch.dtype, last: bool) -> None:
    grid = hs.Grid(depth=2)
    x = values(2, 4, 9, 6, 16, dtype=dtype)
    x = x.to(memory_format=torch.channels_last_3d) if last else x
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.06}[dtype]
    failures = []
    for name, (call, shapes) in WITH_PARAMETERS.items():
        packed = [torch.stack([values(*shape, dtype=dtype)] * 2, -1) for shape in shapes]
        found = []
        for cut in (False, True):
            columns = [p.clone().requires_grad_() for p in packed]
            a = (hs.shard(x, grid) if cut else x.clone()).requires_grad_()
            y = call(a, *(column[..., 0] for column in columns))
            (y * values(*y.shape, dtype=dtype)).sum().backward()
            gradients = [c.grad for c in columns if c.grad is not None]
            found.append([full(y.detach()), full(a.grad), *gradients])
        for at, (expected, got) in enumerate(zip(*found, strict=True)):
            error = (got.double() - expected.double()).norm() / expected.double().norm()
            if not error <= tolerance:
                failures.append(f"{name}: {at}: {error:.1e}")
    assert not failures, failures


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parameters_that_are_columns(dtype: torch.dtype, last: bool) -> None:
    run_ranks(2, strided_parameters, dtype, last)


QUANTIZED: Mapping[str, Callable[[Any], Any]] = {
    "a scale": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 15),
    "a scale in a tensor": lambda x: torch.fake_quantize_per_tensor_affine(
        x, torch.tensor(0.1), torch.tensor(3, dtype=torch.int32), quant_min=0, quant_max=15
    ),
    "a scale for each": lambda x: torch.fake_quantize_per_channel_affine(
        x, torch.tensor([0.1, 0.2, 0.05]), torch.tensor([0, 3, 5], dtype=torch.int32), 1, 0, 15
    ),
}

CALLS: Mapping[str, tuple[Callable[..., Any], Sequence[torch.Tensor]]] = {
    **{name: (call, [values(4, 3, 5).float()]) for name, call in QUANTIZED.items()},
    "complex convolution with a bias": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        [
            torch.complex(values(2, 3, 6, 5).float(), values(2, 3, 6, 5).float().cos()),
            torch.complex(values(4, 3, 3, 3).float(), values(4, 3, 3, 3).float()),
            torch.complex(values(4).float(), values(4).float().cos()),
        ],
    ),
    "a diagonal of einsum": (lambda x: torch.einsum("iji->j", x), [values(2, 4, 2)]),
    "its trace": (lambda x: torch.einsum("ijj->", x), [values(4, 3, 3)]),
    "complex padding": (
        lambda x: torch.constant_pad_nd(x, [1, 2, 0, 1], 1 + 2j),
        [torch.complex(values(4, 3, 5), values(4, 3, 5))],
    ),
    "truth values": (
        lambda x, a, b: torch.addr(x > 0, a > 0, b > 0, beta=3, alpha=2),
        [values(4, 5), values(4), values(5)],
    ),
    "bilinear": (F.bilinear, [values(4, 3), values(4, 2), values(5, 3, 2), values(5)]),
    "attention": (
        lambda q, w, b, v, c: F.multi_head_attention_forward(
            q, q, q, 4, 2, w, b, None, None, False, 0.0, v, c
        )[0],
        [values(4, 2, 4), values(12, 4), values(12), values(4, 4), values(4)],
    ),
    "unpooling of turned volumes": (
        lambda x: F.max_unpool2d(*F.max_pool2d(x.mT, 2, return_indices=True), 2).mT,
        [values(2, 3, 4, 8)],
    ),
}


def any_operand_cut() -> None:
    grid = hs.Grid(depth=2)
    failures = []
    for name, (call, operands) in CALLS.items():
        given = [x.clone().requires_grad_() for x in operands]
        expected = call(*given)
        adds = expected.is_floating_point() or expected.is_complex()
        if adds:
            expected.abs().pow(2).sum().backward()
        for which in range(len(operands)):
            for dim in range(operands[which].dim()):
                if operands[which].shape[dim] < 2:
                    continue
                fresh = [x.clone().requires_grad_() for x in operands]
                fresh[which] = cut_along(fresh[which], dim, grid)
                try:
                    found = call(*fresh)
                except (hs.LayoutError, hs.UnsupportedOp):
                    continue
                if adds:
                    found.abs().pow(2).sum().backward()
                same = full(found).dtype == expected.dtype
                pairs = [(expected, full(found))]
                if adds:
                    pairs += [(a.grad, full(b.grad)) for a, b in zip(given, fresh, strict=True)]
                close = [
                    b is not None and torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in pairs
                ]
                if not (same and all(close)):
                    failures.append(f"{name}: operand {which} along {dim}: {same}, {close}")
    assert not failures, failures


def test_any_operand_cut() -> None:
    run_ranks(2, any_operand_cut)


def one_row_of_another_order() -> None:
    """The strides of a rank's one row are no reason to raise there alone."""
    grid = hs.Grid(depth=2)
    pairs = values(5, 2)
    for memory in (pairs, pairs.T.contiguous().T):
        x = cut_along(memory.clone().requires_grad_(), 0, grid, (0, 1, 5))
        y = torch.view_as_complex(x)
        assert torch.equal(y.full(), torch.view_as_complex(pairs))
        torch.view_as_real(y).sum().backward()
        assert torch.equal(x.grad.full(), torch.ones(5, 2, dtype=pairs.dtype))
        with pytest.raises(hs.LayoutError, match=r"^mul_ in place, on a copy"):
            y.detach().mul_(2)
    volumes = values(1, 2, 3, 4).transpose(1, 3).contiguous().transpose(1, 3)
    places = torch.arange(0, 24, 2).view(1, 1, 3, 4).repeat(1, 2, 1, 1)
    places = places // 4 * 8 + places % 4 * 2
    places = places.transpose(1, 3).contiguous().transpose(1, 3)
    cut = [cut_along(x, 2, grid, (0, 1, 3)) for x in (volumes, places)]
    with contextlib.suppress(hs.LayoutError):
        F.max_unpool2d(*cut, 2, output_size=(6, 8))
    hs.shard(volumes, grid, check=False, channels=False).sum()  # all ranks have come as far


def test_one_row_of_another_order() -> None:
    run_ranks(2, one_row_of_another_order)


def words() -> None:
    grid = hs.Grid(depth=2)
    x = values(4, 3)
    with pytest.raises(hs.LayoutError, match=r"(?s)^add_ in place .*  Tensor 4 x 3\n    Sharded 3"):
        x.clone().add_(cut_along(x[0], 0, grid))
    for scale in (cut_along(values(4), 0, grid),):
        with pytest.raises(hs.LayoutError, match=r"(?s)^fake_quantize.* are ordinary.*Sharded 4"):
            torch.fake_quantize_per_tensor_affine(x, scale, scale.int(), 0, 15)
        with pytest.raises(hs.LayoutError, match=r"(?s)^fake_quantize.* has to be cut.*  Tensor"):
            torch.fake_quantize_per_channel_affine(x, scale.float(), scale.int(), 0, 0, 15)


def test_words() -> None:
    run_ranks(2, words)


def refused_as_serially() -> None:
    grid = hs.Grid(depth=2)
    x, filters = values(2, 3, 6, 5), values(4, 3, 3, 3)
    calls: list[Callable[[Any], Any]] = [
        lambda x: F.conv2d(x, filters, torch.complex(values(4), values(4))),
        lambda x: F.conv2d(x.float(), filters.float(), values(4)),
        lambda x: torch.diff(x, -1),
        lambda x: F.max_unpool2d(x, torch.zeros(2, 3, 6, 1, dtype=torch.long), 2),
    ]
    for call in calls:
        for operand in (x, cut_along(x, 2, grid)):
            with pytest.raises(RuntimeError):
                call(operand)
    with torch.autocast("cpu", torch.bfloat16):  # which makes types alike
        F.conv2d(cut_along(x, 2, grid).float(), filters.float(), values(4).bfloat16())


def test_refused_as_serially() -> None:
    run_ranks(2, refused_as_serially)
