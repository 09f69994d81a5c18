"""Boxes of the intended grid are whole chunks (tier: no process)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import h5py
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from hyperslab.data import os_bytes_read
from hyperslab.errors import LayoutError
from hyperslab.formats.convert import Request, convert
from hyperslab.formats.storage import LEAST_CHUNK, MOST_CHUNK, chunk_sides, read_cost, replica_boxes
from hyperslab.geometry import Box
from tests.formats.opening import source_of
from tests.formats.universes import Seat, counts, public

extents = st.integers(1, 600)
numbers = st.integers(1, 9)


def test_parts_that_no_grid_has_are_not_listed() -> None:
    with pytest.raises(LayoutError, match="cannot cut 8 x 8 x 8 voxels into"):
        chunk_sides((8, 8, 8), (1, 10**15, 1), 8)


@given(
    st.tuples(extents, extents, extents),
    st.tuples(numbers, numbers, numbers),
    st.sampled_from([1, 2, 8, 16]),
)
def test_sides(extents: tuple[int, ...], cut: tuple[int, ...], voxel: int) -> None:
    """Whole chunks in every box, or a word; sensible in size; nothing a neighbour reads, too."""
    if any(n < p for n, p in zip(extents, cut, strict=True)):
        with pytest.raises(LayoutError, match="cannot cut"):
            chunk_sides(extents, cut, voxel)
        return
    found, word = chunk_sides(extents, cut, voxel)
    assert all(1 <= side <= extent for side, extent in zip(found, extents, strict=True))
    size = math.prod(found) * voxel
    count = math.prod(math.ceil(n / side) for n, side in zip(extents, found, strict=True))
    assert size <= MOST_CHUNK
    assert size >= LEAST_CHUNK or count <= 64 or bool(word)
    bounds = [
        {sum(n // p + (j < n % p) for j in range(i)) for i in range(1, p)}
        for n, p in zip(extents, cut, strict=True)
    ]
    split = [b for ends, side in zip(bounds, found, strict=True) for b in ends if b % side]
    assert bool(split) <= bool(word)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_cuts_that_divide_powers_of_two_never_need_a_word(d: int, h: int, w: int) -> None:
    cut = tuple(1 << n for n in (d % 3, h % 3, w % 3))
    found, word = chunk_sides((512, 512, 512), cut, 8)
    assert word == ""
    assert LEAST_CHUNK <= math.prod(found) * 8 <= MOST_CHUNK


CUTS: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
    "depth": ((2, 1, 1), {"depth": 2}),
    "width": ((1, 1, 3), {"width": 3}),
    "all": ((2, 2, 2), {"depth": 2, "height": 2, "width": 2}),
}


@pytest.mark.parametrize("format", ["hdf5", "zarr", "lbann"])
@pytest.mark.parametrize("kind", CUTS)
def test_a_rank_reads_its_box_and_no_more(tmp_path: Path, format: str, kind: str) -> None:
    """By the model of what a library does, and by what the system counts."""
    cut, grid = CUTS[kind]
    volume = counts(0, (48, 48, 48, 4))
    public(tmp_path / "src/u.hdf5", volume)
    convert(tmp_path / "src", tmp_path / "out", Request(format, cut))  # type: ignore[arg-type]
    source = source_of(tmp_path / "out", Seat())
    storage = source.storage(0)
    assert storage is not None
    assert storage.chunk is not None
    ranks = [read_cost(storage, box) for box in replica_boxes(source.shape, grid)]
    assert [rank.read for rank in ranks] == pytest.approx([rank.box for rank in ranks], rel=0.02)
    source.read(0, Box((0, 0, 0, 0), (1, 1, 1, 1)))  # what is read when a file is opened
    for seat in Seat.all(**grid):
        box = seat.partition((1, *source.shape)).box(seat.coords)
        before = os_bytes_read()
        size = source.read(0, Box(box.lo[1:], box.hi[1:])).nbytes
        assert 1 <= (os_bytes_read() - before) / size < 1.05
    source.close()


@pytest.mark.parametrize("format", ["hdf5", "zarr"])
def test_what_cannot_be_aligned_is_said(tmp_path: Path, format: str) -> None:
    public(tmp_path / "src/u.hdf5", counts(0, (40, 40, 40, 4)))
    said: list[Any] = []
    convert(
        tmp_path / "src",
        tmp_path / "out",
        Request(format, (3, 3, 3)),  # type: ignore[arg-type]
        begun=lambda count, notices: said.extend(notices),
    )
    (notice,) = said
    assert "divide the shards of 40 x 40 x 40 voxels cut into 3 x 3 x 3 parts" in notice
    if format == "hdf5":
        with h5py.File(tmp_path / "out/u.hdf5") as file:
            chunk = file["full"].chunks
    else:
        chunk = zarr.open_group(tmp_path / "out/u.zarr", mode="r")["full"].chunks
    assert "those written, of {} x {} x {} voxels".format(*chunk) in notice


def test_labels_have_the_chunks_of_their_volume(tmp_path: Path) -> None:
    from tests.formats.scans import scan

    scan(tmp_path / "src/volume-0.hdf5", 0, (2, 10, 9, 8))
    convert(tmp_path / "src", tmp_path / "out", Request("hdf5", (2, 3, 1)))
    with h5py.File(tmp_path / "out/volume-0.hdf5") as file:
        assert file["volume"].chunks == (2, 5, 3, 8)
        assert file["segmentation"].chunks == (1, 5, 3, 8)
