"""`hyperslab convert` (tier: no process)."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from hyperslab.cli import app
from hyperslab.errors import DataError
from tests.formats.universes import folder
from tests.formats.writers import FORMATS, niftis


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)], prog_name="hyperslab")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder(tmp_path / "src", 3)
    return tmp_path / "src"


@pytest.mark.parametrize("asked", [("--help",), ()])
def test_help_explains_both_forms(asked: tuple[str, ...]) -> None:
    words = " ".join(run(*asked).output.split())
    assert "hyperslab convert [OPTIONS] {SRC} {OUT}" in words or "SRC OUT" in words
    assert "convert SRC OUT --format F" in words
    assert "convert lits [SRC] OUT --size N" in words
    for option in ("--format", "--cut", "--subvolumes", "--compression", "--workers"):
        assert option in words
    assert run(*asked).exit_code == (0 if asked else 2)


def test_help_of_lits() -> None:
    words = " ".join(run("lits", "--help").output.split())
    assert "--synthetic" in words
    assert "--cut" not in words


def test_a_folder(source: Path, tmp_path: Path) -> None:
    result = run(source, tmp_path / "out", "--format", "hdf5", "--cut", "2,1,2", "--workers", "1")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        f"3 volumes in {tmp_path / 'out'} as hdf5 (3 converted, 0 kept), 0 not converted\n"
    )
    result = run("--format", "hdf5", "--cut", "2,1,2", source, tmp_path / "out")
    assert "(0 converted, 3 kept), 0 not converted" in result.stdout
    assert run("lits", "--size", "4").exit_code == 2


@pytest.mark.parametrize("name", ["folder", "lits"])
def test_folders_with_names_of_commands(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source.rename(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    src = f"./{name}" if name == "lits" else name
    result = run(src, "out", "--format", "zarr", "--workers", "1")
    assert (result.exit_code, result.stderr) == (0, "")


def test_what_is_not_converted_is_named(source: Path, tmp_path: Path) -> None:
    (source / "a/univ_001.hdf5").write_text("no HDF5")
    result = run(source, tmp_path / "out", "--format", "npy", "--workers", "1")
    assert result.exit_code == 1
    assert "(2 converted, 0 kept), 1 not converted" in result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"not converted: {source}/a/univ_001.hdf5: cannot be read as HDF5")


def test_sub_volumes_of_two_formats_side_by_side(tmp_path: Path) -> None:
    FORMATS["TFRecord"](tmp_path / "src")
    FORMATS["npy first"](tmp_path / "src")
    how = ("--format", "lbann", "--workers", "1", "--subvolumes", "7", "--compression", "gzip")
    result = run(tmp_path / "src", tmp_path / "out", *how)
    assert isinstance(result.exception, DataError)
    result = run(tmp_path / "src", tmp_path / "out", *how, "--source-format", "tfrecord")
    assert result.exit_code == 0
    assert (tmp_path / "out/univ_0_0_0_0.hdf5").exists()


def test_what_a_user_should_know(tmp_path: Path) -> None:
    FORMATS["public HDF5"](tmp_path / "src")
    result = run(tmp_path / "src", tmp_path / "out", "--format", "npy", "--workers", "1")
    assert result.exit_code == 0
    assert result.stderr == (
        'note: the shape does not tell where the channels are; open it with channels="first"\n'
    )


@pytest.mark.parametrize(
    "wrong", [("--cut", "2,2"), ("--cut", "two"), ("--channels", "middle"), ("--format",)]
)
def test_bad_options(source: Path, tmp_path: Path, wrong: tuple[str, ...]) -> None:
    result = run(source, tmp_path / "out", "--format", "hdf5", *wrong)
    assert result.exit_code == 2
    assert wrong[0] in result.output
    assert not (tmp_path / "out").exists()


def test_lits_works_as_before(tmp_path: Path) -> None:
    niftis(".nii", False)(tmp_path / "src")
    result = run("lits", tmp_path / "src", tmp_path / "out", "--size", "4,5,6", "--workers", "1")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"3 volumes in {tmp_path / 'out'} (3 converted, 0 kept), 0 skipped\n"
    result = run("lits", tmp_path / "src", "--size", "4,5")
    assert result.exit_code == 2
    assert "give one number or three" in result.output
