"""Studies of ranks that are not there (tier: no process)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from hyperslab.cli import app
from hyperslab.errors import DataError, LayoutError
from hyperslab.planner.job import job_of
from hyperslab.planner.machine import load_machine
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import GridSection
from hyperslab.studies.scaling import study as predicting
from hyperslab.studies.scaling.points import ScalingPoint
from hyperslab.studies.scaling.study import Predictor, jobs_of
from tests.planner.traces import traced_once

__all__ = ["traced_once"]

pytestmark = pytest.mark.usefixtures("traced_once", "undrawn")

MACHINE = "lassen-v100"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write(tmp_path, data={"synthetic": {"width": 128}, "batch_size": 8})


def write(folder: Path, **values: Any) -> Path:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({"device": "cpu", "output": str(folder / "small"), **values}))
    return path


def run(kind: str, recipe: Path, *words: str, ranks: str = "1,2,8") -> Result:
    arguments = ["scale", kind, str(recipe), *words, "--ranks", ranks]
    return CliRunner().invoke(app, arguments, prog_name="hyperslab")


def predict(kind: str, recipe: Path, *words: str, ranks: str = "1,2,8") -> list[dict[str, Any]]:
    done = run(kind, recipe, *words, "--predict", "--machine", MACHINE, ranks=ranks)
    assert done.exit_code == 0, done.exception
    document = json.loads((recipe.parent / f"small-{kind}" / "study.json").read_text())
    assert document["machine"] == MACHINE
    assert (recipe.parent / f"small-{kind}" / "study.png").exists()
    rows: list[dict[str, Any]] = document["rows"]
    return rows


def test_a_prediction_is_that_of_the_plan(recipe: Path, traced_once: dict[str, object]) -> None:
    rows = predict("strong", recipe)
    machine = load_machine(MACHINE)
    for row, depth in zip(rows, (1, 2, 8), strict=True):
        config = load_recipe(recipe, [f"grid.depth={depth}"])
        with mock.patch.dict(traced_once, clear=True):
            alone = Predictor(machine).predict(job_of(config))
        assert row["predicted_seconds"] == pytest.approx(alone.seconds)
        assert row["predicted_memory"] == alone.memory
        assert row["measured_seconds"] is None
    assert "of the operators' time was not measured for these shapes" in rows[0]["remark"]
    assert rows[0]["predicted_halos"] == 0 < rows[2]["predicted_halos"]
    assert 1 < rows[1]["predicted_speedup"] < 2 * 1.05
    assert not list(recipe.parent.glob("small-strong/*batch*"))  # nothing was run


def test_two_thousand_ranks(recipe: Path) -> None:
    rows = predict("weak", recipe, "grid.depth=4", "data.batch_size=1", ranks="4,2048")
    assert [(row["data"], row["batch_size"]) for row in rows] == [(1, 1), (512, 512)]
    assert 1 < rows[1]["predicted_speedup"] <= 512
    # So small a network waits for its sums over 512 nodes, of which one replica has none.
    assert rows[1]["predicted_gradients"] > rows[0]["predicted_gradients"] >= 0


def test_the_plan_chooses_grids(recipe: Path, tmp_path: Path) -> None:
    rows = predict("strong", recipe, "--axis", "auto", ranks="1,8")
    assert rows == predict("strong", recipe, "grid=auto", ranks="1,8")
    best = rows[1]["predicted_seconds"]
    assert best <= predict("strong", recipe, ranks="1,8")[1]["predicted_seconds"]


def test_data_that_are_not_here_are_as_wide_as_the_network(tmp_path: Path) -> None:
    recipe = write(tmp_path, model={"width": 128}, data={"path": "gone", "batch_size": 8})
    assert len(predict("strong", recipe)) == 3
    done = run("strong", recipe)
    assert isinstance(done.exception, DataError)
    assert "gone is not here\n    data.path=null data.synthetic.width=N" in str(done.exception)
    recipe = write(tmp_path, data={"path": "gone", "batch_size": 8})
    done = run("strong", recipe, "--predict", "--machine", MACHINE)
    assert "gone is not here\n    data.path=null data.synthetic.width=N" in str(done.exception)


@pytest.mark.parametrize("how", [(), ("--predict", "--machine", MACHINE)])
def test_a_study_of_which_no_point_can_be_is_an_error(recipe: Path, how: tuple[str, ...]) -> None:
    done = run("strong", recipe, *how, ranks="256,512")
    assert isinstance(done.exception, LayoutError)
    assert str(done.exception).startswith("256 ranks (depth 256): ")
    assert not list(recipe.parent.glob("small-strong/*"))
    done = run("weak", recipe, "grid=auto", *how)
    assert "weak scaling adds replicas" in str(done.exception)


def test_points_that_cannot_be_are_named_and_left_out(recipe: Path) -> None:
    rows = predict("strong", recipe, "grid.height=2", ranks="2,3,256,1024")
    assert [row["ranks"] for row in rows] == [2, 3, 256, 1024]
    assert [row["predicted_seconds"] is not None for row in rows] == [True, False, True, False]
    assert rows[1]["remark"].startswith("3 ranks do not make a grid that grows along depth")
    assert rows[3]["remark"].startswith("1024 ranks (depth 512 x height 2): ")
    done = run("strong", recipe, "--predict", "--machine", MACHINE, ranks="1,256")
    assert done.exit_code == 0
    assert "left out: 256 ranks (depth 256): " in done.output


def test_data_have_to_be_enough_for_a_mini_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = load_recipe(
        write(tmp_path, model={"width": 128}, data={"path": "there", "batch_size": 8})
    )
    found = replace(job_of(base), samples=4, assumed="")
    monkeypatch.setattr(predicting, "job_of", lambda _: found)
    points = [ScalingPoint(GridSection(data=count), count) for count in (4, 8)]
    jobs, refused = jobs_of(points, base)
    assert list(jobs) == points[:1]
    words = "data.path there has 4 samples to train on, fewer than a mini-batch of 8 for 8 ranks"
    assert [one.ranks for one in refused] == [8]
    assert refused[0].reason.startswith(words)


def test_what_does_not_fit_is_said(recipe: Path) -> None:
    machine = load_machine(MACHINE).model_copy(update={"memory": 2**28})
    point = ScalingPoint(GridSection(), 8)
    config = point.recipe(load_recipe(recipe), output=recipe.parent, epochs=4)
    found = Predictor(machine).predict(job_of(config))
    assert not found.fits
    assert found.memory > 2**30
