"""Runs that are shown a part of the data, or repeatedly (tier: one process)."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hyperslab.errors import RecipeError
from hyperslab.planner.job import job_of
from hyperslab.recipe.load import load_recipe
from hyperslab.studies.report.volumes import volumes_of
from hyperslab.studies.run_folder import read_run
from hyperslab.train.evaluate import evaluate
from hyperslab.train.predict import predict
from tests.train.universes import WIDTH, losses, narrow_network, run, write_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
DATA: dict[str, Any] = {
    "batch_size": 4,
    "counts": [5, 2, 3],
    "redshifts": [1.5, 0.0],
    "targets": ["n_s", "sigma_8", "Omega_m"],
    "repeat": 2,
}


@pytest.fixture(scope="module")
def trained(universes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a run of two epochs."""
    folder = tmp_path_factory.mktemp("shown")
    recipe = write_recipe(folder / "run.yaml", universes, epochs=2)
    run(recipe, *overrides(DATA))
    return recipe


def overrides(data: dict[str, Any]) -> list[str]:
    return [f"data.{key}={json.dumps(value)}" for key, value in data.items()]


def test_every_sample_twice_an_epoch(trained: Path) -> None:
    steps = losses(trained.with_suffix(""))
    assert len(steps) == 2 * 3  # 2 * 5 samples in mini-batches of 4


def test_evaluated_on_the_same(trained: Path) -> None:
    with narrow_network():
        result = evaluate(trained.with_suffix(""))
        trained_on = evaluate(trained.with_suffix(""), split="train")
    assert list(result.errors) == DATA["targets"]
    assert result.facts["samples"] == 3
    assert trained_on.facts["samples"] == 5  # once each


def test_predicted_from_files_with_all_redshifts(
    trained: Path, universes: Path, tmp_path: Path
) -> None:
    """The same numbers as the evaluation's, which reads the channels by way of the data set."""
    files = sorted(universes.glob("*.hdf5"))
    with narrow_network():
        result = evaluate(trained.with_suffix(""), split="all")
        outcomes = predict(trained.with_suffix(""), files, tmp_path)
    assert {outcome.state for outcome in outcomes} == {"predicted"}
    rows = list(csv.DictReader((tmp_path / "parameters.csv").read_text().splitlines()))
    for i, name in enumerate(DATA["targets"]):
        found = {row["sample"]: float(row[f"predicted_{name}"]) for row in rows}
        for sample, value in zip(
            result.predictions.samples, result.predictions.predicted[:, i], strict=True
        ):
            assert found[sample] == pytest.approx(value, abs=1e-5)


def test_predicted_by_redshift_and_not_by_place(
    trained: Path, universes: Path, tmp_path: Path
) -> None:
    """A file with its channels in another order gives what it gave, one without a redshift none."""
    first = sorted(universes.glob("*.hdf5"))[0]
    with h5py.File(first) as file:
        counts = file["full"][()]
    for name, order in {"turned": [3, 2, 0, 1], "other": [0, 1, 2, 2]}.items():
        with h5py.File(tmp_path / f"{name}.hdf5", "w") as file:
            file["full"] = counts[..., order]
            shown = np.array([0.0, 0.5, 1.5, 3.0])[order]
            file["redshifts"] = shown if name == "turned" else [9.0, 0.5, 1.5, 3.0]
    with narrow_network():
        inputs = [first, tmp_path / "turned.hdf5", tmp_path / "other.hdf5"]
        outcomes = predict(trained.with_suffix(""), inputs, tmp_path / "out")
    assert [outcome.state for outcome in outcomes] == ["predicted", "predicted", "failed"]
    assert "redshift 0 is not there" in outcomes[2].reason
    rows = list(csv.DictReader((tmp_path / "out/parameters.csv").read_text().splitlines()))
    one, other = ([float(row[f"predicted_{n}"]) for n in DATA["targets"]] for row in rows)
    assert one == pytest.approx(other, abs=1e-6)


def test_reports_show_the_chosen_channel(trained: Path, universes: Path) -> None:
    source = volumes_of(read_run(trained.with_suffix("")))
    assert source.shape == (2, WIDTH, WIDTH, WIDTH)
    assert source.redshifts == (1.5, 0.0)


def test_plans_count_what_is_shown(trained: Path) -> None:
    job = job_of(load_recipe(trained, overrides(DATA)))
    assert job.about.shape == (2, WIDTH, WIDTH, WIDTH)
    assert job.about.parameters.names == tuple(DATA["targets"])
    assert (job.samples, job.shown) == (5, 7)


@pytest.mark.parametrize(("name", "channels", "targets"), [("sc18", 1, 3), ("mlperf", 4, 4)])
def test_plans_without_data_take_what_the_recipe_says(
    name: str, channels: int, targets: int
) -> None:
    """Neither splits by counts nor by folders stand in their way."""
    job = job_of(load_recipe(RECIPES / f"{name}.yaml", ["data.path=not-here"]))
    assert job.about.shape == (channels, 128, 128, 128)
    assert len(job.about.parameters.names) == targets
    assert job.samples > 0


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"redshifts": [0.0, 1.5]}, "trained on data.targets .* and data.redshifts"),
        ({"targets": ["sigma_8", "n_s", "Omega_m"]}, "keep the former ones, or start another run"),
        ({"repeat": 1}, "training split is not the one"),
        ({"counts": [4, 2, 3]}, "training split is not the one"),
    ],
)
def test_going_on_with_something_else_is_refused(
    trained: Path, changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        run(trained, *overrides({**DATA, **changed}), "epochs=3", resume=True)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["data.repeat=0"], "'data.repeat'"),
        (["data.targets=[]"], "'data.targets': give at least one, or null for all"),
        (["data.redshifts=[-1]"], "'data.redshifts"),
        (["data.counts=[1, 2]"], "'data.counts"),
        (["data.counts=[1, -2, 3]"], "'data.counts"),
        (
            ["data.path=null", "data.synthetic={width: 16}", "data.redshifts=[0]"],
            "data.redshifts describes files",
        ),
    ],
    ids=str,
)
def test_bad_keys_are_named(trained: Path, keys: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe(trained, keys)
