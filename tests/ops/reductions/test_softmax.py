"""Softmax over dims, cut or not, equals the serial one (tier: a few gloo ranks)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

import hyperslab as hs
from tests.ops.serial import RANKS, Example, compare, draw_examples, dtypes, grids, parts_of
from tests.ranks import run_ranks

COVERS = {"reductions": {"softmax", "log_softmax", "softmin"}, "elementwise": {"glu"}}

WAYS = {
    "softmax": [F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax],
    "log_softmax": [
        F.log_softmax,
        torch.log_softmax,
        torch.Tensor.log_softmax,
        torch.special.log_softmax,
    ],
    "softmin": [F.softmin],
}


def softmax(x: Any, *, kind: str, way: int, dim: int) -> Any:
    return WAYS[kind][way](x, dim)


def glu(x: Any, *, dim: int) -> Any:
    return F.glu(x, dim)


@st.composite
def examples(draw: st.DrawFn, ranks: int) -> Example:
    n = draw(st.sampled_from([0, 1, 2, 3, 3]))
    grid = draw(grids(ranks))
    extents = [draw(st.integers(parts, parts + 4)) for parts in parts_of(grid, n)] if n else []
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 4)), *extents)
    kind = draw(st.sampled_from(list(WAYS)))
    way = draw(st.integers(0, len(WAYS[kind]) - 1))
    return Example(
        grid=grid,
        shape=shape,
        options={"kind": kind, "way": way, "dim": draw(st.integers(-2, len(shape) - 1))},
        dtype=draw(dtypes),
        channels_last=n > 1 and draw(st.booleans()),
        mean=draw(st.sampled_from([0.0, 0.0, 100.0, -1000.0])),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_any_softmax(ranks: int) -> None:
    run_ranks(ranks, compare, softmax, draw_examples(examples(ranks), 28))


def test_gated_linear_units() -> None:
    grids = ({"data": 2, "depth": 2}, {"height": 4})
    shapes = {1: (4, 6, 5, 4, 3), -4: (4, 2, 5, 4, 3), -1: (3, 2, 5, 4, 8)}
    cases = [
        Example(grid=g, shape=shape, options={"dim": dim})
        for g in grids
        for dim, shape in shapes.items()
    ]
    run_ranks(4, compare, glu, cases)


def edges() -> None:
    """Infinities and NaN, also where one rank has nothing else; no dim; modules; types."""
    grid, inf = hs.Grid(depth=2), float("inf")
    full = torch.randn(2, 3, 4, 5, 6)
    full[0, :, :2] = -inf  # all of rank 0's
    full[1, 0, :, 0] = -inf  # all of a row on all ranks
    full[1, 1, 1, 1] = inf
    full[1, 2, 3, 2] = float("nan")
    x = hs.shard(full, grid)
    for op in (F.softmax, F.log_softmax, F.softmin):
        assert torch.allclose(op(x, 2).full(), op(full, 2), equal_nan=True)
        assert op(x.bfloat16(), 2).dtype == torch.bfloat16
        assert op(x, 2, dtype=torch.float64).dtype == torch.float64
    with pytest.warns(UserWarning, match="Implicit dimension"):
        expected = F.softmax(full)
    assert torch.allclose(F.softmax(x).full(), expected, equal_nan=True)
    image = torch.randn(2, 3, 4, 5)
    found = nn.Softmax2d()(hs.shard(image, hs.Grid(height=2))).full()
    assert torch.allclose(found, nn.Softmax2d()(image))
    assert torch.allclose(
        torch.softmax(x, 1, torch.float64).full(),
        torch.softmax(full, 1, torch.float64),
        equal_nan=True,
    )
    for values in (full, full.bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            assert F.softmax(hs.shard(values, grid), 2).dtype == F.softmax(values, 2).dtype


def test_edges() -> None:
    run_ranks(2, edges)


def refused(case: str) -> None:
    x = hs.shard(torch.randn(2, 3, 6, 4, 4), hs.Grid(depth=2))
    if case == "glu":
        F.glu(x, 2)
    else:
        F.gumbel_softmax(x, dim=1)


def test_what_is_refused() -> None:
    with pytest.raises(hs.LayoutError, match="glu needs all of dim 2, which is cut"):
        run_ranks(2, refused, "glu")
    with pytest.raises(hs.UnsupportedOp, match="gumbel_softmax has no rule"):
        run_ranks(2, refused, "gumbel")
