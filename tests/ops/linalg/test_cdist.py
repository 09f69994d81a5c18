"""Distances of vectors equal the serial ones (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hyperslab as hs
from tests.ops.serial import Example, compare
from tests.ranks import run_ranks

COVERS = {"linalg": {"cdist"}}


def nearest(x: Any, codes: torch.Tensor, *, p: float, by: str) -> Any:
    """Of voxels to a codebook, of rows that stay cut, or of one volume's voxels to another's."""
    if by == "codebook":
        vectors = x.permute(0, 2, 3, 4, 1)
        return torch.cdist(vectors.flatten(1, 3), codes, p)
    if by == "rows":
        return torch.cdist(x.mean(3), codes.expand(5, *codes.shape), p)
    vectors = x.flatten(2).transpose(1, 2)
    return torch.cdist(vectors, vectors.flip(1) + 0.5, p)


@pytest.mark.parametrize("p", [2.0, 1.0])
@pytest.mark.parametrize("by", ["codebook", "rows", "each other"])
def test_equal_to_serial(by: str, p: float) -> None:
    shape, width = ((4, 3, 5, 4, 2), 3) if by != "rows" else ((4, 5, 6, 4, 3), 3)
    cases = [
        Example(grid=grid, shape=shape, weights=((7, width),), options={"p": p, "by": by})
        for grid in ({"data": 2, "depth": 2}, {"depth": 2, "height": 2}, {"data": 4})
    ]
    run_ranks(4, compare, nearest, cases)


def formula() -> float:
    """Torch takes a product of matrices for many vectors, which has fewer digits: the same here."""
    a = torch.randn(30, 3, generator=torch.Generator().manual_seed(0)) + 100
    b = a[:20] + 0.1
    found = torch.cdist(hs.shard(a, hs.Grid(data=2)), b).full()
    return ((found - torch.cdist(a, b)).norm() / found.norm()).item()


def test_the_formula_is_that_of_the_whole() -> None:
    assert max(run_ranks(2, formula)) < 1e-6


def refused() -> None:
    x = hs.shard(torch.randn(2, 3, 5, 4), hs.Grid(width=2), channels=False)
    with pytest.raises(hs.LayoutError, match="cdist needs the whole of a dim that is cut"):
        torch.cdist(x, torch.randn(6, 4))
    with pytest.raises(hs.LayoutError, match="two dims or more"):
        torch.cdist(x, torch.randn(4))


def test_cut_numbers_are_refused() -> None:
    run_ranks(2, refused)
