"""Evaluations by sliding windows: the scores of the masks that predictions by the same windows give
(tiers: one process; a few gloo ranks)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.inferers import sliding_window_inference

from hyperslab.checkpoint.save_load import load
from hyperslab.comm import Grid
from hyperslab.errors import DataError
from hyperslab.models import UNet3D
from hyperslab.recipe.load import load_recipe
from hyperslab.train.builders import open_data
from hyperslab.train.evaluate import ClassEvaluation, evaluate, find_checkpoint
from hyperslab.train.metrics import scores_of
from hyperslab.train.run import train
from hyperslab.train.samples import WindowPolicy
from tests.ranks import run_ranks
from tests.selection import in_gate
from tests.train.scans import CLASSES, write_recipe, write_scans
from tests.train.universes import write_recipe as write_of_universes
from tests.train.universes import write_universes

POLICY = WindowPolicy((8, 8, 8), 0.5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    scans = write_scans(folder / "scans", 6)
    recipe = write_recipe(folder / "run.yaml", scans, epochs=3)
    data = "data.batch_size=2", "data.multiple=4", "data.fractions=[0.4,0.2,0.4]"
    train(load_recipe(recipe, [*data, "metrics={ce: cross_entropy}"]))
    return folder / "run"


@pytest.fixture(scope="module")
def by_monai(trained: Path) -> tuple[Any, float]:
    """The confusion of all samples and the mean cross-entropy, by MONAI's windows in serial."""
    recipe = load_recipe(trained / "recipe.yaml", ["data.multiple=null"])
    model = UNet3D(1, 3, channels=2, levels=2)
    load(find_checkpoint(trained, "best"), model)
    model.eval()
    confusion = np.zeros((3, 3), int)
    losses = []
    with torch.no_grad(), open_data(recipe, Grid(), split="test", shuffle=False) as data:
        for x, y in data.epoch(0):
            scores = sliding_window_inference(
                x.full(), POLICY.size, 1, model, overlap=POLICY.overlap, mode=POLICY.blend
            )
            losses += [torch.nn.functional.cross_entropy(scores, y.full()).item()] * len(scores)
            np.add.at(confusion, (y.full().numpy().ravel(), scores.argmax(1).numpy().ravel()), 1)
    return confusion, float(np.mean(losses))


def ours(run: Path, *grid: str) -> tuple[Any, float, Any]:
    found = evaluate(run, overrides=grid, windows=POLICY)
    assert isinstance(found, ClassEvaluation)
    return found.confusion, found.facts["metrics"]["ce"], found.facts["windows"]


def test_as_monai_does_it_in_serial(trained: Path, by_monai: tuple[Any, float]) -> None:
    confusion, loss = by_monai
    found, metric, facts = ours(trained)
    assert (found == confusion).all()
    assert metric == pytest.approx(loss, rel=1e-5)
    assert facts == {"window": [8, 8, 8], "overlap": 0.5, "blend": "gaussian"}
    written = json.loads((trained / "evaluation" / "metrics.json").read_text())
    assert written["windows"] == facts
    dice = scores_of(confusion, CLASSES)["organ"]["dice"]
    assert written["classes"]["organ"]["dice"] == pytest.approx(dice)
    whole = evaluate(trained)
    assert isinstance(whole, ClassEvaluation)
    assert (whole.confusion != confusion).any()
    assert "windows" not in whole.facts


@pytest.mark.parametrize("axis", in_gate(["depth", "data", "width"], kept=["depth", "data"]))
def test_windows_that_are_cut_over_ranks(
    trained: Path, by_monai: tuple[Any, float], axis: str
) -> None:
    confusion, loss = by_monai
    for found, metric, _ in run_ranks(2, ours, trained, f"grid.{axis}=2"):
        assert abs(found - confusion).sum() <= 4, "but where two classes are as likely"
        assert metric == pytest.approx(loss, rel=1e-4)


def test_in_half_precision(trained: Path, by_monai: tuple[Any, float]) -> None:
    found = evaluate(trained, overrides=["precision=bf16"], windows=POLICY)
    assert isinstance(found, ClassEvaluation)
    assert found.confusion.sum() == by_monai[0].sum()


def test_parameters_have_no_windows(tmp_path: Path) -> None:
    recipe = write_of_universes(tmp_path / "run.yaml", write_universes(tmp_path / "d", 10))
    train(load_recipe(recipe, ["epochs=1"]))
    with pytest.raises(DataError, match="windows are for networks that give voxels classes"):
        evaluate(tmp_path / "run", windows=POLICY)
