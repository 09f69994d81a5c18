"""Batch normalisation equals the serial one, or one per replica (tier: a few gloo ranks)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

import hyperslab as hs
from tests.ops.serial import (
    RANKS,
    TOLERANCE,
    Example,
    compare,
    distance,
    draw_examples,
    dtypes,
    grids,
    parts_of,
)
from tests.ranks import run_ranks

COVERS = {"normalization": {"batch_norm"}}


def batch_norm(x: Any, weight: Any, bias: Any, **options: Any) -> Any:
    """The running statistics join the output, so that they are compared as well."""
    channels = x.shape[1]
    mean = torch.linspace(-1, 1, channels, dtype=x.dtype)
    var = torch.linspace(0.5, 2, channels, dtype=x.dtype)
    y = F.batch_norm(x, mean, var, weight, bias, **options)
    shape = [1, channels] + [1] * (x.dim() - 2)
    return y + mean.view(shape) + 3 * var.view(shape)


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    n = draw(st.sampled_from([0, 1, 2, 3, 3]))
    grid = draw(grids(ranks))
    extents = [draw(st.integers(parts, parts + 5)) for parts in parts_of(grid, n)] if n else []
    channels = draw(st.integers(1, 4))
    affine = draw(st.sampled_from(["both", "both", "none", "weight", "bias"]))
    samples = draw(st.integers(2, 5))
    dtype = draw(dtypes)
    if samples * math.prod(extents) == 2:  # their gradient is what eps leaves: half the digits
        dtype = torch.float64
    return Example(
        grid=grid,
        shape=(samples, channels, *extents),
        weights=(
            (channels,) if affine in ("both", "weight") else None,
            (channels,) if affine in ("both", "bias") else None,
        ),
        options={
            "training": draw(st.sampled_from([True, True, False])),
            "momentum": draw(st.sampled_from([0.1, 0.7, 1.0])),
            "eps": draw(st.sampled_from([1e-5, 1e-2])),
        },
        dtype=dtype,
        channels_last=n > 1 and draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_batch_norm(ranks: int) -> None:
    run_ranks(ranks, compare, batch_norm, draw_examples(examples(ranks), 28))


def module(momentum: float | None, dtype: torch.dtype) -> nn.BatchNorm3d:
    norm = nn.BatchNorm3d(3, momentum=momentum).to(dtype)
    with torch.no_grad():
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.normal_(norm.bias)
    return norm


def steps(cut: Any, norm: nn.BatchNorm3d, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        x = torch.randn(4, 3, 5, 6, 7, generator=generator, dtype=torch.float64).to(dtype)
        y = norm(cut(x))
    norm.eval()
    z = norm(cut(x))
    found = {"training": y, "evaluation": z}
    found = {k: v.full() if isinstance(v, hs.Sharded) else v for k, v in found.items()}
    return {k: v.detach() for k, v in found.items()} | dict(norm.named_buffers())


def modules(axes: dict[str, int], momentum: float | None, dtype: torch.dtype) -> dict[str, float]:
    grid = hs.Grid(**axes)
    torch.manual_seed(1)
    expected = steps(lambda x: x, module(momentum, dtype), dtype)
    torch.manual_seed(1)
    found = steps(lambda x: hs.shard(x, grid), module(momentum, dtype), dtype)
    return {key: distance(found[key].double(), value.double()) for key, value in expected.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("axes", [{"depth": 3}, {"data": 2, "height": 2}])
def test_module_over_three_steps(
    axes: dict[str, int], momentum: float | None, dtype: torch.dtype
) -> None:
    for found in run_ranks(3 if "depth" in axes else 4, modules, axes, momentum, dtype):
        assert max(found.values()) <= TOLERANCE[dtype], found


def several_calls() -> list[float]:
    """Of a whole tensor and of cut ones, in both modes, before one backward pass."""
    found = []
    for grid in (None, hs.Grid(depth=2)):
        torch.manual_seed(1)
        norm = module(0.1, torch.float64)
        small, large = torch.randn(2, 3, 4, 3, 2).double(), torch.randn(2, 3, 8, 3, 2).double()
        given: list[Any] = [small, large, small, large]
        if grid is not None:
            given = [hs.shard(x, grid) for x in given]
            given[0] = hs.gather(given[0], "depth")
            hs.parallelize(norm, grid)
        total: Any = 0.0
        for x, training in zip(given, [True, True, False, True], strict=True):
            total = total + norm.train(training)(x).pow(3).sum()
        total.backward()
        found.append([norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var])
    return [distance(a, b) for a, b in zip(*found, strict=True)]


def test_calls_between_which_running_statistics_move() -> None:
    assert max(map(max, run_ranks(2, several_calls))) <= 1e-10


def far_from_zero(dtype: torch.dtype, ratio: float) -> float:
    """Error of the running variance of values whose mean is ``ratio`` times their deviation."""
    grid = hs.Grid(depth=4)
    x = (torch.randn(2, 3, 9, 8, 8, dtype=torch.float64) + ratio).to(dtype)
    mean, var = torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype)
    F.batch_norm(hs.shard(x, grid), mean, var, training=True, momentum=1.0)
    exact = x.double().var(dim=[0, 2, 3, 4])
    return distance(var.double(), exact)


@pytest.mark.parametrize(
    ("dtype", "ratio", "error"),
    [
        (torch.float32, 1e3, 1e-5),
        (torch.float32, 1e4, 1e-4),
        (torch.float64, 1e4, 1e-10),
        (torch.float64, 1e7, 1e-8),
    ],
)
def test_nothing_cancels_far_from_zero(dtype: torch.dtype, ratio: float, error: float) -> None:
    assert max(run_ranks(4, far_from_zero, dtype, ratio)) <= error


def replica_reference(
    x: torch.Tensor, replicas: int, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each replica's samples normalised by themselves; running statistics are their mean."""
    outputs, means, variances = [], [], []
    for part in x.tensor_split(replicas):
        mean, var = torch.zeros(3, dtype=x.dtype), torch.ones(3, dtype=x.dtype)
        outputs.append(F.batch_norm(part, mean, var, weight, bias, True, 0.3))
        means.append(mean)
        variances.append(var)
    return torch.cat(outputs), torch.stack(means).mean(0), torch.stack(variances).mean(0)


