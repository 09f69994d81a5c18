"""Boxes, cuts, partitions and transfers against sets of indices (tier: no process)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperslab.geometry import Box, Cut, Partition, transfers

Index = tuple[int, ...]


def indices(box: Box) -> set[Index]:
    return set(itertools.product(*(range(a, b) for a, b in zip(box.lo, box.hi, strict=True))))


@st.composite
def boxes(draw: st.DrawFn, ndim: int) -> Box:
    lo = [draw(st.integers(-3, 6)) for _ in range(ndim)]
    return Box(tuple(lo), tuple(a + draw(st.integers(-1, 5)) for a in lo))


pairs = st.integers(1, 3).flatmap(lambda n: st.tuples(boxes(n), boxes(n)))
fixed = settings(derandomize=True, deadline=None, max_examples=150, database=None)


@fixed
@given(pairs)
def test_boxes_are_sets_of_indices(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = a.intersect(b)
    assert indices(common) == indices(a) & indices(b)
    assert a.size == len(indices(a))
    assert a.empty == (not indices(a))
    assert b.empty or a.contains(b) == (indices(b) <= indices(a))
    if a.contains(b):  # so that its slices of what holds the other box have its extents
        spans = zip(b.slices(a), a.shape, strict=True)
        assert tuple(len(range(extent)[s]) for s, extent in spans) == b.shape
    assert indices(a.shift([2] * a.ndim)) == {tuple(i + 2 for i in at) for at in indices(a)}
    if not common.empty:
        slices = common.slices(a)
        assert all(0 <= s.start < s.stop <= e for s, e in zip(slices, a.shape, strict=True))
        assert tuple(s.stop - s.start for s in slices) == common.shape


@fixed
@given(pairs)
def test_what_lies_beside_an_inner_box(pair: tuple[Box, Box]) -> None:
    box, other = pair
    inner = box.intersect(other)
    if inner.empty:
        return
    rest = [index for slab in box.without(inner) for index in indices(slab)]
    assert len(rest) == len(set(rest))
    assert set(rest) == indices(box) - indices(inner)
    around = Box.around([inner, *box.without(inner)])
    assert around == box


def test_corners_must_match() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        Box((0,), (1, 2))


@fixed
@given(st.integers(0, 40), st.integers(1, 9))
def test_a_balanced_cut(extent: int, parts: int) -> None:
    cut = Cut.balanced("depth", extent, parts)
    sizes = [b - a for a, b in cut.intervals]
    assert sum(sizes) == cut.extent == extent
    assert len(sizes) == cut.parts == parts
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert cut.thin == (extent < parts)
    assert [cut.interval(i) for i in range(parts)] == list(cut.intervals)


@pytest.mark.parametrize("bounds", [(1, 2), (0, 3, 2)])
def test_bounds_that_are_no_cut(bounds: Index) -> None:
    with pytest.raises(ValueError, match="bounds must start at 0"):
        Cut("depth", bounds)


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    shape = tuple(draw(st.integers(1, 5)) for _ in range(draw(st.integers(1, 4))))
    axes = draw(st.permutations(["data", "depth", "height", "width", None, None]))
    cuts = []
    for extent, axis in zip(shape, axes, strict=False):
        inner = sorted(draw(st.lists(st.integers(0, extent), max_size=2)))
        cuts.append(Cut(axis, (0, *inner, extent)) if axis else None)
    return Partition(shape, tuple(cuts))


@fixed
@given(partitions(), st.data())
def test_shards_tile_the_tensor(partition: Partition, data: st.DataObject) -> None:
    here = dict.fromkeys(("data", "depth", "height", "width"), 0)
    owned = [partition.box(coords) for coords in partition.peers(here)]
    whole = Box.whole(partition.shape)
    counted = [index for box in owned for index in indices(box)]
    assert sorted(counted) == sorted(indices(whole))
    assert [partition.cover.box(c) for c in partition.peers(here)] == owned
    wanted = data.draw(boxes(partition.ndim))
    parts = transfers(wanted, enumerate(owned))
    received = [index for part in parts for index in indices(part.box)]
    assert sorted(received) == sorted(indices(wanted) & indices(whole))
    assert all(indices(part.box) <= indices(owned[part.rank]) for part in parts)
    assert not any(part.box.empty for part in parts)


def test_partitions_change_dim_by_dim() -> None:
    cut = Cut.balanced("width", 6, 2)
    partition = Partition((2, 6), (None, cut))
    assert partition.axes == ("width",)
    assert partition.cut_dims == (1,)
    assert partition.with_dim(1, 4, None) == Partition.whole((2, 4))
    assert partition.without(["width"]) == Partition.whole((2, 6))
    assert partition.without(["depth"]) == partition
    assert str(partition) == "2 x 6 (dim 1 in 2 by width)"


@pytest.mark.parametrize(
    ("shape", "cuts", "message"),
    [
        ((2, 3), (None,), "2 dims but 1 cuts"),
        ((4,), (Cut("depth", (0, 2, 5)),), "does not fit extent 4"),
        ((2, 2), (Cut("depth", (0, 1, 2)), Cut("depth", (0, 1, 2))), "an axis cuts two dims"),
    ],
)
def test_what_is_no_partition(shape: Index, cuts: tuple[Cut | None, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Partition(shape, cuts)
