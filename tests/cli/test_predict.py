"""`hyperslab predict` (tiers: one process; the real command line)."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from hyperslab.cli import app
from hyperslab.cli.options import without_overrides
from hyperslab.cli.predict import predict_as_rank
from hyperslab.errors import DataError, LayoutError
from hyperslab.train.predict import predict
from tests.formats.convert.scans import nib, numbers, write
from tests.train.predict.runs import write_segmentation

pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_segmentation(tmp_path_factory.mktemp("predict") / "run")


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["predict", *map(str, arguments)], prog_name="hyperslab")


def test_a_file_that_looks_like_an_override_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a=b.nii").touch()
    given = ["a=b.nii", "grid.depth=2", "dir/c=d.nii", "precision=bf16"]
    files, overrides = without_overrides(given)
    assert (files, overrides) == (["a=b.nii", "dir/c=d.nii"], ["grid.depth=2", "precision=bf16"])


def test_what_was_done_is_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in" / "a.nii", numbers((9, 8, 7)))
    out = tmp_path / "out"
    for words in ("(1 predicted, 0 kept)", "(0 predicted, 1 kept)"):
        predict_as_rank.__wrapped__(  # torch's wrapper around it wants a real standard error
            partial(predict, run, [str(tmp_path / "in")], out), out
        )
        assert f"1 of 1 inputs in {out} {words}" in capsys.readouterr().out


def test_refusals(run: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.nii", numbers((9, 8, 7)))
    out = ("--out", tmp_path / "out")
    assert command(run, "grid.depth=2", *out).exit_code == 2
    assert command(run, path).exit_code == 2
    assert isinstance(command(run, path, "grid.depth=2", "--ranks", 3, *out).exception, LayoutError)
    assert isinstance(command(tmp_path, path, *out).exception, DataError)


def test_ranks_are_started_and_failures_end_it_with_1(run: Path, tmp_path: Path) -> None:
    scan = write(tmp_path / "a.nii.gz", numbers((9, 8, 7)), "LPS")
    (tmp_path / "bad.nii").write_text("no scan")
    out = tmp_path / "out"
    arguments = [run, tmp_path / "bad.nii", scan, tmp_path / "gone.nii", "--out", out]
    done = subprocess.run(
        [sys.executable, "-m", "hyperslab", "predict", *map(str, arguments), "--ranks", "2"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("1 of 3 inputs in") == 1
    assert done.stderr.startswith("error: 2 of 3 inputs failed\n")
    assert all(name in done.stderr for name in ("bad.nii", "gone.nii"))
    assert "Traceback" not in done.stderr
    assert nib.load(out / "a-mask.nii.gz").shape == (9, 8, 7)
