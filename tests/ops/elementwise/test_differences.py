"""Differences along a dim, and places among boundaries (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import hyperslab as hs
from tests.ops.recut import recut
from tests.ops.serial import Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {"elementwise": {"diff", "bucketize"}}


def differences(x: Any, *, dim: int, n: int, ends: str, seed: int) -> Any:
    y = recut(x * 2, seed)
    edge = y.narrow(dim, 0, 1)
    more = {} if ends == "none" else {ends: edge * 3}
    if seed % 2:
        return y.diff(n=n, dim=dim, **more)
    return torch.diff(y, n, dim, **more) * torch.bucketize(x, torch.tensor([-0.5, 0.5]).to(x)).sum()


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    n = draw(st.sampled_from([1, 2, 3, 3]))
    grid = draw(grids(ranks))
    least = [grid["data"], 1, *parts_of(grid, n)]
    shape = tuple(draw(st.integers(low + 2, low + 5)) for low in least)
    return Example(
        grid=grid,
        shape=shape,
        options={
            "dim": draw(st.integers(-len(shape), len(shape) - 1)),
            "n": draw(st.integers(0, 2)),
            "ends": draw(st.sampled_from(["none", "prepend", "append"])),
            "seed": draw(st.integers(0, 5)),
        },
        dtype=draw(dtypes),
    )


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_equal_to_serial(ranks: int) -> None:
    run_ranks(ranks, compare, differences, draw_examples(examples(ranks), 24))


def other_types() -> None:
    full = torch.randn(2, 3, 5, 4, 4)
    x = hs.shard(full, hs.Grid(depth=2))
    assert torch.equal((x > 0).diff(dim=2).full(), (full > 0).diff(dim=2))
    limits = torch.tensor([-1.0, 0.0, 0.5])
    for right in (False, True):
        found = torch.bucketize(x, limits, right=right, out_int32=True)
        assert torch.equal(found.full(), torch.bucketize(full, limits, right=right, out_int32=True))
    with pytest.raises(hs.LayoutError, match="boundaries are an ordinary tensor"):
        torch.bucketize(x, x)


def test_other_types() -> None:
    run_ranks(2, other_types)
