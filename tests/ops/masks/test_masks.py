"""Masks choose the serial elements in the serial order (tier: a few gloo ranks)."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from tests.ops.serial import distance
from tests.ranks import run_ranks

COVERS = {"masks": {"masked_select", "nonzero", "argwhere", "unique"}}

SHAPE = (2, 3, 7, 5, 4)
GRIDS = [{"depth": 2}, {"data": 2, "depth": 2}, {"depth": 2, "width": 2}, {"depth": 4}]


def read(x: Any) -> list[Any]:
    """Masks of all dims, the first, the last, merged ones, ordinary ones, and of nothing."""
    every, some = x > 0.4, x[:, 0] > 0.6
    ordinary = torch.arange(140).view(7, 5, 4) % 3 == 0
    near_the_end = torch.zeros_like(every)
    near_the_end[:, :, -1] = True  # of which the first ranks have nothing
    return [
        x[every],
        x[every & False],
        x[near_the_end],
        x.movedim(1, -1)[some],
        x.flatten()[x.flatten() > 1],
        x.flatten(2)[:, :, ordinary.flatten()],
        x[:, :, ordinary],
        x[..., ordinary],
        x[:, :, ordinary[:, 0, 0]],
        x.masked_select(every),
        torch.masked_select(x, some[:, None]),
        torch.ones(SHAPE, dtype=x.dtype)[every] * x.mean(),
        every[every] * x.mean(),
        x.amax((2, 3, 4))[x.amin((2, 3, 4)) > -2.5],
        F.relu(x[:, 1])[some].mean() * x.sum(),
    ]


def write(x: Any) -> list[Any]:
    every, some = x > 0.4, x[:, 0] > 0.6
    scaled, last, mixed, filled, ordinary = (x * 1 for _ in range(5))
    scaled[every] *= 2
    last = last.movedim(1, -1)
    last[some] = last[some] @ torch.arange(9, dtype=x.dtype).view(3, 3)
    mixed = mixed.movedim(1, -1)
    mixed[some] = torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype)
    filled = filled.movedim(1, -1)
    filled[some] = 0.5
    ordinary[torch.arange(840).view(SHAPE) % 5 == 0] = torch.arange(168, dtype=x.dtype)
    return [scaled, last, mixed, filled, ordinary]


def places(x: Any) -> list[torch.Tensor]:
    found = [(x > 1).nonzero(), torch.argwhere(x[:, 0] > 1), (x > 99).nonzero(), x.int().nonzero()]
    found += [*torch.where(x > 1), *(x[0, 0] > 0).nonzero(as_tuple=True)]
    labels = (x * 3).int()
    return [*found, labels.unique(), torch.unique(x > 0), *labels.unique(return_counts=True)]


def whole(y: Any) -> torch.Tensor:
    found: torch.Tensor = y.full() if isinstance(y, hs.Sharded) else y
    return found


def against_serial(axes: dict[str, int]) -> float:
    full = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    leaf = full.detach().clone().requires_grad_()
    far = [0.0]
    for choose in (read, write):
        found, expected = choose(hs.shard(leaf, hs.Grid(**axes)) * 1), choose(full * 1)
        far += [distance(whole(a), b) for a, b in zip(found, expected, strict=True)]
        sum(whole(y).square().sum() for y in found).backward()
        sum(y.square().sum() for y in expected).backward()
    cut = hs.shard(leaf.detach(), hs.Grid(**axes))
    for a, b in zip(places(cut), places(full), strict=True):
        assert torch.equal(a, b)
    return max(*far, distance(leaf.grad, full.grad))


@pytest.mark.parametrize("axes", GRIDS, ids=str)
def test_equal_to_serial(axes: dict[str, int]) -> None:
    assert max(run_ranks(math.prod(axes.values()), against_serial, axes)) < 1e-12


def refused(case: str) -> None:
    x = hs.shard(torch.randn(SHAPE), hs.Grid(depth=2))
    if case == "traced":
        with patch.object(hs.Grid, "has_values", False):
            x[x > 0]
    elif case == "inverse":
        x.unique(return_inverse=True)
    elif case == "too few":
        x[x > 0] = torch.zeros(3)
    else:
        x[:, :, x[0, 0] > 0, None]


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ("traced", hs.UnsupportedOp, "are not known to a trace(.|\\n)*torch.where or masked_fill"),
        ("inverse", hs.UnsupportedOp, "lists values and counts alone"),
        ("too few", RuntimeError, "expanded size"),
        ("beside another", hs.UnsupportedOp, "a cut index goes alone"),
    ],
)
def test_what_is_refused(case: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_ranks(2, refused, case)
