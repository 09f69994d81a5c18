"""What is no such file, or not one data set, is named (tier: no process)."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import zarr

import hyperslab as hs
from hyperslab.data import open
from hyperslab.errors import DataError
from hyperslab.formats.files import DataMap
from hyperslab.formats.registry import find_format
from hyperslab.geometry import Box
from hyperslab.train.input_files import list_inputs
from tests.formats.opening import source_of
from tests.formats.scans import hu, labels
from tests.formats.universes import Seat, counts, public, unit, write
from tests.formats.writers import (
    AXES,
    CUBE,
    SCAN,
    mlperf,
    nifti,
    niftis,
    npy,
    split,
    tfrecords,
    zarr_scans,
    zarrs,
)

Spoil = Callable[[Path], Any]


def cut(path: Path, count: int = 300) -> None:
    path.write_bytes(path.read_bytes()[:-count])


ARRAYS: dict[str, tuple[str, Spoil, str]] = {
    "cut short": ("first", lambda d: cut(d / "v1.npy"), "v1.npy: cannot be read as npy"),
    "text": ("first", lambda d: (d / "v1.npy").write_text("no array"), "v1.npy: cannot be read"),
    "objects": (
        "first",
        lambda d: np.save(d / "v1.npy", np.array([{}]), allow_pickle=True),
        "v1.npy: is object",
    ),
    "float64": ("first", lambda d: np.save(d / "v0.npy", np.zeros(CUBE)), "v0.npy: is float64"),
    "two dims": ("first", lambda d: np.save(d / "v0.npy", np.zeros((4, 4), "f4")), r"\(4, 4\)"),
    "other shape": (
        "first",
        lambda d: np.save(d / "v1.npy", counts(1, (4, 7, 7, 6))),
        r"v1.npy: is int16 \(4, 7, 7, 6\) but v0.npy is int16 \(4, 7, 7, 7\)",
    ),
    "unclear": (
        "none",
        lambda d: [np.save(p, counts(0, (4,) * 4)) for p in d.glob("v*.npy")],
        r'v0.npy.*channels="first"',
    ),
    "no target": ("first", lambda d: (d / "v1.target.npy").unlink(), "v1.target.npy"),
    "target of two dims": (
        "first",
        lambda d: np.save(d / "v1.target.npy", np.zeros((2, 2))),
        "v1.target.npy.*vector",
    ),
    "target not finite": (
        "first",
        lambda d: np.save(d / "v2.target.npy", np.full(4, np.inf)),
        "v2.target.npy.*finite",
    ),
    "both": ("first", lambda d: (d / "targets.csv").touch(), "keep one of the two"),
    "no line": ("last", lambda d: cut(d / "targets.csv", 90), "targets.csv.*(v2|one line)"),
    "no number": (
        "last",
        lambda d: (d / "targets.csv").write_text("name,a\nv0,big"),
        "sample 'v0'.*'big'",
    ),
    "no header": ("last", lambda d: (d / "targets.csv").write_text(""), r"starts with \[\]"),
    "twice": ("last", lambda d: (d / "targets.csv").write_text("name,a\nv0,1\nv0,2"), "one line"),
    "targets only": (
        "first",
        lambda d: [(d / f"v{i}.npy").unlink() for i in range(3)],
        "no vol",
    ),
}


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    """Their suffix alone differs; tables and splits know samples by name."""
    for number, name in enumerate(("u.h5", "u.hdf5", "v.hdf5")):
        public(tmp_path / name, counts(number, (5, 5, 5, 4)), number)
    with pytest.raises(DataError, match=r"u\.h5 and .*u\.hdf5 are samples of one name, 'u'"):
        source_of(tmp_path, Seat())
    (tmp_path / "u.h5").unlink()
    assert list(source_of(tmp_path, Seat()).names) == ["u", "v"]


def test_targets_as_a_spreadsheet_writes_them(tmp_path: Path) -> None:
    """With a byte order mark, CRLF, and blanks behind the commas of its first line."""
    npy("last")(tmp_path)
    before = source_of(tmp_path, Seat())
    path = tmp_path / "targets.csv"
    text = path.read_bytes().replace(b"a,b", b"a, b").replace(b"\n", b"\r\n")
    path.write_bytes(b"\xef\xbb\xbf" + text)
    found = source_of(tmp_path, Seat())
    assert found.parameters.names == before.parameters.names
    np.testing.assert_array_equal(found.target(1), before.target(1))


@pytest.mark.parametrize("kind", ARRAYS)
def test_a_bad_array(tmp_path: Path, kind: str) -> None:
    order, spoil, words = ARRAYS[kind]
    npy(order)(tmp_path)
    spoil(tmp_path)
    with pytest.raises(hs.DataError, match=f"(?s){words}"):
        source_of(tmp_path, Seat())


def unlabelled(path: Path) -> None:
    group = zarr.open_group(path, mode="a")
    del group["segmentation"]


GROUPS: dict[str, tuple[Spoil, str]] = {
    "no group": (lambda p: (p / "zarr.json").unlink(), "cannot be read as Zarr"),
    "spoilt": (lambda p: (p / "zarr.json").write_text("{"), "cannot be read as Zarr"),
    "version 2": (
        lambda p: (shutil.rmtree(p), zarr.create_group(p, zarr_format=2)),
        "is Zarr v2; only v3 is read",
    ),
    "no labels": (unlabelled, "no data set 'segmentation'"),
    "other shape": (
        lambda p: zarr.open_group(p, mode="a").create_array(
            "volume", data=hu(0, (1, 7, 6, 4)), overwrite=True
        ),
        r"segmentation' has shape \(1, 7, 6, 5\) but 'volume' has \(1, 7, 6, 4\)",
    ),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_a_bad_group(tmp_path: Path, kind: str) -> None:
    spoil, words = GROUPS[kind]
    zarr_scans(tmp_path)
    spoil(tmp_path / "volume-1.zarr")
    with pytest.raises(hs.DataError, match=f"(?s)volume-1.zarr.*{words}"):
        source_of(tmp_path, Seat())


def test_a_damaged_chunk(tmp_path: Path) -> None:
    zarrs(tmp_path)
    (chunk,) = (tmp_path / "univ_1.zarr/full/c/0/0/0").glob("*")
    chunk.write_bytes(b"no chunk")
    source = source_of(tmp_path, Seat())
    with pytest.raises(hs.DataError, match=r"univ_1\.zarr: cannot be read as Zarr"):
        source.read(1, Box.whole(source.shape))


def mask(path: Path, shape: tuple[int, ...] = SCAN, affine: Any = AXES[1]) -> None:
    nifti(path, labels(1, shape, 3)[0], affine)


def twice(path: Path) -> None:
    """A second channel, the same again, along the fourth dim."""
    image = nibabel.load(path)
    values = np.asarray(image.dataobj)
    nibabel.save(nibabel.Nifti1Image(np.stack([values, values], -1), image.affine), path)


SCANS: dict[str, tuple[Spoil, str]] = {
    "foreign": (lambda d: (d / "volume-1.nii").write_text("no NIfTI"), "volume-1.nii: cannot be"),
    "no labels": (lambda d: (d / "segmentation-1.nii").unlink(), "volume-1.nii: has no labels"),
    "labels of another shape": (
        lambda d: mask(d / "segmentation-1.nii", (1, 7, 6, 4)),
        r"segmentation-1.nii: has \(7, 6, 4\) voxels .* volume-1.nii has \(7, 6, 5\)",
    ),
    "labels elsewhere": (
        lambda d: mask(d / "segmentation-1.nii", affine=AXES[0]),
        "segmentation-1.nii.*is off by",
    ),
    "other channels": (
        lambda d: twice(d / "volume-1.nii"),
        "volume-1.nii: has 2 channels, not 1: volume-0.nii has 1",
    ),
}


@pytest.mark.parametrize("kind", SCANS)
def test_a_bad_scan(tmp_path: Path, kind: str) -> None:
    spoil, words = SCANS[kind]
    niftis(".nii", False)(tmp_path)
    spoil(tmp_path)
    with pytest.raises(hs.DataError, match=f"(?s){words}"):
        source_of(tmp_path, Seat())


def test_scans_of_several_shapes_and_types_are_shown_one_by_one(tmp_path: Path) -> None:
    niftis(".nii", False)(tmp_path)
    nifti(tmp_path / "volume-1.nii", np.float32(hu(1, (1, 8, 6, 5))[0]), AXES[1])
    mask(tmp_path / "segmentation-1.nii", (1, 8, 6, 5))
    source = source_of(tmp_path, Seat())
    assert source.shape == (1, 8, 6, 5)
    assert [source.shape_of(i) for i in range(3)] == [SCAN, (1, 8, 6, 5), SCAN]
    assert source.dtype == np.float32
    words = "volume-1.nii: has 8 x 6 x 5 voxels but .*volume-0.nii has 7 x 6 x 5.*batch_size 1"
    with pytest.raises(hs.DataError, match=f"(?s){words}"):
        hs.open(source, Seat(), batch_size=2, split="all")


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_a_scan_that_is_cut_short(tmp_path: Path, suffix: str) -> None:
    shape = (1, 30, 20, 10)  # more than what is read of a file to know that it is one
    for i in range(3):
        nifti(tmp_path / f"volume-{i}{suffix}", hu(i, shape)[0], AXES[0])
        mask(tmp_path / f"segmentation-{i}{suffix}", shape, AXES[0])
    cut(tmp_path / f"volume-1{suffix}", 60)
    cut(tmp_path / f"segmentation-2{suffix}", 60)
    source = source_of(tmp_path, Seat())
    with pytest.raises(hs.DataError, match=f"volume-1{suffix}: cannot be read as NIfTI"):
        source.read(1, Box.whole(shape))
    with pytest.raises(hs.DataError, match=f"segmentation-2{suffix}: cannot be read as NIfTI"):
        source.labels(2, Box.whole(shape[1:]))


def test_two_formats_side_by_side(tmp_path: Path) -> None:
    npy("first")(tmp_path)
    tfrecords(False)(tmp_path)
    words = r'several formats \(6 of npy, 3 of tfrecord\); choose one, such as format="npy"'
    with pytest.raises(hs.DataError, match=words):
        source_of(tmp_path, Seat())
    assert open(tmp_path, Seat(), batch_size=1, format="npy").source.names[0] == "v0"
    assert open(tmp_path, Seat(), batch_size=1, format="tfrecord").source.names[0] == "univ_0"
    with pytest.raises(hs.DataError, match=r"format='jpeg': choose from hdf5, lbann, npy"):
        open(tmp_path, Seat(), batch_size=1, format="jpeg")  # type: ignore[arg-type]


def test_the_files_at_the_top_decide(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    niftis(".nii", False)(tmp_path / "nifti")
    npy("first")(tmp_path)
    caplog.set_level(logging.INFO)
    assert source_of(tmp_path, Seat()).names[0] == "v0"
    assert "read as npy; files of nifti are left out" in caplog.text
    assert source_of(tmp_path, Seat(), format="nifti").names[0] == "volume-0"


@pytest.mark.parametrize("suffix", [".hdf5", ".tfrecord"])
def test_two_samples_of_one_name(tmp_path: Path, suffix: str) -> None:
    if suffix == ".hdf5":
        public(tmp_path / "a.hdf5", counts(0, (7, 7, 7, 4)))
        shutil.copy(tmp_path / "a.hdf5", tmp_path / "a.h5")
    else:
        mlperf(tmp_path / "a.tfrecord", 0)
        mlperf(tmp_path / "a.tfrecord.gz", 0, packed=True)
    with pytest.raises(hs.DataError, match=r" and .* are samples of one name, 'a'"):
        source_of(tmp_path, Seat())


def test_nothing_that_is_known(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").touch()
    words = r"no file \*\.hdf5, .*\*\.nii\.gz in it or below\n.*\.npz .*recipe with data\.keys"
    with pytest.raises(hs.DataError, match=words):
        find_format(tmp_path)
    with pytest.raises(hs.DataError, match="nowhere: does not exist"):
        find_format(tmp_path / "nowhere")
    with pytest.raises(hs.DataError, match="jpg: is not a folder"):
        find_format(tmp_path / "a.jpg")


def test_the_order_of_lbanns_axes_is_said_and_can_be_chosen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = split(tmp_path)
    caplog.set_level(logging.INFO)
    source = source_of(tmp_path, Seat())
    assert "reversed spatial dims (C, W, H, D) are read as (C, D, H, W)" in caplog.text
    whole = Box.whole(source.shape)
    np.testing.assert_array_equal(source.read(1, whole), parts[1])
    forced = source_of(tmp_path, Seat(), format="lbann")
    np.testing.assert_array_equal(forced.read(1, whole), parts[1])
    stored = source_of(tmp_path, Seat(), format="hdf5")
    np.testing.assert_array_equal(stored.read(1, whole), parts[1].transpose(0, 3, 2, 1))
    write(tmp_path / "whole.hdf5", full=parts[0], unitPar=unit(0))
    with pytest.raises(hs.DataError, match=r"whole.hdf5: reversed is False but True in univ_a0"):
        source_of(tmp_path, Seat())


def test_lbanns_axes_are_not_those_of_the_public_files(tmp_path: Path) -> None:
    public(tmp_path / "u_0_0_0.hdf5", counts(0, (7, 7, 7, 4)))
    source = source_of(tmp_path, Seat())
    np.testing.assert_array_equal(
        source.read(0, Box.whole(CUBE)), np.moveaxis(counts(0, (7, 7, 7, 4)), -1, 0)
    )
    with pytest.raises(hs.DataError, match=r'stores channels last.*use format="hdf5"'):
        source_of(tmp_path, Seat(), format="lbann")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_name_that_is_no_utf8(tmp_path: Path) -> None:
    public(tmp_path / "a.hdf5", counts(0, (8, 8, 8, 4)), 0)
    os.rename(tmp_path / "a.hdf5", os.fsencode(tmp_path) + b"/\xff.hdf5")
    with pytest.raises(DataError, match="its name is not UTF-8"):
        source_of(tmp_path, Seat())
    with pytest.raises(DataError, match="its name is not UTF-8"):
        source_of(tmp_path, Seat(), mapping=DataMap(volume="full", targets=("unitPar",)))
    with pytest.raises(DataError, match="its name is not UTF-8"):
        list_inputs([tmp_path])
