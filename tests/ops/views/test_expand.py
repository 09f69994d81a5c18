"""Expanded and repeated tensors equal the serial ones (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.recut import recut
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {
    "views": {
        "expand",
        "expand_as",
        "broadcast_to",
        "broadcast_tensors",
        "repeat",
        "tile",
        "repeat_interleave",
    }
}


def repeated(x: Any, *, how: str, args: tuple[Any, ...], method: bool, seed: int) -> Any:
    y = recut(x, seed)
    return getattr(y, how)(*args) if method else getattr(torch, how)(y, *args)


@st.composite
def repeats(draw: st.DrawFn, ranks: int) -> Example:
    n = draw(st.sampled_from([0, 1, 2, 3, 3]))
    grid = draw(grids(ranks))
    least = [grid["data"], 1, *(parts_of(grid, n) if n else ())]
    shape = tuple(draw(st.integers(low, low + 3)) for low in least)
    ones = [draw(st.integers(1, 3)) if e == 1 else draw(st.sampled_from([e, -1])) for e in shape]
    how = draw(st.sampled_from(["expand", "broadcast_to", "repeat", "tile", "repeat_interleave"]))
    method, front = how in ("expand", "repeat") or draw(st.booleans()), draw(st.integers(0, 1))
    args: tuple[Any, ...] = tuple([2] * front + ones)
    if how in ("repeat", "tile"):
        args = tuple(draw(st.integers(1, 3)) for _ in range(len(shape) + front))
    if how == "repeat_interleave":
        dim = draw(st.integers(0, len(shape) - 1))
        each = [1, *(draw(st.integers(0, 3)) for _ in range(shape[dim] - 1))]
        args = (draw(st.sampled_from([2, torch.tensor(each)])), dim)
    elif how == "broadcast_to" or not method or draw(st.booleans()):
        args = (args,)
    return Example(
        grid=grid,
        shape=shape,
        options={"how": how, "args": args, "method": method, "seed": draw(st.integers(0, 5))},
        dtype=draw(dtypes),
        seed=draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_repetition(ranks: int) -> None:
    run_ranks(ranks, compare, repeated, draw_examples(repeats(ranks), 28))


def gate(x: Any, weight: torch.Tensor) -> Any:
    """As attention over channels: a number for each channel, expanded over the volume."""
    scale = (x.mean((2, 3, 4)) * weight).sigmoid()
    gate = scale[:, :, None, None, None].expand_as(x)
    both = torch.broadcast_tensors(x, scale[..., None, None, None], weight[:, None, None, None])
    return torch.cat([gate * x, gate, *both], 1)


def test_over_the_volume() -> None:
    cases = [
        Example(grid=grid, shape=(3, 2, 5, 4, 3), weights=((2,),))
        for grid in ({"data": 2, "depth": 2}, {"depth": 2, "width": 2})
    ]
    run_ranks(4, compare, gate, cases)


def views() -> None:
    x = hs.shard(torch.randn(2, 1, 4, 4, 4), hs.Grid(depth=2))
    y = x.expand(-1, 3, -1, -1, -1)
    assert y.local.data_ptr() == x.local.data_ptr()
    assert torch.zeros(1, 1, 4, 4, 4).expand_as(y).shape == (2, 3, 4, 4, 4)
    assert x.repeat(1, 1, 0, 1, 1).shape == (2, 1, 0, 4, 4)
    x.repeat(1, 1, 1, 1, 1).zero_()
    assert x.full().abs().sum() > 0


def test_expanded_tensors_are_views() -> None:
    run_ranks(2, views)


def refused(case: str) -> None:
    x = hs.shard(torch.randn(2, 1, 4, 4, 4), hs.Grid(depth=2))
    {
        "local shape": lambda: x.expand(2, 3, 2, 4, 4),
        "fewer": lambda: x.expand(4, 4),
        "new": lambda: x.expand(-1, 2, 1, 4, 4, 4),
        "counts": lambda: x.repeat(2, 2),
        "row": lambda: x.repeat_interleave(2),
    }[case]()


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ("local shape", hs.LayoutError, "cannot be expanded"),
        ("fewer", hs.LayoutError, "cannot be expanded"),
        ("new", hs.LayoutError, "cannot be expanded"),
        ("counts", hs.LayoutError, "repeat: 2 numbers"),
        ("row", hs.UnsupportedOp, r"use x.full\(\)"),
    ],
)
def test_what_is_refused(case: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_ranks(2, refused, case)
