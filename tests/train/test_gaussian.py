"""Networks that predict means and covariances, trained, evaluated, used to predict (tiers: one
process; a few gloo ranks)."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray
from rich.console import Console

import hyperslab as hs
from hyperslab.cli.evaluate import show_evaluation
from hyperslab.errors import RecipeError
from hyperslab.models.cosmoflow import variant_of
from hyperslab.recipe.load import load_recipe, recipe_of_values
from hyperslab.recipe.network import CosmoFlowSection
from hyperslab.studies.table import number
from hyperslab.train.evaluate import Evaluation, evaluate
from hyperslab.train.predict import predict
from hyperslab.train.run import train
from tests.ranks import run_ranks
from tests.recipe.own_classes import Blobs, Net
from tests.selection import in_gate
from tests.train.universes import losses

NAMES = ("clumps", "offset", "nothing")
OUTPUTS = hs.losses.gaussian_outputs(3)
COUNT, SHAPE = 23, (1, 7, 6, 5)
METRICS = {"error": "mse", "nll": "gaussian", "own": {"target": "torch.nn.L1Loss"}}


def write_fields(folder: Path) -> Path:
    """Noise whose mean and scatter tell two of three targets."""
    folder.mkdir()
    random = np.random.default_rng(3)
    for i in range(COUNT):
        unit = random.uniform(-1, 1, 3)
        field = unit[1] + (1.5 + unit[0]) * random.standard_normal(SHAPE[1:] + SHAPE[:1])
        with h5py.File(folder / f"univ_ics_{i:02}.hdf5", "w") as file:
            file["full"] = field.astype(np.float32)
            file["unitPar"] = unit
            file["physPar"] = [0.3, 70, 5] + unit * [0.1, 7, 2]
            file["namePar"] = np.array(NAMES, dtype="S")
            file["redshifts"] = np.zeros(1)
    return folder


def write_recipe(path: Path, data: Path, **keys: Any) -> Path:
    values: dict[str, Any] = {
        "model": {
            "target": "tests.recipe.own_classes.Net",
            "channels": "${data.channels}",
            "outputs": "${data.outputs}",
        },
        "data": {
            "path": str(data),
            "batch_size": 4,
            "fractions": [0.5, 0.2, 0.3],
            "transform": None,
        },
        "loss": "gaussian",
        "metrics": METRICS,
        "optimizer": {"learning_rate": 1e-2, "eps": 1e-3},
        "epochs": 3,
        "device": "cpu",
        "timeout": 60,
        "output": str(path.with_suffix("")),
    }
    path.write_text(yaml.safe_dump({**values, **keys}))
    return path


def run(recipe: Path, *overrides: str, resume: bool = False) -> None:
    train(load_recipe(recipe, overrides), resume=resume)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def epochs(folder: Path) -> list[dict[str, float]]:
    kept = ("train_loss", "validation_")
    return [
        {key: float(value) for key, value in row.items() if key.startswith(kept)}
        for row in rows_of(folder / "epochs.csv")
    ]


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fields(tmp_path_factory.mktemp("gaussian") / "fields")


@pytest.fixture(scope="module")
def serial(fields: Path) -> Path:
    folder = fields.parent / "serial"
    run(write_recipe(folder.with_suffix(".yaml"), fields))
    evaluate(folder)
    return folder


def by_hand(run: Path, data: Path) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Means and covariances of every sample by the plain network, from its file."""
    model = Net(1, OUTPUTS)
    hs.load(run / "checkpoints" / "best", model)
    found = {}
    for path in sorted(data.glob("*.hdf5")):
        with h5py.File(path) as file, torch.no_grad():
            x = torch.from_numpy(np.moveaxis(file["full"][()], -1, 0))[None]
            mean, covariance = hs.losses.gaussian_moments(model(x).double())
        found[path.stem] = mean[0].numpy(), covariance[0].numpy()
    return found


def test_measures_are_of_the_means_but_for_the_loss_itself(serial: Path) -> None:
    for row in epochs(serial):
        assert row["validation_nll"] == pytest.approx(row["validation_loss"], rel=1e-6)
        assert row["validation_own"] == pytest.approx(row["validation_mae"], rel=1e-6)
        assert row["validation_mae"] ** 2 <= row["validation_error"] < 1.5
    assert epochs(serial)[-1]["train_loss"] < epochs(serial)[0]["train_loss"]


GRIDS: list[dict[str, int]] = [
    {"depth": 2},
    {"data": 2, "width": 2},
    {"data": 2},
    {"depth": 2, "height": 2},
]


