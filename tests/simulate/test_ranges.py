"""Ranges of parameters: by name, in files, read back (tier: no process)."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from hyperslab.cli.simulate import simulate_command as command
from hyperslab.errors import DataError
from hyperslab.formats.arrays.source import Hdf5Folder
from hyperslab.formats.source import ScanOptions
from hyperslab.simulate import one_universe
from hyperslab.simulate.nbody import Nbody
from hyperslab.simulate.parameters import NAMES, PARAMETERS, draw_universe, parameters_in
from hyperslab.simulate.universes import make_universes
from tests.simulate.conftest import SIZE, STEPS


@pytest.fixture(autouse=True)
def _compiled_once(small: Nbody, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_universe, "Nbody", lambda **_: small)


def bounds(words: str) -> dict[str, tuple[float, float]]:
    found = parameters_in(words)
    return {p.name: (pytest.approx(p.physical(-1)), pytest.approx(p.physical(1))) for p in found}


def test_by_name() -> None:
    assert parameters_in("wide") == PARAMETERS
    assert bounds("sc18") == {
        "Omega_m": (0.25, 0.35),
        "sigma_8": (0.78, 0.95),
        "n_s": (0.9, 1.0),
        "H_0": (70, 70),
    }
    assert bounds("public") == {
        "Omega_m": (0.27, 0.33),
        "sigma_8": (0.72, 0.88),
        "n_s": (0.864, 1.056),
        "H_0": (63, 77),
    }


def test_others() -> None:
    assert bounds("sigma_8=0.5..1.5")["sigma_8"] == (0.5, 1.5)
    assert bounds("sigma_8=0.5..1.5")["Omega_m"] == bounds("wide")["Omega_m"]
    both = bounds("sc18, H_0=60..80,n_s = 0.96..0.96")
    assert both["H_0"] == (60, 80)
    assert both["n_s"] == (0.96, 0.96)
    assert both["Omega_m"] == (0.25, 0.35)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("large", "'large' is neither wide, public, sc18 nor NAME=lo..hi"),
        ("", "'' is neither"),
        ("H_0=60..80,sc18", "'sc18' can only come first"),
        ("sigma8=0.5..1", "unknown parameter 'sigma8'; did you mean 'sigma_8'"),
        ("sigma_8=0.5", "'sigma_8=0.5' needs two numbers"),
        ("sigma_8=0.5..x", "needs two numbers"),
        ("sigma_8=0.5..0.6..0.7", "needs two numbers"),
        ("sigma_8=0.9..0.5", "does not go from a number to a larger one"),
        ("sigma_8=0.9..inf", "does not go from a number"),
        ("n_s=nan..1", "does not go from a number"),
        ("n_s=0.9..1,n_s=0.9..1", "n_s comes twice"),
        ("Omega_m=0.05..0.3", "Omega_m from 0.05 to 0.3: it has to be above 0.05 and at most 1"),
        ("Omega_m=0.2..1.1", "at most 1"),
        ("sigma_8=0..1", "sigma_8 from 0 to 1: it has to be above 0"),
        ("H_0=-1..1", "H_0 from -1 to 1: it has to be above 0"),
    ],
)
def test_bad_ranges_are_named(tmp_path: Path, words: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_universes(tmp_path / "out", count=1, size=SIZE, steps=STEPS, ranges=words)
    assert not (tmp_path / "out").exists()


def test_draws_lie_in_the_ranges_at_the_same_places() -> None:
    ranges = parameters_in("sc18")
    for index in range(50):
        one = draw_universe(1, index, NAMES, ranges)
        other = draw_universe(1, index)
        np.testing.assert_array_equal(one.unit[:3], other.unit[:3])
        np.testing.assert_array_equal(one.noise, other.noise)
        low = [0.25, 0.78, 0.9]
        high = [0.35, 0.95, 1.0]
        expected = np.array(low) + (one.unit[:3] + 1) / 2 * (np.array(high) - low)
        np.testing.assert_allclose(one.physical[:3], expected, rtol=1e-12)
        assert one.unit[3] == 0
        assert one.physical[3] == 70


def made(folder: Path, ranges: str, count: int = 2) -> Hdf5Folder:
    make_universes(folder, count=count, size=SIZE, steps=STEPS, ranges=ranges)
    return Hdf5Folder.open_folder(folder, ScanOptions())


@pytest.mark.parametrize("words", ["sc18", "public", "wide", "sc18,sigma_8=0.7..0.71"])
@pytest.mark.parametrize("count", [1, 2])
def test_files_note_them_and_data_reads_them(tmp_path: Path, words: str, count: int) -> None:
    """Of one universe, too, of which no line could be found."""
    source = made(tmp_path, words, count)
    assert source.parameters.ranges == bounds(words)
    assert source.parameters.misfit < 1e-12
    for path in sorted(tmp_path.glob("*.hdf5")):
        with h5py.File(path) as file:
            assert file.attrs["ranges"].startswith("Omega_m=0.2")
            unit = np.array(file["unitPar"])
            np.testing.assert_allclose(source.parameters.physical(unit), file["physPar"])


def test_files_that_are_not_as_they_note_are_fitted(tmp_path: Path) -> None:
    made(tmp_path, "wide")
    for path in tmp_path.glob("*.hdf5"):
        with h5py.File(path, "a") as file:
            file["physPar"][...] = 2 * file["physPar"][()]
    source = Hdf5Folder.open_folder(tmp_path, ScanOptions())
    assert source.parameters.ranges["sigma_8"] == pytest.approx((1.28, 1.92))


def test_two_ranges_in_a_folder_are_fitted(tmp_path: Path) -> None:
    made(tmp_path / "a", "wide")
    made(tmp_path / "b", "sc18")
    source = Hdf5Folder.open_folder(tmp_path, ScanOptions())
    assert source.parameters.misfit > 0.001


def test_other_ranges_are_another_folder(tmp_path: Path) -> None:
    made(tmp_path, "sc18")
    with pytest.raises(DataError, match=r"made with ranges = Omega_m=0\.25\.\.0\.35.*, not"):
        made(tmp_path, "public")


def test_folders_from_before_are_the_wide_ones(tmp_path: Path) -> None:
    made(tmp_path, "wide")
    for path in tmp_path.glob("*.hdf5"):
        with h5py.File(path, "a") as file:
            del file.attrs["ranges"]
    made(tmp_path, "wide", 3)
    with pytest.raises(DataError, match=r"made with ranges = Omega_m=0\.24"):
        made(tmp_path, "sc18", 3)


def test_the_option(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    options = ["--count", "1", "--size", str(SIZE), "--steps", str(STEPS), "--ranges", "sc18"]
    result = CliRunner().invoke(app, [str(tmp_path), *options], catch_exceptions=False)
    assert result.exit_code == 0
    with h5py.File(tmp_path / "univ_ics_000000.hdf5") as file:
        assert file.attrs["ranges"] == "Omega_m=0.25..0.35,sigma_8=0.78..0.95,n_s=0.9..1,H_0=70..70"
