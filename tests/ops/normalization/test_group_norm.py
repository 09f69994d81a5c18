"""Instance and group normalisation over cut space equal the serial ones (tier: a few gloo
ranks).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

import hyperslab as hs
from tests.ops.serial import (
    RANKS,
    Example,
    compare,
    distance,
    draw_examples,
    dtypes,
    grids,
    parts_of,
)
from tests.ranks import run_ranks

COVERS = {"normalization": {"instance_norm", "group_norm", "local_response_norm"}}


def instance_norm(x: Any, weight: Any, bias: Any, *, running: bool, **options: Any) -> Any:
    """The running statistics join the output, so that they are compared as well."""
    if not running:
        return F.instance_norm(x, weight=weight, bias=bias, **options)
    channels = x.shape[1]
    mean = torch.linspace(-1, 1, channels, dtype=x.dtype)
    var = torch.linspace(0.5, 2, channels, dtype=x.dtype)
    y = F.instance_norm(x, mean, var, weight, bias, **options)
    shape = [1, channels] + [1] * (x.dim() - 2)
    return y + mean.view(shape) + 3 * var.view(shape)


def group_norm(x: Any, weight: Any, bias: Any, **options: Any) -> Any:
    return F.group_norm(x, weight=weight, bias=bias, **options)


def local_response_norm(x: Any, **options: Any) -> Any:
    return F.local_response_norm(x, **options)


@st.composite
def volumes(draw: st.DrawFn, ranks: int, channels: int, least: int = 0) -> dict[str, Any]:
    n = draw(st.sampled_from([1, 2, 3, 3]))
    grid = draw(grids(ranks))
    extents = [draw(st.integers(parts + least, parts + 5)) for parts in parts_of(grid, n)]
    return {
        "grid": grid,
        "shape": (draw(st.integers(1, 4)), channels, *extents),
        "dtype": draw(dtypes),
        "channels_last": n > 1 and draw(st.booleans()),
        "mean": draw(st.sampled_from([0.0, 0.0, 3.0])),
        "seed": draw(st.integers(0, 1000)),
    }


def affine(draw: st.DrawFn, channels: int, *kinds: str) -> tuple[tuple[int, ...] | None, ...]:
    kind = draw(st.sampled_from(["both", "both", "none", "weight", *kinds]))
    return (
        (channels,) if kind in ("both", "weight") else None,
        (channels,) if kind in ("both", "bias") else None,
    )


@st.composite
def instances(draw: st.DrawFn, ranks: int) -> Example:
    channels, running = draw(st.integers(1, 4)), draw(st.booleans())
    options = {
        "running": running,
        "use_input_stats": not running or draw(st.booleans()),
        "momentum": draw(st.sampled_from([0.1, 1.0])),
        "eps": draw(st.sampled_from([1e-5, 1e-2])),
    }
    volume = draw(volumes(ranks, channels, least=1))
    return Example(weights=affine(draw, channels, "bias"), options=options, **volume)


@pytest.mark.parametrize("ranks", RANKS)
def test_any_instance_norm(ranks: int) -> None:
    run_ranks(ranks, compare, instance_norm, draw_examples(instances(ranks), 28))


@st.composite
def groups(draw: st.DrawFn, ranks: int) -> Example:
    count, each = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    options = {"num_groups": count, "eps": draw(st.sampled_from([1e-5, 1e-2]))}
    # Torch (2.13) has no gradient of a bias alone.
    volume = draw(volumes(ranks, count * each, least=1))
    return Example(weights=affine(draw, count * each), options=options, **volume)


@pytest.mark.parametrize("ranks", RANKS)
def test_any_group_norm(ranks: int) -> None:
    run_ranks(ranks, compare, group_norm, draw_examples(groups(ranks), 28))


@st.composite
def responses(draw: st.DrawFn, ranks: int) -> Example:
    options = {
        "size": draw(st.integers(1, 4)),
        "alpha": draw(st.sampled_from([1e-4, 0.5])),
        "beta": draw(st.sampled_from([0.75, 1.5])),
        "k": draw(st.sampled_from([1.0, 2.0])),
    }
    return Example(options=options, **draw(volumes(ranks, draw(st.integers(1, 5)))))


@pytest.mark.parametrize("ranks", [3, 8])
def test_any_local_response_norm(ranks: int) -> None:
    run_ranks(ranks, compare, local_response_norm, draw_examples(responses(ranks), 28))


MODULES = {
    "instance": lambda: nn.InstanceNorm3d(4, affine=True, track_running_stats=True),
    "group": lambda: nn.GroupNorm(2, 4),
}


def steps(cut: Any, kind: str) -> dict[str, torch.Tensor]:
    """Three training steps and an evaluation, with what the module remembers."""
    torch.manual_seed(1)
    norm = MODULES[kind]().double()
    optimiser = torch.optim.SGD(norm.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(4, 4, 5, 6, 7, dtype=torch.float64)
        y = norm(cut(x))
        (y.full() if isinstance(y, hs.Sharded) else y).pow(3).mean().backward()
        optimiser.step()
    z = norm.eval()(cut(x))
    whole = z.full() if isinstance(z, hs.Sharded) else z
    return {"evaluation": whole.detach(), **norm.state_dict()}


def modules(axes: dict[str, int], kind: str) -> dict[str, float]:
    expected = steps(lambda x: x, kind)
    grid = hs.Grid(**axes)
    MODULES["parallel"] = lambda: hs.parallelize(MODULES[kind]().double(), grid)
    found = steps(lambda x: hs.shard(x, grid), "parallel")
    return {key: distance(found[key].double(), value.double()) for key, value in expected.items()}


@pytest.mark.parametrize("kind", ["instance", "group"])
@pytest.mark.parametrize("axes", [{"depth": 3}, {"data": 2, "height": 2}], ids=str)
def test_modules_over_three_steps(axes: dict[str, int], kind: str) -> None:
    for found in run_ranks(3 if "depth" in axes else 4, modules, axes, kind):
        assert max(found.values()) <= 1e-10, found


def far_from_zero(dtype: torch.dtype, ratio: float) -> float:
    """Error of values whose mean is ``ratio`` times their deviation."""
    x = (torch.randn(2, 4, 9, 8, 8, dtype=torch.float64) + ratio).to(dtype)
    y = F.group_norm(hs.shard(x, hs.Grid(depth=4)), 2, eps=0.0).full()
    return (
        (y.double().var(dim=[2, 3, 4]) - F.group_norm(x.double(), 2).var(dim=[2, 3, 4]))
        .abs()
        .max()
        .item()
    )


@pytest.mark.parametrize(
    ("dtype", "ratio", "error"),
    [(torch.float32, 1e3, 1e-4), (torch.float64, 1e6, 1e-4)],
)
def test_nothing_cancels_far_from_zero(dtype: torch.dtype, ratio: float, error: float) -> None:
    assert max(run_ranks(4, far_from_zero, dtype, ratio)) <= error


def half_precision(kind: str) -> None:
    """The types of torch under autocast, without it, and the values near to float32's."""
    grid, full = hs.Grid(depth=2), torch.randn(2, 4, 6, 4, 4)
    weight = torch.rand(4).requires_grad_()
    op = {
        "instance": lambda x: F.instance_norm(x, weight=weight, bias=weight),
        "group": lambda x: F.group_norm(x, 2, weight, weight),
    }[kind]
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for x in (full, full.bfloat16()):
                expected, found = op(x), op(hs.shard(x, grid))
                assert found.dtype == expected.dtype
                assert torch.allclose(found.full().float(), expected.float(), rtol=2e-2, atol=2e-2)
                found.full().sum().backward()


