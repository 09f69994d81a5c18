"""Sampling of volumes at given places (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.recut import recut
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {"spatial": {"grid_sample", "affine_grid"}}


def sampled(x: Any, weight: Any, *, whole: bool, seed: int, **options: Any) -> Any:
    """At places that follow from the volume itself, some of them outside."""
    n = x.dim() - 2
    last = [0, *range(2, n + 2), 1]
    places = torch.tanh(torch.einsum("oi,bi...->bo...", weight, x)).permute(last) * 1.2
    if isinstance(x, hs.Sharded):
        x = hs.gather(x, ("depth", "height", "width"))
        places = hs.gather(places, ("depth", "height", "width")) if whole else recut(places, seed)
    return F.grid_sample(x, places, **options)


@st.composite
def volumes(draw: st.DrawFn, ranks: int) -> Example:
    n = draw(st.sampled_from([2, 3]))
    grid = draw(grids(ranks).filter(lambda g: n == 3 or g["depth"] == 1))
    extents = [draw(st.integers(p, p + 4)) for p in parts_of(grid, n)]
    modes = ["bilinear", "nearest", "bicubic"] if n == 2 else ["bilinear", "nearest"]
    return Example(
        grid=grid,
        shape=(draw(st.integers(grid["data"], grid["data"] + 1)), 2, *extents),
        weights=((n, 2),),
        options={
            "whole": draw(st.booleans()),
            "seed": draw(st.integers(0, 9)),
            "mode": draw(st.sampled_from(modes)),
            "padding_mode": draw(st.sampled_from(["zeros", "border", "reflection"])),
            "align_corners": draw(st.booleans()),
        },
        dtype=draw(dtypes),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_sampling(ranks: int) -> None:
    run_ranks(ranks, compare, sampled, draw_examples(volumes(ranks), 28))


def transformed(x: Any, weight: Any, *, extent: int, align: bool) -> Any:
    """Each sample by a matrix of its own, as a spatial transformer has it."""
    theta = (x.mean((2, 3, 4)) @ weight).unflatten(1, (3, 4))
    size = [x.shape[0], x.shape[1], extent, 3, 2]
    places = F.affine_grid(theta, size, align_corners=align)
    whole = hs.gather(x, ("depth", "height", "width")) if isinstance(x, hs.Sharded) else x
    return F.grid_sample(whole, places, align_corners=align)


@pytest.mark.parametrize("grid", [{"data": 2}, {"depth": 2}, {"data": 2, "width": 2}], ids=str)
def test_affine(grid: dict[str, int]) -> None:
    ranks = grid.get("data", 1) * grid.get("depth", 1) * grid.get("width", 1)
    examples = [
        Example(grid, (3, 2, 4, 5, 3), ((2, 12),), {"extent": extent, "align": align})
        for extent, align in ((4, True), (2, False))
    ]
    run_ranks(ranks, compare, transformed, examples)


def refused(case: str) -> None:
    grid = hs.Grid(width=2)
    x, places = torch.randn(2, 1, 3, 4, 6), torch.rand(2, 3, 4, 6, 3)
    if case == "volume":
        F.grid_sample(hs.shard(x, grid), places, align_corners=False)
    elif case == "batch":
        F.grid_sample(x, hs.shard(places[:1], grid), align_corners=False)
    elif case == "matrix":
        theta = hs.shard(torch.randn(2, 3, 4), grid)
        F.affine_grid(theta, [2, 1, 3, 4, 6], align_corners=False)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("volume", r"(?s)grid_sample needs the whole of a dim .*gather\(x, \('width',\)\)"),
        ("batch", "as many places as samples"),
        ("matrix", "a whole matrix for each of 2 samples"),
    ],
)
def test_what_is_refused(case: str, message: str) -> None:
    with pytest.raises(hs.LayoutError, match=message):
        run_ranks(2, refused, case)
