"""Slices of volumes: sizes of voxels, units, letters of sides (tier: no process)."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from hyperslab.comm.grid import SPATIAL_AXES
from hyperslab.studies.report import page_of, write_report
from hyperslab.studies.report.volumes import (
    LONGER_SIDE,
    PlaneCanvas,
    Scan,
    Voxels,
    limits_of,
    volumes_of,
    voxels_of,
    voxels_of_affine,
)
from hyperslab.studies.run_folder import read_run
from tests.selection import in_gate
from tests.studies.report import fake, fake_scans

AFFINE = np.array([[0, 0, -0.75, 90], [0, 0.75, 0, -80], [5.0, 0, 0, 12], [0, 0, 0, 1]])
"""Of (d, h, w): thick slices from inferior to superior, and columns that go to the left."""


def test_an_affine_says_sizes_and_sides() -> None:
    voxels = voxels_of_affine(AFFINE)
    assert voxels.sizes == {"depth": 5.0, "height": 0.75, "width": 0.75}
    assert voxels.ends == {"depth": ("I", "S"), "height": ("P", "A"), "width": ("R", "L")}
    assert voxels.title("depth") == "depth [mm]"
    turned = voxels_of_affine(AFFINE[[1, 2, 0, 3]])
    assert turned.ends["depth"] == ("P", "A")
    assert voxels_of_affine(np.zeros((4, 4))) == Voxels()
    assert Voxels().title("depth") == "depth"


@pytest.mark.parametrize("width", in_gate([None, 8], kept=[8]))
def test_a_simulated_universe_says_its_side(tmp_path: Path, width: int | None) -> None:
    run = fake.fake_run(tmp_path, epochs=1, evaluated=False)
    recipe = (run / "recipe.yaml").read_text()
    if width:
        text = recipe.replace("batch_size: 8", f"batch_size: 8, subvolume: {width}")
        (run / "recipe.yaml").write_text(text)
    for file in (tmp_path / "universes").iterdir():
        with h5py.File(file, "a") as opened:
            opened.attrs["box_size"] = 128.0
            h_0 = float(opened["physPar"][3])
            if file.name == "univ_ics_0000.hdf5":
                side = 128.0 * h_0 / 70  # the same in Mpc, so it grows with h
    found = voxels_of(volumes_of(read_run(run)), 0)
    assert found.unit == "Mpc/h"
    assert found.sizes == pytest.approx(dict.fromkeys(SPATIAL_AXES, side / 16))
    page = write_report(run).read_text()
    assert "height [Mpc/h]" in page
    assert "log(1 + count)" in page
    assert f"at {side / 16 * ((width or 16) // 2 + 0.5):.4g} Mpc/h" in page


def test_a_universe_of_no_known_size_is_counted_in_voxels(tmp_path: Path) -> None:
    page = write_report(fake.fake_run(tmp_path, epochs=1, evaluated=False)).read_text()
    assert "Mpc/h" not in page
    assert ">height</text>" in page


def test_a_scan_is_drawn_in_its_shape_with_the_letters_of_sides(tmp_path: Path) -> None:
    run = fake_scans.fake_run(tmp_path, epochs=1)
    for file in (tmp_path / "scans").glob("*.hdf5"):
        with h5py.File(file, "a") as opened:
            opened.attrs["affine"] = AFFINE
    pictures = {p.name: p for p in page_of(read_run(run)).pictures}
    depth, height, width = fake_scans.SHAPE
    for across, wide, high, letters in (
        ("depth", 0.75 * width, 0.75 * height, ["P", "A", "R", "L"]),
        ("height", 0.75 * width, 5.0 * depth, ["I", "S", "R", "L"]),
        ("width", 0.75 * height, 5.0 * depth, ["I", "S", "P", "A"]),
    ):
        picture = pictures[f"mask-0-{across}"]
        assert picture.figure is not None
        axes = picture.figure.axes[0]
        box = axes.get_window_extent()
        assert box.width / box.height == pytest.approx(wide / high, rel=0.02)
        pixels = max(box.width, box.height) * 72 / picture.figure.dpi
        assert pixels == pytest.approx(LONGER_SIDE, rel=0.01)
        assert axes.get_xlim() == (0.0, pytest.approx(wide))
        assert [text.get_text() for text in axes.texts] == letters
        assert "mm" in picture.caption


def test_one_range_of_values_for_all_planes() -> None:
    planes = [np.full((2, 2), 1.0), np.array([[np.nan, 9.0], [5.0, np.inf]])]
    assert limits_of(planes, (0, 100)) == (1.0, 9.0)
    assert limits_of([np.full((2, 2), np.nan)], (0, 100)) == (0.0, 1.0)


def test_a_very_thin_volume_is_drawn() -> None:
    sizes = {"depth": 1.0, "height": 1.0, "width": 100.0}
    voxels = Voxels(sizes, "mm")
    values = {"height": np.arange(27.0).reshape(3, 9)}
    planes = Scan("one", (3, 1, 9), {"height": 0}, values, voxels, "HU", {}, {})
    canvas = PlaneCanvas("thin", planes, "height", (0, 27))
    canvas.outline(np.eye(3, 9, dtype=bool), "red")
    assert "HU" in canvas.picture(title="a", alt="b").svg