@pytest.mark.parametrize("grid", in_gate(GRIDS, kept=GRIDS[1:2]), ids=str)
def test_losses_measures_and_evaluations_are_the_serial_ones(
    tmp_path: Path, fields: Path, serial: Path, grid: dict[str, int]
) -> None:
    overrides = [f"grid.{axis}={count}" for axis, count in grid.items()]
    ranks = int(np.prod(list(grid.values())))
    run_ranks(ranks, run, write_recipe(tmp_path / "run.yaml", fields), *overrides)
    assert losses(tmp_path / "run") == pytest.approx(losses(serial), rel=1e-4)
    for found, expected in zip(epochs(tmp_path / "run"), epochs(serial), strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    copy = Path(shutil.copytree(serial, tmp_path / "copy", symlinks=True))
    shutil.rmtree(copy / "evaluation")
    run_ranks(ranks, evaluated, copy, overrides)
    found_rows = rows_of(copy / "evaluation" / "predictions.csv")
    for row, wanted in zip(
        found_rows, rows_of(serial / "evaluation" / "predictions.csv"), strict=True
    ):
        assert row.keys() == wanted.keys()
        for key in row.keys() - {"sample", "volume"}:
            assert float(row[key]) == pytest.approx(float(wanted[key]), rel=1e-4, abs=1e-6)


def evaluated(folder: Path, overrides: list[str]) -> None:
    evaluate(folder, overrides=overrides)


def test_gone_on_with_after_a_stop(tmp_path: Path, fields: Path, serial: Path) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", fields)
    run(recipe, "epochs=2")
    run(recipe, resume=True)
    assert losses(tmp_path / "run") == losses(serial)
    assert epochs(tmp_path / "run") == epochs(serial)
    with pytest.raises(RecipeError, match="loss"):
        run(recipe, "loss=mse", resume=True)


def test_predictions_have_deviations_and_covariances(serial: Path, fields: Path) -> None:
    expected = by_hand(serial, fields)
    rows = rows_of(serial / "evaluation" / "predictions.csv")
    written = json.loads((serial / "evaluation" / "metrics.json").read_text())
    assert list(written["parameters"]) == list(NAMES)
    assert len(rows) == written["uncertainty"]["volumes"] == 7
    console = Console(file=io.StringIO(), width=80)
    show_evaluation(evaluate(serial), serial, console)
    for name, facts in written["uncertainty"]["parameters"].items():
        covered, probability = facts["coverage_68"], facts["ks_probability"]
        words = f"{name} +{number(100 * covered)} % .* {number(probability)} "
        assert re.search(words, console.file.getvalue())
    off = []
    for row in rows:
        mean, covariance = expected[row["sample"]]
        for i, (name, scale) in enumerate(zip(NAMES, (0.1, 7, 2), strict=True)):
            deviation = covariance[i, i] ** 0.5
            assert float(row[f"predicted_{name}"]) == pytest.approx(mean[i], abs=1e-5)
            assert float(row[f"std_{name}"]) == pytest.approx(deviation, rel=1e-5)
            assert float(row[f"std_phys_{name}"]) == pytest.approx(scale * deviation, rel=1e-4)
            for j in range(i):
                found = float(row[f"covariance_{name}_{NAMES[j]}"])
                assert found == pytest.approx(covariance[i, j], abs=1e-5)
        off.append([(float(row[f"true_{n}"]) - mean[i]) for i, n in enumerate(NAMES)])
    for i, name in enumerate(NAMES):
        facts = written["uncertainty"]["parameters"][name]
        deviations = np.array([float(row[f"std_{name}"]) for row in rows])
        squares = (np.array(off)[:, i] / deviations) ** 2
        assert facts["mean_squared_residual"] == pytest.approx(squares.mean(), rel=1e-4)
        assert facts["coverage_95"] == pytest.approx((squares < 1.95996**2).mean())
        mse = written["parameters"][name]["mse"]
        assert mse == pytest.approx((np.array(off)[:, i] ** 2).mean(), rel=1e-4)


def test_averages_over_parts_of_a_volume_have_none(serial: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(serial, tmp_path / "copy", symlinks=True))
    cubes = tmp_path / "cubes"
    cubes.mkdir()
    for i in range(COUNT):
        with h5py.File(cubes / f"univ_ics_{i:02}.hdf5", "w") as file:
            file["full"] = np.random.default_rng(i).random((4, 4, 4, 1), np.float32)
            file["unitPar"] = file["physPar"] = np.linspace(-1, 1, 3) * i / COUNT
            file["namePar"] = np.array(NAMES, dtype="S")
    overrides = [f"data.path={cubes}", "data.subvolume=2"]
    result = evaluate(copy, overrides=overrides, calibrate=True)
    assert isinstance(result, Evaluation)
    assert result.facts["uncertainty"]["volumes"] == 7
    assert len(result.predictions.samples) == 7 * 8
    for kind in ("averaged", "recalibrated"):
        assert "uncertainty" not in result.facts[kind]
    assert "std_clumps" in rows_of(copy / "evaluation" / "validation.csv")[0]


@pytest.mark.parametrize("ranks", in_gate([1, 2], kept=[2]))
def test_predicted_files_have_deviations(
    serial: Path, fields: Path, tmp_path: Path, ranks: int
) -> None:
    files = sorted(fields.glob("*.hdf5"))[:3]
    overrides = [] if ranks == 1 else ["grid.depth=2"]
    run_ranks(ranks, predicted, serial, files, tmp_path / "out", overrides)
    run_ranks(ranks, predicted, serial, files, tmp_path / "out", overrides)  # from the journal
    rows = rows_of(tmp_path / "out" / "parameters.csv")
    expected = by_hand(serial, fields)
    assert [row["sample"] for row in rows] == [file.stem for file in files]
    for row in rows:
        mean, covariance = expected[row["sample"]]
        assert len(row) == 2 + 2 * 3 + 2 * 3 + 3
        for i, (name, scale) in enumerate(zip(NAMES, (0.1, 7, 2), strict=True)):
            assert float(row[f"predicted_{name}"]) == pytest.approx(mean[i], abs=1e-5)
            deviation = scale * covariance[i, i] ** 0.5
            assert float(row[f"std_phys_{name}"]) == pytest.approx(deviation, rel=1e-4)
        found = float(row["covariance_nothing_offset"])
        assert found == pytest.approx(covariance[2, 1], abs=1e-5)


def predicted(folder: Path, files: list[Path], out: Path, overrides: list[str]) -> None:
    outcomes = predict(folder, files, out, overrides=overrides)
    assert {outcome.state for outcome in outcomes} <= {"predicted", "kept"}


@pytest.mark.parametrize("loss", ["gaussian", hs.losses.gaussian_loss], ids=["name", "function"])
def test_fit_takes_the_loss_and_the_command_line_makes_the_network_again(
    tmp_path: Path, loss: Any
) -> None:
    keys: dict[str, Any] = {"batch_size": 4, "device": "cpu", "epochs": 2, "output": tmp_path / "a"}
    model = {"target": Net, "channels": 1, "outputs": "${data.outputs}"}
    metrics = {"nll": hs.losses.gaussian_loss, "worst": lambda p, y: (p - y).abs().amax()}
    trained = hs.fit(model, Blobs(20), loss=loss, metrics=metrics, **keys)
    assert yaml.safe_load((tmp_path / "a" / "recipe.yaml").read_text())["loss"] == "gaussian"
    found = trained.evaluate()
    assert isinstance(found, Evaluation)
    assert found.predictions.covariance is not None
    assert found.predictions.covariance.shape == (len(found.predictions.samples), 1, 1)


def test_a_network_of_other_outputs_gets_one_error(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"batch_size": 4, "device": "cpu", "epochs": 1, "loss": "gaussian"}
    with pytest.raises(RecipeError, match=r"(?s)the data need \[4, 2\] .*1 of their covariance"):
        hs.fit(Net(1, 1), Blobs(20), output=tmp_path / "a", **keys)


def test_the_loss_as_a_target_says_its_name(tmp_path: Path, fields: Path) -> None:
    target = {"target": "hyperslab.losses.gaussian_loss"}
    with pytest.raises(RecipeError, match=r"hs\.fit say loss: gaussian"):
        run(write_recipe(tmp_path / "run.yaml", fields, loss=target, metrics={}))


def test_as_a_metric_it_needs_the_loss(tmp_path: Path, fields: Path) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", fields, loss="mse")
    with pytest.raises(
        RecipeError, match=r"metrics.nll=gaussian does not go .*loss: use one of mse, l1$"
    ):
        run(recipe)


@pytest.mark.parametrize("variant", ["paper2020", "sc18", "lbann", "mlperf"])
def test_variants_whose_outputs_are_bounded_are_refused(variant: Any) -> None:
    assert CosmoFlowSection(variant=variant).bounded == (variant_of(variant, 32).bound is not None)
    values = {"data": {"path": "x", "batch_size": 1}, "output": "out", "loss": "gaussian"}
    values["model"] = {"variant": variant, "width": 32}
    if variant in ("lbann", "mlperf"):
        with pytest.raises(RecipeError, match=f"model.variant={variant}, whose tanh"):
            recipe_of_values(values, "f")
        return
    recipe = recipe_of_values(values, "f")
    network = recipe.model.build((4, 32, 32, 32), 14, where="x")
    assert network.head.fc3.out_features == 14


@pytest.mark.parametrize("precision", in_gate(["float32", "bf16"], kept=["bf16"]))
def test_a_named_network_gets_its_outputs(tmp_path: Path, precision: str) -> None:
    network = {"name": "cosmoflow", "variant": "paper2020"}
    recipe = write_recipe(tmp_path / "run.yaml", tmp_path, model=network, metrics={}, epochs=1)
    values = yaml.safe_load(recipe.read_text())
    values["data"] = {"synthetic": {"width": 16, "samples": 10}, "batch_size": 2}
    recipe.write_text(yaml.safe_dump({**values, "precision": precision}))
    run(recipe)
    (row,) = epochs(tmp_path / "run")
    assert np.isfinite(row["validation_loss"])
    state = hs.models.CosmoFlow(16, outputs=14)
    hs.load(tmp_path / "run" / "checkpoints" / "best", state)
