"""`hyperslab calibrate` (tiers: no process; a few gloo ranks)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from hyperslab.cli import app
from hyperslab.planner.machine import load_machine

pytestmark = pytest.mark.usefixtures("forked")

RECIPE = """
model: {name: unet3d, channels: 2, levels: 1}
loss: cross_entropy
data: {synthetic: {width: 8, channels: 1, classes: 2, samples: 4}, batch_size: 1}
"""


def invoke(*arguments: object) -> Result:
    names = ["calibrate", *map(str, arguments)]
    return CliRunner().invoke(app, names, prog_name="hyperslab")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@pytest.mark.long
def test_a_file_for_two_numbers_of_ranks(recipe: Path) -> None:
    out = recipe.with_name("machine.yaml")
    options = ["--out", str(out), "--ranks", "1", "--ranks", "2", "--budget", "0.001"]
    done = subprocess.run(
        [sys.executable, "-m", "hyperslab", "calibrate", str(recipe), *options],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout
    assert "not measured" not in done.stdout
    machine = load_machine(out)
    assert machine.name == "machine"
    assert [setting.ranks for setting in machine.settings] == [1, 2]
    names = {entry.parsed.name for entry in machine.setting(2).operators}
    assert {"aten.convolution_backward.default", "hyperslab.chain_forward.default"} <= names


def test_a_folder_that_is_not_there(recipe: Path) -> None:
    result = invoke(recipe, "--out", "nowhere/machine.yaml")
    assert "cannot write --out nowhere/machine.yaml" in str(result.exception)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that root cannot write")
def test_a_folder_that_takes_no_files(recipe: Path) -> None:
    result = invoke(recipe, "--out", "/proc/machine.yaml")
    assert "cannot write --out /proc/machine.yaml: " in str(result.exception)


def test_a_bad_recipe_is_refused_before_measuring(recipe: Path) -> None:
    result = invoke(recipe, "--out", recipe.with_name("m.yaml"), "model.levels=0")
    assert "'model.levels'" in str(result.exception)


def test_a_bad_file_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "machine.yaml"
    out.write_text("name: 3")
    result = invoke("--out", out)
    assert "'settings' is missing" in str(result.exception)
    assert out.read_text() == "name: 3"


def test_ranks_that_were_started_start_no_others(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    result = invoke(recipe, "--out", recipe.with_name("m.yaml"), "--ranks", "2")
    assert "were started already" in str(result.exception)
