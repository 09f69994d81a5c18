"""Flips, rolls and turns equal the serial ones (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.recut import recut
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {"spatial": {"flip", "fliplr", "flipud", "roll", "rot90"}}


def turned(x: Any, *, how: str, args: tuple[Any, ...], method: bool, seed: int) -> Any:
    y = recut(x, seed)
    return getattr(y, how)(*args) if method else getattr(torch, how)(y, *args)


@st.composite
def turns(draw: st.DrawFn, ranks: int) -> Example:
    n = draw(st.sampled_from([0, 1, 2, 3, 3]))
    grid = draw(grids(ranks))
    least = [grid["data"], 1, *(parts_of(grid, n) if n else ())]
    shape = tuple(draw(st.integers(low, low + 4)) for low in least)
    order = draw(st.permutations(range(len(shape))))
    some = list(order[: draw(st.integers(1, len(shape)))])
    how = draw(st.sampled_from(["flip", "roll", "rot90", "fliplr", "flipud"]))
    args: tuple[Any, ...] = ()
    if how == "flip":
        args = (some,)
    elif how == "roll":
        shifts = [draw(st.integers(-9, 9)) for _ in some]
        args = (shifts, some) if len(some) > 1 else (shifts[0], some[0] - len(shape))
    elif how == "rot90":
        args = (draw(st.integers(-4, 4)), order[:2])
    return Example(
        grid=grid,
        shape=shape,
        options={
            "how": how,
            "args": args,
            "method": draw(st.booleans()),
            "seed": draw(st.integers(0, 5)),
        },
        dtype=draw(dtypes),
        channels_last=n > 1 and draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_turn(ranks: int) -> None:
    run_ranks(ranks, compare, turned, draw_examples(turns(ranks), 28))


def copies() -> list[Any]:
    """The cut stays, torch's results are copies, and without dims all elements roll as one row."""
    full = torch.randn(2, 3, 5, 4)
    x = hs.shard(full, hs.Grid(height=2))
    assert x.flip(2).partition == x.roll(1, 2).partition == x.partition
    for y in (x.flip(0), x.flip(2), x.roll(0, 2), x.roll(1, 1), x.rot90(0), x.flip(()), x.rot90(4)):
        y.mul_(2)
    assert torch.equal(x.full(), full)
    assert torch.equal(x.roll(7).full(), full.roll(7))
    return [x.flip(0, -1).full(), full.flip(0, -1)]


def test_results_are_copies() -> None:
    for found, expected in run_ranks(2, copies):
        assert torch.equal(found, expected)


def test_what_is_refused() -> None:
    x = hs.shard(torch.randn(2, 3), hs.Grid())
    with pytest.raises(IndexError, match="flip: dim 2"):
        x.flip(2)
    with pytest.raises(ValueError, match="a dim appears twice"):
        x.flip(0, -2)
    with pytest.raises(ValueError, match="2 shifts for 1 dims"):
        x.roll((1, 2), 0)
