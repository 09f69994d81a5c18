"""Runs on synthetic volumes, from training to the report (tiers: one process; two gloo ranks)."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from hyperslab.cli import app
from hyperslab.data.transforms import decode
from hyperslab.errors import RecipeError
from hyperslab.recipe.load import load_recipe
from hyperslab.studies.report import write_report
from hyperslab.train.evaluate import evaluate
from hyperslab.train.run import train
from tests.ranks import run_ranks
from tests.selection import in_gate
from tests.train.universes import losses, narrow_network, run

COUNTS = {
    "model": {"variant": "lbann"},
    "data": {"synthetic": {"width": 16, "samples": 12}, "batch_size": 4, "augment": True},
    "epochs": 2,
}
CLASSES = {
    "model": {"name": "unet3d", "channels": 2, "levels": 1},
    "data": {"synthetic": {"extents": [8, 6, 4], "samples": 6, "classes": 3}, "batch_size": 2},
    "loss": "dice_cross_entropy",
    "epochs": 1,
}


def write(path: Path, values: dict[str, Any]) -> Path:
    given = {"device": "cpu", "timeout": 60, "output": str(path.with_suffix(""))}
    path.write_text(yaml.safe_dump({**values, **given}))
    return path


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uncut run."""
    recipe = write(tmp_path_factory.mktemp("synthetic") / "run.yaml", COUNTS)
    run(recipe)
    return recipe.with_suffix("")


@pytest.mark.parametrize(
    ("cut", "mode"),
    in_gate(
        [("grid.width=2", "store"), ("grid.data=2", "store"), ("grid.depth=2", "direct")],
        kept=[("grid.data=2", "store"), ("grid.depth=2", "direct")],
    ),
)
def test_every_grid_sees_the_same_volumes(
    tmp_path: Path, serial: Path, cut: str, mode: str
) -> None:
    recipe = write(tmp_path / "run.yaml", COUNTS)
    run_ranks(2, run, recipe, cut, f"data.mode={mode}")
    assert losses(tmp_path / "run") == pytest.approx(losses(serial), rel=1e-4)


def test_a_mini_batch_is_gone_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []
    left: list[int] = []

    def watched(*args: Any) -> torch.Tensor:
        left.append(sum(one() is not None for one in made))
        values = decode(*args).numpy().copy()
        made.append(weakref.ref(values))
        return torch.from_numpy(values)

    monkeypatch.setattr("hyperslab.data.dataset.decode", watched)
    run(write(tmp_path / "run.yaml", COUNTS))
    assert len(left) > 6  # of training and of validation
    assert not any(left)


def test_a_run_goes_on(tmp_path: Path, serial: Path) -> None:
    recipe = write(tmp_path / "run.yaml", COUNTS)
    run(recipe, "epochs=1", "optimizer.schedule.epochs=100")
    run(recipe, resume=True)
    assert losses(tmp_path / "run") == pytest.approx(losses(serial))


@pytest.mark.usefixtures("undrawn")
def test_it_is_evaluated_and_reported(serial: Path) -> None:
    with narrow_network():
        result = evaluate(serial)
    assert result.facts["samples"] == 1
    page = write_report(serial).read_text()
    assert "synthetic-00000, log(1 + count)" in page
    assert "No universe of this run can be shown" not in page
    assert "<dd>synthetic</dd>" in page


@pytest.mark.usefixtures("undrawn")
def test_classes(tmp_path: Path) -> None:
    run_ranks(2, run, write(tmp_path / "run.yaml", CLASSES), "grid.depth=2")
    result = evaluate(tmp_path / "run", overrides=["grid.depth=1"])
    assert result.facts["samples"] == 1
    page = write_report(tmp_path / "run").read_text()
    assert "class 2" in page
    assert "does not hold" not in page
    assert "is not a folder of volumes" not in page


def test_inspect_says_what_they_are(tmp_path: Path) -> None:
    recipe = str(write(tmp_path / "run.yaml", COUNTS))
    words = CliRunner().invoke(app, ["inspect", recipe, "grid.width=2", "grid.data=3"]).output
    assert "run.yaml: 12 samples, synthetic" in words
    assert "4 x 16 x 16 x 16 (C x D x H x W) int16" in words
    assert "keeping all of it on data=3 depth=1 height=1 width=2:" in words


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model={name: unet3d}", "data.synthetic holds volumes with parameters and no classes"),
        ("model={name: unet3d}", "or data.synthetic.classes=3"),
        ("model.width=32", "data.synthetic holds volumes of [16, 16, 16] voxels"),
    ],
)
def test_a_network_for_something_else(tmp_path: Path, override: str, words: str) -> None:
    loss = "loss=dice" if "unet" in override else "loss=mse"
    recipe = load_recipe(write(tmp_path / "run.yaml", COUNTS), [override, loss])
    with pytest.raises(RecipeError) as caught:
        train(recipe)
    assert words in str(caught.value)
