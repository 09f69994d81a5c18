"""Sampling of volumes at given places (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from hyperslab.ops.sampling import plan_pieces
from tests.ops.recut import recut
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {"sampling": {"grid_sample", "affine_grid"}}


def sampled(
    x: Any, weight: Any, *, reach: float, whole: str, seed: int, fewer: int, **options: Any
) -> Any:
    """At places that follow from the volume itself, some of them outside.

    A ``reach`` of 0 moves nothing, at 0.3 most voxels come from near by, at 2 from anywhere.
    """
    n = x.dim() - 2
    last = [0, *range(2, n + 2), 1]
    field = torch.tanh(torch.einsum("oi,bi...->bo...", weight, x)).permute(last)
    identity = torch.eye(n, n + 1, dtype=x.dtype).expand(len(x), n, n + 1)
    places = field * reach + F.affine_grid(
        identity, list(x.shape), align_corners=options["align_corners"]
    )
    places = places[:, fewer:]
    if isinstance(x, hs.Sharded):
        if whole == "volume":
            x = hs.gather(x, ("depth", "height", "width"))
        if whole == "places":
            places = hs.gather(places, ("depth", "height", "width"))
        x, places = recut(x, seed and seed + 1), recut(places, seed)
    return F.grid_sample(x, places, **options)


@st.composite
def volumes(draw: st.DrawFn, ranks: int) -> Example:
    n = draw(st.sampled_from([2, 3]))
    grid = draw(grids(ranks).filter(lambda g: n == 3 or g["depth"] == 1))
    # One voxel has the same value everywhere, and a gradient that rounding leaves.
    extents = [draw(st.integers(max(p, 2), p + 4)) for p in parts_of(grid, n)]
    modes = ["bilinear", "nearest", "bicubic"] if n == 2 else ["bilinear", "nearest"]
    return Example(
        grid=grid,
        shape=(draw(st.integers(grid["data"], grid["data"] + 1)), 2, *extents),
        weights=((n, 2),),
        options={
            "reach": draw(st.sampled_from([0.0, 0.3, 2.0])),
            "whole": draw(st.sampled_from(["volume", "places", "none", "none"])),
            "seed": draw(st.integers(0, 9)),
            "fewer": draw(st.integers(0, 1)) if min(extents) > 1 + max(grid.values()) else 0,
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
    """Each sample by a matrix of its own, as a spatial transformer has it; changed in place."""
    theta = (x.mean((2, 3, 4)) @ weight).unflatten(1, (3, 4))
    size = [x.shape[0], x.shape[1], extent, 3, 2]
    places = F.affine_grid(theta, size, align_corners=align)
    return F.grid_sample(x, places, align_corners=align).tanh_()


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
    if case == "batch":
        F.grid_sample(x, hs.shard(places[:1], grid), align_corners=False)
    elif case == "matrix":
        theta = hs.shard(torch.randn(2, 3, 4), grid)
        F.affine_grid(theta, [2, 1, 3, 4, 6], align_corners=False)
    elif case == "not a number":
        places[0, 0, 0, 5, 1] = torch.nan
        F.grid_sample(hs.shard(x, grid), places, align_corners=False)
    elif case == "type":
        F.grid_sample(hs.shard(x, grid), places.double(), align_corners=False)
    elif case == "mode":
        F.grid_sample(hs.shard(x, grid), places, mode="bicubic", align_corners=False)


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ("batch", hs.LayoutError, "as many places as samples"),
        ("matrix", hs.LayoutError, "a whole matrix for each of 2 samples"),
        ("not a number", hs.LayoutError, "the coordinates of rank 1 are infinite or not numbers"),
        ("type", RuntimeError, "expected scalar type"),
        ("mode", RuntimeError, "bicubic"),
    ],
)
def test_what_is_refused(case: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_ranks(2, refused, case)


def far_and_near() -> list[tuple[int, int]]:
    """The longest piece of a volume of 16 planes on 4 ranks, for small and for large motion."""
    grid = hs.Grid(depth=4)
    x = hs.shard(torch.rand(1, 1, 16, 3, 3), grid)
    longest = []
    for reads in ((grid.rank * 4, grid.rank * 4 + 5), (0, 16)):
        plans = plan_pieces(
            grid, x.partition, [(min(reads[0], 15), min(reads[1], 16)), (0, 3), (0, 3)]
        )
        longest.append((len(plans), max(plan.wanted.shape[2] for plan in plans)))
    return longest


def test_no_rank_holds_the_volume() -> None:
    """Nearby voxels come in one piece; a rank that reads everything gets it in pieces."""
    found = run_ranks(4, far_and_near)
    assert found[0] == [(1, 5), (2, 8)]
    assert all(each[1] == (2, 8) for each in found)
