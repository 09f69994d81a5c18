"""Histograms of cut tensors (tier: a few gloo ranks)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import hyperslab as hs
from hyperslab.geometry import Cut, Partition
from tests.ranks import run_ranks

COVERS = {"reductions": {"histc", "bincount"}}
LIMITS: list[dict[str, Any]] = [
    {}, {"bins": 7}, {"bins": 5, "min": -1, "max": 1}, {"bins": 4, "min": 0, "max": 3},
]  # fmt: skip


def counted(axes: dict[str, int]) -> None:
    grid = hs.Grid(**axes)
    for dtype in (torch.float32, torch.float64):
        full = torch.randn(4, 3, 7, 5, dtype=dtype, requires_grad=True)
        x = hs.shard(full, grid)
        for limits in LIMITS:
            found = torch.histc(x, **limits)
            assert type(found) is torch.Tensor
            assert torch.equal(found, torch.histc(full, **limits))
            assert torch.equal(x.detach().histc(**limits), found)
        same = hs.shard(torch.ones(4, 3, 7, 5), grid)
        assert torch.equal(torch.histc(same, 5), torch.histc(torch.ones(4, 3, 7, 5), 5))


@pytest.mark.parametrize("axes", [{"data": 2}, {"height": 3}, {"data": 2, "width": 2}], ids=str)
def test_equal_to_serial(axes: dict[str, int]) -> None:
    ranks = 1
    for extent in axes.values():
        ranks *= extent
    run_ranks(ranks, counted, axes)


def classes_counted(axes: dict[str, int]) -> None:
    full = torch.randint(0, 5, (4, 7, 6, 3))
    heights = torch.rand(4, 7, 6, 3, dtype=torch.float64)
    for channels in (True, False):
        x = hs.shard(full, hs.Grid(**axes), channels=channels)
        weights = hs.shard(heights, x.grid, channels=channels)
        for least in (0, 9):
            found = torch.bincount(x.flatten(), minlength=least)
            assert type(found) is torch.Tensor
            assert torch.equal(found, full.flatten().bincount(minlength=least))
            expected = torch.bincount(full.flatten(), heights.flatten(), least)
            for y, own in ((x, weights), (x, heights), (full, weights)):
                found = torch.bincount(y.flatten(), own.flatten(), least)
                assert torch.allclose(found, expected, rtol=1e-12)
        with pytest.raises(hs.LayoutError, match="negative numbers, of which the least is -3"):
            torch.bincount((x - 3).flatten())
        with pytest.raises(hs.LayoutError, match="takes one dim"):
            torch.bincount(x)
        with pytest.raises(hs.LayoutError, match="takes whole numbers"):
            torch.bincount(weights.flatten()[:1])  # one rank has an element
        with pytest.raises(RuntimeError, match="minlength should be >= 0"):
            torch.bincount(x.flatten(), minlength=-1)


@pytest.mark.parametrize("axes", [{"data": 2}, {"height": 3}, {"depth": 2, "width": 2}], ids=str)
def test_counts_of_classes(axes: dict[str, int]) -> None:
    run_ranks(math.prod(axes.values()), classes_counted, axes)


def classes_of_one_rank() -> torch.Tensor:
    """The other one has nothing to count."""
    x = hs.shard(torch.arange(3.0).view(1, 1, 3, 1), hs.Grid(height=2))
    y = x.redistribute(Partition(x.partition.shape, (None, None, Cut("height", (0, 3, 3)), None)))
    return torch.bincount(y.long().view(-1), y.double().view(-1))


def test_a_rank_without_elements() -> None:
    for found in run_ranks(2, classes_of_one_rank):
        assert torch.equal(found, torch.arange(3.0, dtype=torch.float64))
