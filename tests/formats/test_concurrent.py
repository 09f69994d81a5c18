"""Formats that several threads read at once (tier: no process)."""

from __future__ import annotations

import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from hyperslab.data import SyntheticVolumes
from hyperslab.formats.source import Source
from hyperslab.formats.views import Joined, Padded, Subvolumes, selected
from hyperslab.geometry import Box
from tests.formats.opening import source_of
from tests.formats.scans import hu, labels
from tests.formats.universes import Seat
from tests.formats.writers import FORMATS, SCAN, nifti

THREADS = 6


def test_hdf5_lets_one_thread_in_at_a_time(tmp_path: Path) -> None:
    for name, write in FORMATS.items():
        folder = tmp_path / name
        write(folder)
        assert source_of(folder, Seat()).concurrent is ("HDF5" not in name), name


def boxes_of(source: Source, count: int) -> list[tuple[int, Box]]:
    """Samples by random order with boxes in them; the same sample comes often."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        sample = draw.randrange(len(source.names))
        corners = [sorted(draw.sample(range(n + 1), 2)) for n in source.shape_of(sample)]
        found.append((sample, Box.of([(lo, hi) for lo, hi in corners])))
    return found


def read_all(source: Source, sample: int, box: Box) -> list[Any]:
    values = source.read(sample, box)
    voxels = Box(box.lo[1:], box.hi[1:])
    return [values, source.labels(sample, voxels) if source.classes else source.target(sample)]


def assert_side_by_side(make: Any) -> None:
    """As many threads read from one source what one thread reads from another."""
    source, other = make(), make()
    assert source.concurrent
    boxes = boxes_of(source, 30)
    with ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(lambda each: read_all(source, *each), boxes))
    for ours, each in zip(found, boxes, strict=True):
        for one, expected in zip(ours, read_all(other, *each), strict=True):
            assert np.array_equal(one, expected)
    source.close()


@pytest.mark.parametrize("name", [name for name in FORMATS if "HDF5" not in name])
def test_threads_read_what_one_reads(name: str, tmp_path: Path) -> None:
    FORMATS[name](tmp_path)
    assert_side_by_side(lambda: source_of(tmp_path, Seat()))


def scaled_nifti(folder: Path) -> None:
    """Whole numbers with a slope and an intercept."""
    affine = np.eye(4)
    for i in range(3):
        image = nibabel.Nifti1Image(hu(i, SCAN)[0].T * 0.75, affine)
        image.set_data_dtype(np.int16)
        nibabel.save(image, folder / f"volume-{i}.nii")
        assert nibabel.load(folder / f"volume-{i}.nii").dataobj.slope != 1
        nifti(folder / f"segmentation-{i}.nii", labels(i, SCAN, 3)[0], affine)


@pytest.mark.parametrize(
    "write",
    [*(write for name, write in FORMATS.items() if "HDF5" not in name), scaled_nifti],
    ids=[*(name for name in FORMATS if "HDF5" not in name), "NIfTI scaled"],
)
def test_no_thread_sets_the_filters_of_warnings(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of all threads: of two that put them back, one leaves the other's."""
    write(tmp_path)
    source = source_of(tmp_path, Seat())

    def refuse(*_: Any) -> None:
        raise AssertionError("it sets the filters")

    with monkeypatch.context() as patched:
        patched.setattr(warnings.catch_warnings, "__enter__", refuse)
        for each in boxes_of(source, 10):
            read_all(source, *each)


def test_views_are_as_what_they_show(tmp_path: Path) -> None:
    for name in ("npy first", "public HDF5"):
        FORMATS[name](tmp_path / name)
    npy, hdf5 = (source_of(tmp_path / name, Seat()) for name in ("npy first", "public HDF5"))
    assert Padded(npy, 8).concurrent
    assert not Padded(hdf5, 8).concurrent
    assert not selected(hdf5, [0.0], None).concurrent
    FORMATS["npy first"](tmp_path / "again")
    again = source_of(tmp_path / "again", Seat())
    assert Joined({tmp_path / "npy first": npy, tmp_path / "again": again}).concurrent
    again.concurrent = False
    assert not Joined({tmp_path / "npy first": npy, tmp_path / "again": again}).concurrent


def test_cubes_of_one_packed_file_are_read_side_by_side(tmp_path: Path) -> None:
    FORMATS["TFRecord gzip"](tmp_path)
    assert_side_by_side(lambda: Subvolumes(source_of(tmp_path, Seat()), 1))


def test_synthetic_volumes_are_made_side_by_side() -> None:
    assert_side_by_side(lambda: SyntheticVolumes((2, 9, 8, 7), 4))
    assert_side_by_side(lambda: SyntheticVolumes((2, 9, 8, 7), 4, classes=3))