def replica(axes: dict[str, int], samples: int) -> dict[str, float]:
    grid = hs.Grid(**axes)
    norm = nn.BatchNorm3d(3, momentum=0.3).double()
    nn.init.uniform_(norm.weight, 0.5, 2)
    data = torch.randn(samples, 3, 5, 4, 6, dtype=torch.float64)
    r = torch.randn_like(data)
    x, weight, bias = (v.detach().clone().requires_grad_() for v in (data, norm.weight, norm.bias))
    y, mean, var = replica_reference(x, axes.get("data", 1), weight, bias)
    (y * r).sum().backward()
    z = data.requires_grad_()
    hs.parallelize(norm, grid, batch_norm="replica")
    out = norm(hs.shard(z, grid))
    (out.full() * r).sum().backward()
    pairs = {
        "output": (out.full(), y),
        "mean": (norm.running_mean, mean),
        "var": (norm.running_var, var),
        "dx": (z.grad, x.grad),
        "dw": (norm.weight.grad, weight.grad),
        "db": (norm.bias.grad, bias.grad),
    }
    return {key: distance(a, b) for key, (a, b) in pairs.items()}


@pytest.mark.parametrize(
    ("axes", "samples"),
    [
        ({"data": 2, "depth": 2}, 4),
        ({"data": 3}, 7),
        ({"data": 2, "height": 2, "width": 2}, 5),
        ({"depth": 2}, 2),
    ],
)
def test_statistics_per_replica(axes: dict[str, int], samples: int) -> None:
    ranks = torch.tensor(list(axes.values())).prod().item()
    for found in run_ranks(int(ranks), replica, axes, samples):
        assert max(found.values()) <= 1e-10, found


def one_value() -> None:
    F.batch_norm(hs.shard(torch.randn(1, 3), hs.Grid(depth=2)), None, None, training=True)


def test_a_single_value_per_channel_has_no_variance() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        run_ranks(2, one_value)


def test_evaluation_of_a_view_with_odd_strides() -> None:
    """Torch's batch norm takes a view of a batch of one for another memory format."""
    x, gradient = torch.randn(2, 1, 4, 3, 5, 6, dtype=torch.float64)
    last = gradient.contiguous(memory_format=torch.channels_last_3d)
    odd = last.as_strided(x.shape, (1, *last.stride()[1:]))
    found = []
    for g in (gradient, odd):
        leaf, weight = x.clone().requires_grad_(), torch.ones(4).double().requires_grad_()
        mean, var = torch.zeros(4).double(), torch.ones(4).double()
        F.batch_norm(hs.shard(leaf, hs.Grid()), mean, var, weight).local.backward(g)
        found.append((leaf.grad, weight.grad))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
