"""Phantoms, and the command that makes and converts them (tier: no process)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from hyperslab import Grid, open
from hyperslab.cli import app
from hyperslab.errors import DataError
from hyperslab.formats.convert.scans import read_scan
from hyperslab.formats.nifti import image as nifti
from hyperslab.formats.nifti.source import Pair
from hyperslab.simulate.phantoms import make_phantoms
from tests.formats.convert.scans import nib
from tests.formats.convert.test_import_scans import contents

COUNT, SLICES, WIDTH = 8, 24, 28


@pytest.fixture(scope="module")
def phantoms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phantoms")
    make_phantoms(folder, COUNT, slices=SLICES, width=WIDTH, seed=1)
    return folder


def scan(folder: Path, number: int, suffix: str = ".nii") -> Any:
    names = (folder / f"{word}-{number}{suffix}" for word in ("volume", "segmentation"))
    return read_scan(Pair(f"volume-{number}", *names), 3)


def test_they_look_like_what_hospitals_send(phantoms: Path) -> None:
    seen = []
    for number in range(COUNT):
        suffix = nifti.NIFTI_SUFFIXES[number % 4 == 3]
        _, (values,), labels = scan(phantoms, number, suffix)
        depth, height, width = values.shape
        assert SLICES // 2 <= depth <= SLICES * 1.2
        assert height == width
        assert abs(width - WIDTH) <= 0.2 * WIDTH
        hu = {c: np.median(values[labels == c]) for c in range(3)}
        assert hu[0] < -900  # most is air
        assert 85 < hu[1] < 145
        assert 25 < hu[2] < 80
        assert 0.02 < (labels > 0).mean() < 0.2
        assert values.min() == -1024
        image = nib.load(phantoms / f"volume-{number}{suffix}")
        codes = "".join(nib.aff2axcodes(image.affine))
        seen.append((codes, image.get_data_dtype().name, image.dataobj.inter, depth))
    assert len({orientation for orientation, *_ in seen}) > 3
    assert {(kind, inter) for _, kind, inter, _ in seen} == {("int16", 0), ("uint16", -1024)}
    assert len({depth for *_, depth in seen}) > 3


def test_the_organ_is_on_the_right_and_whole(phantoms: Path) -> None:
    """So orientations are not mixed up; and what is stored is what is in the middle of the body."""
    for number in range(3):
        file, (values,), labels = scan(phantoms, number)
        places = np.argwhere(labels > 0)
        centre = (file.affine @ [*places.mean(0), 1])[:3]
        assert 20 < centre[0] < 80  # [mm] to the right
        assert np.abs(centre[1:]).max() < 60
        bone = np.argwhere(values > 300)
        assert (file.affine @ [*bone.mean(0), 1])[1] < -40  # the spine is behind


def test_a_seed_gives_the_same_bytes_whatever_the_count(phantoms: Path, tmp_path: Path) -> None:
    few = make_phantoms(tmp_path / "few", 4, slices=SLICES, width=WIDTH, seed=1)
    assert [pair.name for pair in few] == [f"volume-{i}" for i in range(4)]
    every = contents(phantoms)
    assert contents(tmp_path / "few") == {name: every[name] for name in contents(tmp_path / "few")}
    make_phantoms(tmp_path / "other", 1, slices=SLICES, width=WIDTH, seed=2)
    assert all(every[name] != data for name, data in contents(tmp_path / "other").items())


def test_what_is_there_is_kept_or_refused(phantoms: Path, tmp_path: Path) -> None:
    how: Any = {"slices": SLICES, "width": WIDTH}
    make_phantoms(tmp_path, 2, seed=1, **how)
    (tmp_path / "segmentation-1.nii").unlink()
    before = (tmp_path / "volume-0.nii").stat().st_mtime_ns
    make_phantoms(tmp_path, 2, seed=1, **how)
    assert (tmp_path / "volume-0.nii").stat().st_mtime_ns == before
    every = contents(phantoms)
    assert all(every[name] == data for name, data in contents(tmp_path).items())
    with pytest.raises(DataError, match=r"volume-0.nii is 'hyperslab phantom 0, seed 1.*not"):
        make_phantoms(tmp_path, 2, seed=3, **how)
    (tmp_path / "volume-0.nii").write_text("something else")
    with pytest.raises(DataError, match=r"volume-0.nii: cannot be read"):
        make_phantoms(tmp_path, 2, seed=1, **how)


@pytest.mark.parametrize(
    "change", [{"count": 0}, {"slices": 3}, {"width": 1}, {"seed": -1}], ids=str
)
def test_bad_arguments(tmp_path: Path, change: dict[str, int]) -> None:
    how: Any = {"count": 1, "slices": 4, "width": 4, "seed": 0, **change}
    with pytest.raises(DataError, match="need at least 1 phantom"):
        make_phantoms(tmp_path / "out", **how)
    assert not (tmp_path / "out").exists()


def lits(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["convert", "lits", *map(str, arguments)])


def test_the_command_with_phantoms(phantoms: Path, tmp_path: Path) -> None:
    arguments = ("--synthetic", 4, tmp_path, "--size", "24,20,28", "--seed", 1, "--workers", 1)
    done = lits(*arguments)
    assert (done.exit_code, done.stderr) == (0, "")  # no bar
    assert done.stdout == f"4 volumes in {tmp_path} (4 converted, 0 kept), 0 skipped\n"
    every = contents(phantoms)
    assert contents(tmp_path / "nifti") == {n: every[n] for n in contents(tmp_path / "nifti")}
    data = open(tmp_path, Grid(), batch_size=4, split="all", window=(-100, 200))
    ((x, y),) = data.epoch(0)
    assert (x.shape, y.shape) == ((4, 1, 24, 20, 28), (4, 24, 20, 28))
    assert y.local.unique().tolist() == [0, 1, 2]
    assert "(0 converted, 4 kept)" in lits(*arguments).stdout


def test_the_command_with_files(phantoms: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("volume-0.nii", "segmentation-0.nii", "volume-1.nii"):
        (source / name).symlink_to(phantoms / name)
    (source / "test-volume-0.nii").symlink_to(phantoms / "volume-2.nii")
    done = lits(source, tmp_path / "out", "--size", 16)
    assert done.exit_code == 0
    assert done.stdout == f"1 volumes in {tmp_path / 'out'} (1 converted, 0 kept), 2 skipped\n"
    assert f"skipped volume-1: {source / 'volume-1.nii'}: has no labels\n" in done.stderr
    assert "skipped test-volume-0: " in done.stderr
    assert lits(source, tmp_path / "out", "--size", 16, "--strict").exit_code == 1
    (source / "volume-1.nii").unlink()
    assert lits(source, tmp_path / "out", "--size", 16, "--strict").exit_code == 0
    (source / "segmentation-0.nii").unlink()
    assert lits(source, tmp_path / "none", "--size", 16).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a", "--size", "8"), "give SRC and OUT"),
        (("a", "b", "c", "--size", "8"), "give SRC and OUT"),
        (("a", "b", "--size", "8", "--synthetic", "2"), "OUT alone"),
        (("a", "b", "--size", "8,9"), "give one number or three"),
        (("a", "b", "--size", "big"), "give one number or three"),
        (("a", "b"), "--size"),
    ],
)
def test_arguments_that_make_no_sense(arguments: tuple[str, ...], words: str) -> None:
    done = lits(*arguments)
    assert done.exit_code == 2
    assert words in done.stderr
