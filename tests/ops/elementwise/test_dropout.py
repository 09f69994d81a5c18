"""Dropout: torch's own where nothing is cut in space, one mask on every grid elsewhere
(tier: a few gloo ranks).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.geometry import Box
from hyperslab.kernels.random_bits import uniform_bits
from hyperslab.kernels.registry import choose_as_if_on
from tests.ranks import run_ranks

COVERS = {
    "elementwise": {
        "dropout",
        "dropout_",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "feature_dropout",
    }
}

GRIDS = [
    {"depth": 1},
    {"width": 2},
    {"data": 2, "height": 2},
    {"depth": 2, "height": 2, "width": 2},
]


def size(axes: dict[str, int]) -> int:
    return math.prod(axes.values())


def feature_dropout(x: Any, p: float) -> Any:
    return torch.feature_dropout(x, p, True)


def serial_pair(function: Any, shape: tuple[int, ...], axes: dict[str, int]) -> bool:
    """With the same seed: plain torch on the whole tensor, and the cut one; forward, backward."""
    grid, x = hs.Grid(**axes), torch.randn(shape, requires_grad=True)
    torch.manual_seed(5)
    expected = function(x, 0.3)
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    torch.manual_seed(5)
    found = function(hs.shard(x, grid), 0.3)
    found.full().sum().backward()
    assert 0 < (expected == 0).sum() < expected.numel()
    return torch.equal(found.full(), expected) and torch.allclose(x.grad, gradient)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (F.dropout, (5, 70)),
        (F.dropout3d, (4, 9, 3, 4, 5)),
        (F.dropout2d, (4, 9, 4, 5)),
        (F.dropout1d, (4, 9, 5)),
        (feature_dropout, (4, 9, 5)),
    ],
)
def test_it_is_torchs_own_without_a_mask_in_space(function: Any, shape: tuple[int, ...]) -> None:
    for axes in GRIDS:
        if axes.get("depth", 1) == 1 or len(shape) != 4:
            assert all(run_ranks(size(axes), serial_pair, function, shape, axes)), axes


def volume(axes: dict[str, int], inplace: bool, training: bool) -> torch.Tensor:
    x = torch.ones(3, 4, 6, 7, 5, dtype=torch.float64)
    torch.manual_seed(7)
    first = F.dropout(hs.shard(x.clone(), hs.Grid(**axes)), 0.4, training, inplace)
    second = F.dropout(hs.shard(x.clone(), hs.Grid(**axes)), 0.4, training, inplace)
    return torch.stack([first.full(), second.full()])


@pytest.mark.parametrize("inplace", [False, True])
def test_the_mask_of_a_volume_is_the_same_on_every_grid(inplace: bool) -> None:
    (expected,) = run_ranks(1, volume, {}, inplace, True)
    assert not torch.equal(expected[0], expected[1])
    assert set(expected.unique().tolist()) == {0.0, 1 / 0.6}
    for axes in GRIDS[1:]:
        assert all(
            torch.equal(y, expected) for y in run_ranks(size(axes), volume, axes, inplace, True)
        )


def test_evaluation_drops_nothing() -> None:
    assert torch.equal(
        run_ranks(2, volume, {"width": 2}, False, False)[1], torch.ones(2, 3, 4, 6, 7, 5)
    )


def in_place() -> list[bool]:
    """torch.dropout_ changes its argument."""
    x = hs.shard(torch.ones(4, 50), hs.Grid(data=2))
    y = torch.dropout_(x, 0.5, True)
    return [y is x, bool((x.full() == 0).any())]


def test_in_place() -> None:
    assert run_ranks(2, in_place) == [[True, True]] * 2


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_rate_and_independence_of_neighbours(p: float) -> None:
    shape = (2, 4, 32, 32, 32)
    bits = uniform_bits(shape, Box.whole(shape), 11, torch.device("cpu"))
    drop = (bits < int(p * 2**31)).double()
    deviation = (p * (1 - p) / drop.numel()) ** 0.5
    assert abs(drop.mean().item() - p) < 5 * deviation
    centred = drop - p
    for dim in range(5):
        n = shape[dim] - 1
        pairs = centred.narrow(dim, 0, n) * centred.narrow(dim, 1, n)
        assert abs(pairs.mean().item()) < 5 * p * (1 - p) / pairs.numel() ** 0.5


def test_bits_depend_on_the_global_index_only() -> None:
    shape = (3, 2, 5, 6, 7)
    whole = uniform_bits(shape, Box.whole(shape), 3, torch.device("cpu"))
    box = Box((1, 0, 2, 1, 3), (3, 2, 5, 4, 7))
    assert torch.equal(uniform_bits(shape, box, 3, torch.device("cpu")), whole[box.slices()])
    assert not torch.equal(uniform_bits(shape, Box.whole(shape), 4, torch.device("cpu")), whole)


def extremes() -> list[float]:
    x = hs.shard(torch.ones(2, 2, 4, 4, 4), hs.Grid(depth=2))
    return [F.dropout(x, 1.0).full().sum().item(), F.dropout(x, 0.0).full().sum().item()]


def test_all_or_nothing() -> None:
    assert run_ranks(2, extremes) == [[0.0, 256.0]] * 2


def modules(p: float) -> None:
    x = hs.shard(torch.ones(2, 2, 4, 4, 4), hs.Grid(depth=2))
    torch.manual_seed(hs.Grid(depth=2).rank)
    nn.Dropout(p)(x)


def test_ranks_in_different_random_states_are_told() -> None:
    with pytest.raises(hs.CommError, match=r"call torch\.manual_seed"):
        run_ranks(2, modules, 0.5)


def refused(case: str) -> None:
    x = hs.shard(torch.ones(2, 2, 4, 4), hs.Grid(height=2))
    if case == "rate":
        F.dropout(x, 1.5)
    else:
        F.dropout1d(x, 0.5)


@pytest.mark.parametrize(
    ("case", "message"), [("rate", "between 0 and 1"), ("unbatched", "needs a batched input")]
)
def test_what_is_refused(case: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_ranks(2, refused, case)


def as_on(kind: str, p: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Result, gradient and second gradient of a volume; and the bytes that autograd keeps."""
    grid = hs.Grid(depth=2, data=2)
    torch.manual_seed(2)
    full = torch.randn(4, 3, 5, 4, 3).to(dtype).requires_grad_()
    kept: list[torch.Tensor] = []
    with choose_as_if_on(kind):
        x = hs.shard(full, grid)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = F.dropout(x, p)
        count = len(kept)
        (gradient,) = torch.autograd.grad(y.square().sum(), full, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), full)
    return [y.full().detach(), gradient.detach(), second, torch.tensor(count)]


@pytest.mark.parametrize("p", [0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_gpu_drops_the_same_and_keeps_nothing(p: float, dtype: torch.dtype) -> None:
    for here, there in zip(
        run_ranks(4, as_on, "cpu", p, dtype), run_ranks(4, as_on, "cuda", p, dtype), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(here[:3], there[:3], strict=True))
        assert here[3] > 0
        assert there[3] == 0
