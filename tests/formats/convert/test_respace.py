"""Scans brought to one size of a voxel (tier: no process)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hyperslab.cli import app
from hyperslab.errors import DataError
from hyperslab.formats.convert.scans import respace_scans
from hyperslab.formats.nifti.resample import blurred_linear, nearest
from hyperslab.geometry import Box
from tests.formats.nifti.lists import CLASSES, SHAPES, SPACING, decathlon, listed, save
from tests.formats.opening import source_of
from tests.formats.universes import Seat

VOXEL = (1.5, 1.2, 1.8)  # SPACING is 0.9, 1.2, 2.5 along x, y, z


def lattice(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(
        round(n * old / new) for n, old, new in zip(shape, SPACING[::-1], VOXEL, strict=True)
    )


@pytest.mark.parametrize("channels", [1, 2])
def test_values_labels_and_places(tmp_path: Path, channels: int) -> None:
    cases = decathlon(tmp_path / "task", channels=channels)
    outcomes = respace_scans(tmp_path / "task", tmp_path / "out", VOXEL)
    assert [outcome.state for outcome in outcomes] == ["converted"] * 4
    source = source_of(tmp_path / "out", Seat())
    assert source.classes == CLASSES
    assert source.channel_names == ("FLAIR", "T1w")[:channels]
    for sample, (values, labels) in enumerate(cases):
        shape = lattice(SHAPES[sample])
        assert source.shape_of(sample) == (channels, *shape)
        found = source.read(sample, Box.whole(source.shape_of(sample)))
        expected = np.stack([np.rint(blurred_linear(one, shape)) for one in values])
        np.testing.assert_array_equal(found, expected)
        mask = source.labels(sample, Box.whole(shape))
        np.testing.assert_array_equal(mask, nearest(labels, shape))
        extent = np.array(SHAPES[sample]) * SPACING[::-1]
        np.testing.assert_allclose(source.voxel_size(sample), extent / shape, rtol=1e-5)
    again = respace_scans(tmp_path / "task", tmp_path / "out", VOXEL)
    assert [outcome.state for outcome in again] == ["kept"] * 4


def test_channels_without_names_stay_without(tmp_path: Path) -> None:
    """Such as those of a CSV list: the new list must not say that there is one."""
    cases = decathlon(tmp_path / "task", channels=2)
    path = tmp_path / "task/dataset.json"
    content = json.loads(path.read_text())
    del content["modality"]
    path.write_text(json.dumps(content))
    respace_scans(path, tmp_path / "out", VOXEL)
    source = source_of(tmp_path / "out", Seat())
    assert len(source.names) == len(cases)
    assert source.shape_of(0) == (2, *lattice(SHAPES[0]))
    assert source.channel_names == ()


def test_a_folder_is_not_filled_beside_its_own_scans(tmp_path: Path) -> None:
    """Its list would be that of the new scans."""
    decathlon(tmp_path)
    before = (tmp_path / "dataset.json").read_text()
    with pytest.raises(DataError, match="holds the scans or their list"):
        respace_scans(tmp_path, tmp_path / "x" / "..", VOXEL)
    assert (tmp_path / "dataset.json").read_text() == before
    assert not list(tmp_path.glob("imagesTr/*.nii"))


def test_the_command_and_a_damaged_scan(tmp_path: Path) -> None:
    listed(tmp_path / "d")
    (tmp_path / "d/p1/ct.nii").write_bytes(b"no scan")
    arguments = ["convert", "scans", str(tmp_path / "d/scans.csv"), str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*arguments, "--spacing", "1.5,1.2,1.8"])
    assert done.exit_code == 0, done.output
    assert "3 volumes in" in done.output
    assert "p1/ct.nii: cannot be read as NIfTI" in done.output
    source = source_of(tmp_path / "out", Seat())
    assert len(source.names) == 3
    assert sorted(source.splits.values()) == ["test", "train", "validation"]


def test_no_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs three sizes"):
        respace_scans(tmp_path, tmp_path / "out", (1.0, 0.0, 1.0))


def test_scans_of_another_size_or_file_are_not_kept(tmp_path: Path) -> None:
    decathlon(tmp_path / "task")
    respace_scans(tmp_path / "task", tmp_path / "out", VOXEL)
    with pytest.raises(DataError, match=r"BRATS_000\.nii was made with another spacing"):
        respace_scans(tmp_path / "task", tmp_path / "out", (1.0, 1.0, 1.0))
    path = tmp_path / "task/imagesTr/BRATS_002.nii.gz"
    save(path, np.zeros(SHAPES[2], np.int16))
    with pytest.raises(DataError, match=r"BRATS_002\.nii was made from other files than"):
        respace_scans(tmp_path / "task", tmp_path / "out", VOXEL)


def test_a_list_names_no_place_beside_the_folder(tmp_path: Path) -> None:
    """Two scans of one name have their folders before it, which may lead out and in again."""
    detour = f"../../../{tmp_path.name}/task"
    listed(tmp_path / "task")
    rows = ["p0/ct.nii,p0/mask.nii,train", "p1/ct.nii,p1/mask.nii,train"]
    text = (tmp_path / "task/scans.csv").read_text()
    for number, row in enumerate(rows):
        assert row in text
        text = text.replace(row, row.replace("/ct", f"/{detour}/p{number}/ct"))
    (tmp_path / "task/scans.csv").write_text(text)
    respace_scans(tmp_path / "task/scans.csv", tmp_path / "out", VOXEL)
    assert {path.name for path in tmp_path.iterdir()} == {"task", "out"}
    names = sorted(path.name for path in (tmp_path / "out/imagesTr").iterdir())
    assert names == ["p0", "p1", "p2", "p3"]
