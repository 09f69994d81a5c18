"""What the system reads for a box of each format that is not packed (tier: no process)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from hyperslab.data import os_bytes_read
from hyperslab.geometry import Box
from tests.formats.opening import source_of
from tests.formats.universes import Seat, counts, unit, write
from tests.formats.writers import mlperf, nifti

CUBE = (4, 48, 48, 48)


def split(folder: Path) -> None:
    write(folder / "u_0_0_0.hdf5", full=counts(0, CUBE), unitPar=unit(0))


def zarrs(folder: Path) -> None:
    group = zarr.create_group(folder / "u.zarr", zarr_format=3)
    volume = np.moveaxis(counts(0, CUBE), 0, -1)
    group.create_array("full", data=volume, chunks=(24, 24, 24, 4), compressors=None)
    group.create_array("unitPar", data=unit(0))


def scans(folder: Path) -> None:
    nifti(folder / "volume-0.nii", counts(0, (96, 48, 48)), np.eye(4))
    nifti(folder / "segmentation-0.nii", np.zeros((96, 48, 48), np.uint8), np.eye(4))


def arrays(folder: Path) -> None:
    np.save(folder / "u.npy", counts(0, (4, 48, 96, 96)))
    np.save(folder / "u.target.npy", unit(0))


def records(folder: Path) -> None:
    x = np.moveaxis(counts(0, CUBE), 0, -1)
    mlperf(folder / "u.tfrecord", 0, x=np.ascontiguousarray(x).tobytes())


HALVES: dict[str, tuple[Callable[[Path], Any], int]] = {
    "LBANN, stored last": (split, 3),  # whose spatial dims are reversed: D lies closest together
    "Zarr": (zarrs, 1),
    "Zarr, height": (zarrs, 2),
    "Zarr, width": (zarrs, 3),
    "NIfTI": (scans, 1),
    "npy": (arrays, 1),
    "npy, height": (arrays, 2),
    "TFRecord": (records, 1),
}


@pytest.mark.parametrize("kind", HALVES)
def test_the_system_reads_the_box_and_little_more(tmp_path: Path, kind: str) -> None:
    make, dim = HALVES[kind]
    make(tmp_path)
    source = source_of(tmp_path, Seat(), "first" if make is arrays else None)
    lo = [0, 0, 0, 0]
    lo[dim] = source.shape[dim] // 2
    box = Box(tuple(lo), source.shape)
    source.read(0, Box((0, 0, 0, 0), (1, 1, 1, 1)))  # what is read once, when a file is opened
    before = os_bytes_read()
    size = source.read(0, box).nbytes
    assert size == box.size * 2
    assert 1 <= (os_bytes_read() - before) / size < 1.05


@pytest.mark.parametrize(("dim", "share"), [(1, 1.0), (2, 1.0), (3, 2.0)])
def test_short_gaps_in_an_array_are_read_and_long_ones_are_not(
    tmp_path: Path, dim: int, share: float
) -> None:
    """Half a row of 192 bytes is less than a page, half a plane of 18 KiB is more."""
    arrays(tmp_path)
    source = source_of(tmp_path, Seat(), "first")
    hi = list(source.shape)
    hi[dim] //= 2
    box = Box((0, 0, 0, 0), tuple(hi))
    source.read(0, Box((0, 0, 0, 0), (1, 1, 1, 1)))
    before = os_bytes_read()
    values = source.read(0, box)
    assert (os_bytes_read() - before) / values.nbytes == pytest.approx(share, rel=0.02)
    np.testing.assert_array_equal(values, counts(0, source.shape)[box.slices()])


def test_a_packed_sample_is_unpacked_once(tmp_path: Path) -> None:
    for seed in range(3):
        mlperf(tmp_path / f"u{seed}.tfrecord", seed, packed=True)
    source = source_of(tmp_path, Seat())
    np.testing.assert_array_equal([0], [0])  # which is imported from files
    whole = [source.read(sample, Box.whole(source.shape)) for sample in (1, 2)]
    packed = (tmp_path / "u1.tfrecord").stat().st_size
    before = os_bytes_read()
    for place in range(7):
        for sample in (1, 2):
            box = Box((0, 0, place, 0), (4, 7, place + 1, 7))
            expected = whole[sample - 1][box.slices()]
            np.testing.assert_array_equal(source.read(sample, box), expected)
            np.testing.assert_array_equal(source.target(sample), np.float32(unit(sample)))
    assert os_bytes_read() - before < packed / 2
    source.read(0, Box.whole(source.shape))
    assert os_bytes_read() - before > packed / 2
