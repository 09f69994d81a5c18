"""`hyperslab inspect` (tier: no process)."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from hyperslab.cli import app
from tests.formats.writers import FORMATS


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["inspect", *arguments], prog_name="hyperslab")


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(tmp_path: Path, name: str) -> None:
    volumes = FORMATS[name](tmp_path)
    result = run(str(tmp_path), "grid.depth=2", "grid.width=2")
    assert result.exit_code == 0, result.output
    assert f"{len(volumes)} samples, " in result.output
    shape = " x ".join(map(str, volumes[0].shape))
    assert f"{shape} (C x D x H x W) {volumes[0].dtype}" in result.output
    assert "on depth=2 height=1 width=2:" in result.output


def test_what_is_said_of_universes(tmp_path: Path) -> None:
    FORMATS["public HDF5"](tmp_path)
    words = run(str(tmp_path), "grid.width=2").output
    assert "stored     7 x 6 x 5 x 4 (D x H x W x C), 1.6 KiB" in words
    assert "Omega_m (0.27 to 0.33), sigma_8 (0.72 to 0.88)" in words
    assert "advice     cutting width reads whole rows" in words
    assert "advice" not in run(str(tmp_path)).output


def test_what_keeping_takes(tmp_path: Path) -> None:
    FORMATS["public HDF5"](tmp_path)  # 3 of 4 x 7 x 6 x 5 int16, with 4 targets
    words = run(str(tmp_path), "grid.data=2", "grid.depth=2").output
    assert "keeping all of it on data=2 depth=2 height=1 width=1:" in words
    assert f"2 boxes, {2 * (4 * 4 * 6 * 5 * 2 + 32) / 1024:.1f} KiB of memory" in words
    assert "4 ranks" in words


def test_what_is_said_of_scans(tmp_path: Path) -> None:
    FORMATS["Zarr scans"](tmp_path)
    words = run(str(tmp_path)).output
    assert "chunks of 1 x 4 x 4 x 4, ZstdCodec" in words
    assert "classes    background, liver, tumour" in words


@pytest.mark.parametrize("place", ["grid.depth=0", "depth=2", "grid.time=2", "grid.depth=two"])
def test_a_bad_grid(tmp_path: Path, place: str) -> None:
    result = run(str(tmp_path), place)
    assert result.exit_code == 2
    assert "AXIS" in result.output
