"""Pixel shuffle and its inverse equal the serial ones (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {"spatial": {"pixel_shuffle", "pixel_unshuffle"}}


def shuffle(x: Any, factor: int) -> Any:
    return F.pixel_shuffle(x, factor)


def unshuffle(x: Any, factor: int) -> Any:
    return F.pixel_unshuffle(x, factor)


@st.composite
def examples(draw: st.DrawFn, ranks: int, down: bool) -> Example:
    """Factors 1 to 3; for the way down, cuts through the squares and fewer squares than ranks."""
    grid, factor = draw(grids(ranks)), draw(st.integers(1, 3))
    if down:
        extents = [factor * -(-draw(st.integers(p, p + 9)) // factor) for p in parts_of(grid, 2)]
        channels = draw(st.integers(1, 3))
    else:
        extents = [draw(st.integers(p, p + 5)) for p in parts_of(grid, 2)]
        channels = factor * factor * draw(st.integers(1, 2))
    return Example(
        grid=grid,
        shape=(draw(st.integers(1, 3)), channels, *extents),
        options={"factor": factor},
        dtype=draw(dtypes),
        channels_last=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_pixel_shuffle(ranks: int) -> None:
    run_ranks(ranks, compare, shuffle, draw_examples(examples(ranks, down=False), 25))


@pytest.mark.parametrize("ranks", RANKS)
def test_any_pixel_unshuffle(ranks: int) -> None:
    run_ranks(ranks, compare, unshuffle, draw_examples(examples(ranks, down=True), 25))


def cut_of_the_shuffled() -> tuple[int, ...]:
    x = hs.shard(torch.randn(1, 4, 7, 4), hs.Grid(height=2))
    cut = torch.nn.PixelShuffle(2)(x).partition.cuts[2]
    assert cut is not None
    return cut.bounds


def test_the_cut_stays_where_it_was() -> None:
    assert run_ranks(2, cut_of_the_shuffled) == [(0, 8, 14)] * 2


def refused(case: str) -> None:
    grid = hs.Grid(height=2)
    if case == "volume":
        F.pixel_shuffle(hs.shard(torch.randn(1, 8, 4, 4, 4), grid), 2)
    elif case == "channels":
        F.pixel_shuffle(hs.shard(torch.randn(1, 3, 4, 4), grid), 2)
    elif case == "extent":
        F.pixel_unshuffle(hs.shard(torch.randn(1, 3, 7, 4), grid), 2)


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ("volume", hs.LayoutError, "pixel_shuffle needs a batched input of 4 dims"),
        ("channels", RuntimeError, "divisible"),
        ("extent", hs.LayoutError, "divisible by 2"),
    ],
)
def test_what_is_refused(case: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_ranks(2, refused, case)
