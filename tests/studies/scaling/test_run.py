"""Studies that train (tier: the real command line, on one and on two ranks)."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from hyperslab.cli import app
from hyperslab.errors import CommError, DataError, RecipeError, Stopped
from hyperslab.formats.files import lock_folder
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import GridSection
from hyperslab.studies.scaling import study as measuring
from hyperslab.studies.scaling.points import ScalingKind, ScalingPoint
from hyperslab.studies.scaling.study import StudyRequest, crowded

pytestmark = pytest.mark.usefixtures("forked")

VALUES = {
    "model": {"name": "multiscale", "channels": [2, 4]},
    "data": {"synthetic": {"width": 16, "samples": 6}, "batch_size": 2},
    "device": "cpu",
    "timeout": 100,
}
POINT = ScalingPoint(GridSection(), 2)
FOLDERS = ["0001-ranks-1x1x1x1-batch-2", "0002-ranks-1x2x1x1-batch-2"]


def request(recipe: Path, output: Path, epochs: int) -> StudyRequest:
    """A study of one point."""
    base = load_recipe(recipe)
    return StudyRequest(ScalingKind.STRONG, "small", base, (POINT,), output, epochs)


def run(kind: str, recipe: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["scale", kind, str(recipe), *arguments], prog_name="hyperslab")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scaling") / "small.yaml"
    path.write_text(yaml.safe_dump({**VALUES, "output": str(path.with_suffix(""))}))
    return path


@pytest.fixture(scope="module")
def study(recipe: Path) -> Path:
    """The folder of a study on one and on two ranks."""
    command = [sys.executable, "-m", "hyperslab", "scale", "strong", str(recipe)]
    command += ["--ranks", "2,1", "--epochs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "point 2 of 2: 2 ranks, depth 2, mini-batch 2" in done.stdout
    assert done.stdout.count("measured") == 2
    return recipe.with_name("small-strong")


@pytest.mark.usefixtures("undrawn")
def test_weak_scaling_is_not_written_over_strong_scaling(recipe: Path, tmp_path: Path) -> None:
    arguments = ["--predict", "--ranks", "1,2", "--output", str(tmp_path)]
    assert run("strong", recipe, *arguments).exit_code == 0
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    refused = run("weak", recipe, *arguments)
    assert isinstance(refused.exception, RecipeError)
    words = f"{tmp_path / 'study.json'} is of strong scaling: give another --output"
    assert str(refused.exception) == words
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert run("strong", recipe, *arguments).exit_code == 0
    (tmp_path / "study.json").write_text("{")  # nobody knows what it was
    assert run("weak", recipe, *arguments).exit_code == 0


def test_what_was_measured_is_in_the_history(study: Path) -> None:
    rows = list(csv.DictReader((study / "study.csv").read_text().splitlines()))
    assert [(row["ranks"], row["depth"]) for row in rows] == [("1", "1"), ("2", "2")]
    assert [float(row["measured_speedup"]) > 0 for row in rows] == [True, True]
    for row, folder in zip(rows, FOLDERS, strict=True):
        steps = list(csv.DictReader((study / folder / "steps.csv").read_text().splitlines()))
        assert len(steps) == 6  # two epochs of three mini-batches
        times = [float(step["step_seconds"]) for step in steps if step["epoch"] == "1"]
        assert float(row["measured_seconds"]) == pytest.approx(np.median(times), rel=1e-6)
        assert float(row["measured_throughput"]) == pytest.approx(2 / np.median(times), rel=1e-6)
        assert (row["measured_steps"], row["measured_samples"]) == ("3", "2")
    assert (study / "study.png").stat().st_size > 10_000


def test_only_measurements_are_kept(study: Path) -> None:
    assert sorted(path.name for path in study.iterdir() if path.is_dir()) == FOLDERS
    assert not (study / FOLDERS[1] / "checkpoints").exists()
    again = load_recipe(study / FOLDERS[1] / "recipe.yaml")
    assert (again.grid.depth, again.output) == (2, study / FOLDERS[1])


def test_a_finished_point_is_not_run_again(
    study: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "launch_training", None)
    before = (study / "study.csv").read_text()
    (study / "study.csv").unlink()
    done = run("strong", recipe, "--ranks", "1", "--grid", "depth=2", "--epochs", "2")
    assert done.exit_code == 0, done.output
    assert (study / "study.csv").read_text() == before


def test_a_point_of_another_recipe_is_refused(study: Path, recipe: Path) -> None:
    words = ["optimizer.learning_rate=0.5", "data.mode=direct"]
    done = run("strong", recipe, *words, "--ranks", "1", "--epochs", "2")
    assert isinstance(done.exception, RecipeError)
    assert f"{FOLDERS[0]} was measured with another recipe" in str(done.exception)
    assert "data.mode, optimizer.learning_rate differ" in str(done.exception)
    assert "choose another --output" in str(done.exception)


def test_a_training_that_fails_leaves_no_point(
    study: Path, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []

    def fail(ranks: int, arguments: list[str], logs: Path, **_: float) -> None:
        started.append(logs.parent)
        raise DataError("a disk is gone")

    monkeypatch.setattr(measuring, "launch_training", fail)
    before = dict(os.environ)
    asked = request(recipe, tmp_path, 4)
    for _ in range(2):  # what was left of the first is no obstacle
        with pytest.raises(DataError, match="a disk is gone"):
            asked.measure(POINT)
    assert dict(os.environ) == before
    assert started == [tmp_path / f".{POINT.name}.partial"] * 2
    assert asked.earlier(POINT) is None


def test_a_grid_on_which_training_fails_does_not_stop_the_study(
    study: Path, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: float) -> None:
        raise CommError("rank 0 was killed by SIGKILL\n    memory")

    copy = tmp_path / "copy"
    shutil.copytree(study, copy)
    monkeypatch.setattr(measuring, "launch_training", fail)
    words = ["--ranks", "1", "--grid", "height=2", "--epochs", "2", "--output"]
    done = run("strong", recipe, *words, str(copy))
    assert done.exit_code == 0, done.output
    assert "2 ranks: the training failed: rank 0 was killed by SIGKILL" in done.output
    rows = list(csv.DictReader((copy / "study.csv").read_text().splitlines()))
    assert [bool(row["measured_seconds"]) for row in rows] == [True, False]
    assert rows[1]["remark"] == "the training failed: rank 0 was killed by SIGKILL"
    done = run("strong", recipe, *words, str(tmp_path / "other"))
    assert isinstance(done.exception, CommError)


def test_what_was_not_finished_is_no_measurement(study: Path, recipe: Path) -> None:
    steps = study / FOLDERS[0] / "steps.csv"
    whole = steps.read_text()
    steps.write_text("".join(whole.splitlines(keepends=True)[:4]))
    with pytest.raises(DataError, match="holds no training of 2 epochs"):
        request(recipe, study, 2).earlier(POINT)
    steps.write_text(whole)


def test_too_many_ranks_are_named() -> None:
    cores = len(os.sched_getaffinity(0))
    assert crowded(cores, "cpu") == ""
    assert crowded(2 * cores, "cpu") == f"{2 * cores} ranks on {cores} cores take turns"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "1,two"], "--ranks 1,two: give different numbers from 1 on"),
        (["--ranks", "0,1"], "--ranks 0,1"),
        (["--ranks", "2,2"], "--ranks 2,2"),
        ([], "--ranks"),
        (["--ranks", "2", "--axis", "time"], "--axis time"),
        (["--grid", "depth=0"], "--grid depth=0: give AXIS=N"),
        (["--grid", "time=2"], "--grid time=2"),
        (["--grid", "depth"], "--grid depth"),
    ],
)
def test_bad_options(recipe: Path, arguments: list[str], words: str) -> None:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["scale", "strong", str(recipe), *arguments]
    )
    assert done.exit_code == 2
    assert words in done.output


def test_a_study_that_is_stopped_says_how_to_go_on(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stopped(*_: object, **__: float) -> None:
        raise Stopped(signal.SIGINT, "stopped by SIGINT")

    monkeypatch.setattr(measuring, "launch_training", stopped)
    caplog.set_level("INFO")
    done = run("strong", recipe, "--ranks", "1", "--output", str(tmp_path))
    assert done.exit_code == 130
    assert (
        f"run the same command to continue here: {FOLDERS[0]} starts again from the beginning"
        in caplog.text
    )
    assert not (tmp_path / FOLDERS[0]).exists()


def test_two_studies_in_one_folder(recipe: Path, tmp_path: Path) -> None:
    with lock_folder(tmp_path, "study"):
        done = run("strong", recipe, "--ranks", "1", "--output", str(tmp_path))
    assert isinstance(done.exception, DataError)
    assert f"{tmp_path}: another study into it is under way" in str(done.exception)
    assert not [*tmp_path.iterdir()]


def test_a_study_waits_for_ranks_that_its_last_start_has_left(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their checkpoint would be taken for that of the new training."""
    partial = tmp_path / f".{POINT.name}.partial"
    partial.mkdir()
    waited: list[Path] = []
    monkeypatch.setattr(measuring, "awaiting_run", lambda run: iter(waited.append(run) or ()))

    def ends(*_: object, **__: float) -> None:
        assert waited == [partial]
        raise Stopped(signal.SIGINT, "stopped by SIGINT")

    monkeypatch.setattr(measuring, "launch_training", ends)
    with pytest.raises(Stopped):
        request(recipe, tmp_path, epochs=1).measure(POINT)
