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

COVERS = {
    "reductions": {"softmax", "log_softmax", "softmin", "gumbel_softmax"},
    "elementwise": {"glu"},
}

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


def choices(axes: dict[str, int] | None, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Soft ones and hard ones, and the gradient of both."""
    logits = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = (
        logits.requires_grad_()
        if axes is None
        else hs.shard(logits.requires_grad_(), hs.Grid(**axes))
    )
    torch.manual_seed(4)
    soft = F.gumbel_softmax(x, 0.7, dim=1)
    hard = F.gumbel_softmax(x, tau=0.5, hard=True, dim=1)
    y = (soft + hard) * torch.arange(shape[1]).view(1, -1, *[1] * (len(shape) - 2))
    whole = y.full() if isinstance(y, hs.Sharded) else y
    whole.square().sum().backward()
    assert logits.grad is not None
    return [t.full() if isinstance(t, hs.Sharded) else t for t in (soft, hard, logits.grad)]


def test_gumbel_softmax() -> None:
    """Torch's own where a sample chooses once; at every voxel the same on every grid."""
    volume = (4, 3, 5, 4, 2)
    (expected,) = run_ranks(1, choices, {}, volume)
    assert set(expected[1].round(decimals=9).unique().tolist()) == {0.0, 1.0}
    assert len(expected[1].argmax(1).unique()) == 3
    several = [(4, choices, {"data": 2, "depth": 2}, volume, expected)]
    several += [(2, choices, {"data": 2}, (6, 5), choices(None, (6, 5)))]
    for ranks, run, axes, shape, wanted in several:
        for found in run_ranks(ranks, run, axes, shape):
            for a, b in zip(found, wanted, strict=True):
                assert torch.allclose(a, b, rtol=1e-10)
