"""What the system reads for a box of each format that is not packed (tier: no process)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from hyperslab.data import os_bytes_read
from hyperslab.data.formats import source_of
from hyperslab.geometry import Box
from tests.data.universes import Seat, counts, unit, write
from tests.data.writers import mlperf, nifti

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


HALVES: dict[str, tuple[Callable[[Path], Any], int]] = {
    "LBANN, stored last": (split, 3),  # whose spatial dims are reversed: D lies closest together
    "Zarr": (zarrs, 1),
    "Zarr, height": (zarrs, 2),
    "Zarr, width": (zarrs, 3),
    "NIfTI": (scans, 1),
}


@pytest.mark.parametrize("kind", HALVES)
def test_the_system_reads_the_box_and_little_more(tmp_path: Path, kind: str) -> None:
    make, dim = HALVES[kind]
    make(tmp_path)
    source = source_of(tmp_path, Seat())
    lo = [0, 0, 0, 0]
    lo[dim] = source.shape[dim] // 2
    box = Box(tuple(lo), source.shape)
    source.read(0, Box((0, 0, 0, 0), (1, 1, 1, 1)))  # what is read once, when a file is opened
    before = os_bytes_read()
    size = source.read(0, box).nbytes
    assert size == box.size * 2
    assert 1 <= (os_bytes_read() - before) / size < 1.05


@pytest.mark.parametrize("kind", ["npy", "TFRecord"])
def test_what_is_mapped_is_not_read_by_calls(tmp_path: Path, kind: str) -> None:
    """The system counts the reads of calls; the pages of a mapping are not among them."""
    if kind == "npy":
        np.save(tmp_path / "u.npy", counts(0, CUBE))
        np.save(tmp_path / "u.target.npy", unit(0))
    else:
        x = np.moveaxis(counts(0, CUBE), 0, -1)
        mlperf(tmp_path / "u.tfrecord", 0, x=np.ascontiguousarray(x).tobytes())
    source = source_of(tmp_path, Seat())
    box = Box((0, 24, 0, 0), CUBE)
    source.read(0, Box((0, 0, 0, 0), (1, 1, 1, 1)))
    before = os_bytes_read()
    values = source.read(0, box)
    assert os_bytes_read() - before < 0.05 * values.nbytes
    np.testing.assert_array_equal(values, counts(0, CUBE)[box.slices()])


def test_a_packed_sample_is_unpacked_once(tmp_path: Path) -> None:
    for seed in range(3):
        mlperf(tmp_path / f"u{seed}.tfrecord", seed, packed=True)
    source = source_of(tmp_path, Seat())
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
