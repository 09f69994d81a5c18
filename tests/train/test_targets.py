"""Trainings of networks, losses, optimizers and data that are not ours (tiers: one process; a few
gloo ranks)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from hyperslab.errors import HyperslabError, RecipeError
from hyperslab.recipe.load import load_recipe, recipe_of_values
from hyperslab.studies.report import write_report
from hyperslab.train.evaluate import evaluate
from hyperslab.train.run import train
from tests.ranks import run_ranks
from tests.train.scans import WINDOW, write_scans
from tests.train.universes import losses

HERE = "tests.recipe.own_classes"


def segresnet(path: Path, data: Path, **keys: Any) -> Path:
    """A recipe of MONAI's SegResNet and DiceCELoss and torch's AdamW."""
    values: dict[str, Any] = {
        "model": {
            "target": "monai.networks.nets.SegResNet",
            "spatial_dims": 3,
            "in_channels": "${data.channels}",
            "out_channels": "${data.outputs}",
            "init_filters": 8,
            "blocks_down": [1, 1],
            "blocks_up": [1],
        },
        "data": {"path": str(data), "batch_size": 4, "window": list(WINDOW)},
        "loss": {"target": "monai.losses.DiceCELoss", "to_onehot_y": True, "softmax": True},
        "optimizer": {
            "name": "adamw",
            "lr": 1e-2,
            "eps": 1e-3,
            "schedule": {"name": "CosineAnnealingLR", "T_max": "${training.epochs}"},
        },
        "metrics": {
            "ce": "cross_entropy",
            "tversky": {"target": "monai.losses.TverskyLoss", "to_onehot_y": True, "softmax": True},
        },
        "epochs": 3,
        "device": "cpu",
        "timeout": 60,
        "output": str(path.with_suffix("")),
    }
    path.write_text(yaml.safe_dump({**values, **keys}))
    return path


def run(recipe: Path, *overrides: str, resume: bool = False) -> None:
    train(load_recipe(recipe, overrides), resume=resume)


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scans(tmp_path_factory.mktemp("scans") / "d", 13, shape=(16, 16, 16))


@pytest.mark.usefixtures("undrawn")
def test_monai_is_trained_gone_on_with_on_another_grid_evaluated_and_reported(
    tmp_path: Path, scans: Path
) -> None:
    whole = segresnet(tmp_path / "whole.yaml", scans)
    run(whole)
    parts = segresnet(tmp_path / "parts.yaml", scans)
    run_ranks(2, run, parts, "grid.depth=2", "epochs=3", "checkpoint.every=2")
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)
    header, *rows = (tmp_path / "whole" / "epochs.csv").read_text().splitlines()
    cut = (tmp_path / "parts" / "epochs.csv").read_text().splitlines()[1:]
    for name in ("validation_ce", "validation_tversky", "validation_loss", "learning_rate"):
        column = header.split(",").index(name)
        pairs = [
            [float(row.split(",")[column]) for row in both] for both in zip(rows, cut, strict=True)
        ]
        assert all(b == pytest.approx(a, rel=1e-4) for a, b in pairs), name
    first = segresnet(tmp_path / "moved.yaml", scans)
    run_ranks(2, run, first, "grid.width=2", "epochs=1", "optimizer.schedule.T_max=3")
    run(first, "epochs=2", "optimizer.schedule.T_max=3", resume=True)
    first_two = losses(tmp_path / "whole")[:-3]
    assert losses(tmp_path / "moved") == pytest.approx(first_two, rel=1e-4)
    scores = evaluate(tmp_path / "whole").facts
    assert set(scores["metrics"]) == {"ce", "tversky"}
    assert "SegResNet" in write_report(tmp_path / "whole").read_text()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an argument": ({"model": {"target": f"{HERE}.Net", "chanels": 1}}, "takes no argument 'chane"),
    "of the loss": (
        {"loss": {"target": "torch.nn.HuberLoss", "gamma": 1}},
        r"loss\.target torch\.nn\.HuberLoss takes no argument 'gamma'",
    ),
    "the form of labels": (
        {"loss": {"target": "torch.nn.CTCLoss"}},
        r"loss\.target torch\.nn\.CTCLoss takes labels in no form that was tried",
    ),
    "of the optimizer": ({"optimizer": {"name": "adamw", "rate": 1}}, "takes no argument 'rate'"),
    "a closure": ({"optimizer": {"name": "lbfgs"}}, "several times a step"),
    "of the schedule": (
        {"optimizer": {"name": "adamw", "schedule": {"name": "StepLR"}}},
        r"optimizer\.schedule\.target .*StepLR needs the argument 'step_size'",
    ),
    "a function": (
        {"optimizer": {"name": "adamw", "schedule": {"name": "LambdaLR"}}},
        r"LambdaLR takes a function|needs the argument 'lr_lambda'",
    ),
    "outputs": (
        {
            "model": {
                "target": "monai.networks.nets.UNet",
                "spatial_dims": 3,
                "in_channels": 1,
                "out_channels": 5,
                "channels": [4, 8],
                "strides": [2],
            }
        },
        r"UNet gives \[4, 5, 16, 16, 16\] .* the data need \[4, 3, 16, 16, 16\] \(dim 1 differs\)",
    ),
    "inputs": (
        {
            "model": {
                "target": "torch.nn.Conv3d",
                "in_channels": 2,
                "out_channels": 3,
                "kernel_size": 1,
            }
        },
        r"Conv3d fails on the data's mini-batch of shape \[4, 1, 16, 16, 16\]: RuntimeError",
    ),
    "a metric that adds up": (
        {"metrics": {"dice": {"target": "monai.metrics.DiceMetric"}}},
        r"metrics\.dice\.target monai\.metrics\.DiceMetric adds up mini-batches in a state of its "
        r"own \(aggregate\(\), reset\(\)\)",
    ),
    "a metric": ({"metrics": {"a": "mse"}}, r"metrics\.a=mse does not go with the data"),
}


@pytest.mark.parametrize(("keys", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(
    tmp_path: Path, scans: Path, keys: dict[str, Any], words: str
) -> None:
    recipe = segresnet(tmp_path / "run.yaml", scans, **keys)
    with pytest.raises(RecipeError, match=words):
        run(recipe)


def test_a_source_of_ones_own_is_trained_on(tmp_path: Path) -> None:
    values = {
        "model": {"target": f"{HERE}.Net", "channels": 1, "outputs": "${data.outputs}"},
        "data": {"target": f"{HERE}.Blobs", "count": 10, "batch_size": 4, "transform": None},
        "loss": {"target": f"{HERE}.scaled_error", "scale": 2.0},
        "optimizer": {"target": "torch.optim.SGD", "lr": 0.1},
        "epochs": 2,
        "device": "cpu",
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**values, "output": str(tmp_path / "run")}))
    run(path)
    assert len(losses(tmp_path / "run")) == 4
    assert set(evaluate(tmp_path / "run").errors) == {"y0"}  # type: ignore[union-attr]


@pytest.mark.usefixtures("undrawn")
def test_a_run_of_a_stranger_calls_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither evaluating nor going on calls what is of another kind in a run's own recipe."""
    values = {
        "model": {"target": f"{HERE}.Net", "channels": 1, "outputs": 1},
        "data": {"target": f"{HERE}.Blobs", "count": 10, "batch_size": 4, "transform": None},
        "epochs": 1,
        "device": "cpu",
        "output": str(tmp_path / "run"),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    run(tmp_path / "run.yaml")
    monkeypatch.chdir(tmp_path)
    attack = {"target": "os.system", "command": "touch attacked"}
    own = tmp_path / "run" / "recipe.yaml"
    honest = yaml.safe_load(own.read_text())
    for key in ("model", "data", "metrics", "loss", "optimizer", "optimizer.schedule"):
        changed = dict(honest)
        if key == "metrics":
            changed[key] = {"a": attack}
        elif key == "optimizer.schedule":
            changed["optimizer"] = {**honest["optimizer"], "schedule": attack}
        else:
            changed[key] = {**attack, **({"batch_size": 4} if key == "data" else {})}
        own.write_text(yaml.safe_dump(changed))
        commands: list[Callable[[], Any]] = [
            lambda: run(own, "epochs=2", resume=True),
            lambda: evaluate(tmp_path / "run"),
            lambda: write_report(tmp_path / "run"),
        ]
        with pytest.raises(HyperslabError, match="not hyperslab's, and no run with it"):
            commands[0]()
        for command in commands[1:]:  # which need not look at all of it
            with suppress(HyperslabError):
                command()
        assert not (tmp_path / "attacked").exists()
    own.write_text(yaml.safe_dump({**honest, "trust": ["os.system"]}))
    with pytest.raises(RecipeError, match="unknown key 'trust'"):
        evaluate(tmp_path / "run")


def test_the_user_may_name_a_function_himself() -> None:
    section = f"model={{target: {HERE}.silent}}"
    values = {"data": {"path": "x", "batch_size": 1}, "output": "out"}
    assert not recipe_of_values(dict(values), "f").trust.answers_for(f"{HERE}.silent")
    path = Path(__file__).parents[2] / "recipes" / "demo.yaml"
    for words in (section, f"loss.target={HERE}.silent"):
        assert load_recipe(path, [words]).trust.answers_for(f"{HERE}.silent")
        assert not load_recipe(path, [words]).trust.answers_for(f"{HERE}.network")
