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
from tests.selection import in_gate

COVERS = {
    "elementwise": {
        "diff", "bucketize", "gradient", "isin", "searchsorted", "trapezoid", "trapz",
        "unravel_index",
    }
}  # fmt: skip


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


@pytest.mark.parametrize("ranks", in_gate([2, 3, 4, 6], kept=[2, 6]))
def test_equal_to_serial(ranks: int) -> None:
    run_ranks(ranks, compare, differences, draw_examples(examples(ranks), 24))


def other_types() -> None:
    full = torch.randn(2, 3, 5, 4, 4)
    x = hs.shard(full, hs.Grid(depth=2))
    assert torch.equal((x > 0).diff(dim=2).full(), (full > 0).diff(dim=2))
    assert torch.equal(torch.diff(full, n=0, dim=2, prepend=x), full)
    limits = torch.tensor([-1.0, 0.0, 0.5])
    for right in (False, True):
        found = torch.bucketize(x, limits, right=right, out_int32=True)
        assert torch.equal(found.full(), torch.bucketize(full, limits, right=right, out_int32=True))
        found = torch.searchsorted(limits, x, right=right)
        assert torch.equal(found.full(), torch.searchsorted(limits, full, right=right))
    places, expected = ((y > 0).long() * 7 for y in (x, full))
    for part, want in zip(
        torch.unravel_index(places, (3, 4)), torch.unravel_index(expected, (3, 4)), strict=True
    ):
        assert torch.equal(part.full(), want)
    with pytest.raises(hs.LayoutError, match=r"searchsorted: .* those beside it are ordinary"):
        torch.searchsorted(x, full)
    with pytest.raises(hs.LayoutError, match=r"bucketize: .* those beside it are ordinary"):
        torch.bucketize(x, x)


def test_other_types() -> None:
    run_ranks(2, other_types)


def slopes(x: Any, *, dims: Any, spacing: Any, order: int, seed: int) -> Any:
    y = recut(x * 2, seed)
    return sum(torch.gradient(y, spacing=spacing, dim=dims, edge_order=order), start=y * 0)


@pytest.mark.parametrize("axes", [{"data": 2, "depth": 2}, {"depth": 3, "width": 2}], ids=str)
def test_gradients(axes: dict[str, int]) -> None:
    ranks = axes.get("data", 1) * axes["depth"] * axes.get("width", 1)
    cases = [
        Example(
            grid=axes,
            shape=(4, 3, extent, 4, 6),
            options={"dims": dims, "spacing": spacing, "order": order, "seed": seed},
        )
        for extent, order in ((3, 1), (3, 2), (8, 1), (7, 2))
        for dims, spacing in (((2, 3, 4), 1.0), (2, 0.5), ((-1, 2), (2.0, 0.25)))
        for seed in (0, 3)
    ]
    run_ranks(ranks, compare, slopes, cases)


def far_from_zero() -> None:
    full = 1000 + 0.01 * torch.randn(1, 1, 7, 2, 2, generator=torch.Generator().manual_seed(0))
    x = hs.shard(full, hs.Grid(depth=2))
    for spacing in (0.3, 1.0, 7):
        for order in (1, 2):
            options = {"spacing": spacing, "dim": 2, "edge_order": order}
            assert torch.equal(
                torch.gradient(x, **options)[0].full(), *torch.gradient(full, **options)
            )
    assert torch.gradient(x, dim=()) == torch.gradient(full, dim=())


def test_gradients_round_as_torchs() -> None:
    run_ranks(2, far_from_zero)


def refused_gradients() -> None:
    x = hs.shard(torch.randn(2, 1, 5, 2, 4), hs.Grid(depth=2))
    with pytest.raises(hs.LayoutError, match="equal distances only"):
        torch.gradient(x, spacing=(torch.arange(5.0),), dim=2)
    with pytest.raises(hs.LayoutError, match="equal distances only"):
        torch.gradient(x, spacing=torch.tensor(2.0))
    with pytest.raises(ValueError, match=r"gradient of torch\.bool"):
        torch.gradient(x > 0, dim=2)
    for options in (
        {"dim": (2, 2)},
        {"dim": 3, "edge_order": 2},
        {"dim": (2, 4), "spacing": (1.0,)},
        {"dim": 1},
    ):
        with pytest.raises(ValueError, match="gradient"):
            torch.gradient(x, **options)


def test_refused_gradients() -> None:
    run_ranks(2, refused_gradients)


def integral(y: Any, positions: torch.Tensor, *, dim: int, kind: str) -> Any:
    if kind == "equal":
        return torch.trapz(y, dx=0.3, dim=dim) * positions.sum()
    if kind == "vector":
        return torch.trapezoid(y, positions.cumsum(0), dim=dim)
    if kind == "volume":
        return torch.trapezoid(y * positions.sum(), torch.sin(y), dim=dim)
    return torch.trapezoid(torch.isin(y.round(), torch.tensor([0.0, 1.0], dtype=y.dtype)) * y) * (
        positions.sum()
    )


def test_integrals_by_trapezoids() -> None:
    shape = (2, 3, 5, 4, 6)
    for grid in ({"depth": 2, "width": 2}, {"data": 2, "height": 2}, {"depth": 4}):
        examples = [
            Example(grid, shape, ((shape[dim],),), {"dim": dim, "kind": kind})
            for dim in (0, 2, -2, -1)
            for kind in ("equal", "vector", "volume", "chosen")
        ]
        run_ranks(4, compare, integral, examples)