@pytest.mark.parametrize("kind", ["instance", "group"])
def test_half_precision(kind: str) -> None:
    run_ranks(2, half_precision, kind)


def saved_bytes() -> tuple[list[int], bool]:
    """Bytes that one rank keeps for the backward pass, against a block's; the memory format."""
    x = hs.shard(torch.randn(2, 4, 8, 8, 8), hs.Grid(depth=2)).requires_grad_()
    x = (x * 1).contiguous(memory_format=torch.channels_last_3d)
    kept: list[int] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.append(t.nbytes)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = F.group_norm(x, 2, torch.ones(4), torch.ones(4))
    return [sum(kept), x.local.nbytes], y.is_contiguous(memory_format=torch.channels_last_3d)


def test_what_is_saved_and_the_memory_format() -> None:
    (kept, block), kept_format = run_ranks(2, saved_bytes)[0]
    assert block <= kept <= 1.05 * block
    assert kept_format


def refused(case: str) -> None:
    grid = hs.Grid(depth=2)
    x = hs.shard(torch.randn(2, 4, 6, 4, 4), grid)
    {
        "groups": lambda: F.group_norm(x, 3),
        "cut weight": lambda: F.instance_norm(x, weight=hs.shard(torch.ones(4), grid)),
        "cut statistics": lambda: F.instance_norm(x, *[hs.shard(torch.ones(4), grid)] * 2),
        "cut weight alone": lambda: F.batch_norm(
            torch.ones(2, 4, 3), None, None, hs.shard(torch.ones(4), grid), training=True
        ),
        "a row": lambda: F.batch_norm(hs.shard(torch.ones(2), grid), None, None, training=True),
        "one value": lambda: F.instance_norm(hs.shard(torch.ones(2, 3, 1), hs.Grid(data=2))),
        "no channels": lambda: F.group_norm(hs.shard(torch.ones(2), grid), 1),
    }[case]()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("groups", "4 channels do not make 3 groups"),
        ("cut weight", "weight, bias and running statistics are ordinary tensors"),
        ("cut statistics", "instance_norm: the input is cut, weight, bias and running stat"),
        ("cut weight alone", "batch_norm: the input is cut, weight, bias and running stat"),
        ("a row", "batch_norm needs a batch and a channel dim"),
        ("one value", "more than 1 spatial element"),
        ("no channels", "needs a batch and a channel dim"),
    ],
)
def test_what_is_refused(case: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_ranks(2, refused, case)


def test_second_derivatives_of_few_values() -> None:
    """Torch computes them, and may ask for no gradient of the result itself."""
    found = []
    for cut in (False, True):
        leaf = torch.linspace(-1, 1, 48).view(3, 2, 2, 4).square().requires_grad_()
        weight = torch.ones(2).requires_grad_()
        y = F.group_norm(hs.shard(leaf, hs.Grid()) if cut else leaf, 1, weight)
        (first,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
        found.append((first, *torch.autograd.grad(first.square().sum(), (leaf, weight))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a)


def test_a_view_with_odd_strides() -> None:
    """Torch's batch norm takes a view of a batch of one for another memory format."""
    x = torch.randn(1, 4, 3, 5, 6, dtype=torch.float64)
    gradient = torch.randn_like(x)
    last = gradient.contiguous(memory_format=torch.channels_last_3d)
    found = []
    for g in (gradient, last, last.as_strided(x.shape, (1, *last.stride()[1:]))):
        leaf = x.clone().requires_grad_()
        x_cut = hs.shard(leaf, hs.Grid())
        F.batch_norm(x_cut, None, None, torch.ones(4).double(), training=True).local.backward(g)
        found.append(leaf.grad)
    assert distance(found[1], found[0]) <= 1e-12
    assert distance(found[2], found[0]) <= 1e-12


def gradients_by_running_statistics() -> list[torch.Tensor]:
    """Of an instance norm in evaluation, of one sample a rank, from a gradient channels last."""
    torch.manual_seed(0)
    serial = torch.randn(2, 4, 6, 4, 4)
    weight, bias = torch.randn(4), torch.randn(4)
    upstream = torch.randn(2, 4, 6, 4, 4).contiguous(memory_format=torch.channels_last_3d)
    running = torch.randn(4), torch.rand(4) + 0.5
    found = []
    for x, g in ((serial, upstream), [hs.shard(t, hs.Grid(data=2)) for t in (serial, upstream)]):
        x = x.detach().requires_grad_()
        y = F.instance_norm(x, *running, weight, bias, use_input_stats=False)
        (y * g).sum().backward()
        assert x.grad is not None
        found.append(x.grad.full() if isinstance(x, hs.Sharded) else x.grad)
    return found


def test_instance_norm_in_evaluation_takes_a_gradient_channels_last() -> None:
    for expected, mine in run_ranks(2, gradients_by_running_statistics):
        torch.testing.assert_close(mine, expected)
