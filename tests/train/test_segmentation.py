"""Training on scans with a class for every voxel (tiers: one process; a few gloo ranks)."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch.nn.functional import cross_entropy

import hyperslab as hs
from hyperslab.checkpoint import folder_of
from hyperslab.checkpoint.run_state import DataCard
from hyperslab.checkpoint.save_load import load
from hyperslab.errors import RecipeError
from hyperslab.recipe.schema import RegressionLoss, SegmentationLoss
from hyperslab.train.builders import data_card
from hyperslab.train.objective import LOSSES
from tests.ranks import run_ranks
from tests.train import universes
from tests.train.scans import CLASSES, SHAPE, WINDOW, write_recipe, write_scans
from tests.train.test_run import stopped
from tests.train.universes import losses, run

TOLERANCE = 1e-4
FEW = "data.counts=[4,1,1]"


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scans(tmp_path_factory.mktemp("data") / "scans", 13)


@pytest.fixture(scope="module")
def reference(scans: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted serial run."""
    path = tmp_path_factory.mktemp("reference") / "run.yaml"
    recipe = write_recipe(path, scans, loggers=["tensorboard"])
    run(recipe)
    return recipe.with_suffix("")


def epochs(run: Path) -> list[dict[str, str]]:
    with (run / "epochs.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_loss_falls(reference: Path) -> None:
    values = losses(reference)
    assert len(values) == 9
    assert values[-1] < 0.9 * values[0]


def test_an_epoch_has_dice_and_counts_of_every_class(reference: Path, scans: Path) -> None:
    """The last row against the network of the last checkpoint in plain torch."""
    model = hs.models.UNet3D(1, 3, channels=2, levels=2).eval()
    load(folder_of(reference) / "step-00000009", model)
    with hs.open(scans, hs.Grid(), batch_size=1, split="validation", window=WINDOW) as data:
        ((x, y),) = data.epoch(0)
        values, true = x.local, y.local
    with torch.no_grad():
        logits = model(values)
    row = epochs(reference)[-1]
    assert list(row)[:3] == ["epoch", "train_loss", "validation_loss"]
    assert list(row)[-2:] == ["learning_rate", "seconds"]
    expected = hs.losses.dice_loss(logits, true) + cross_entropy(logits, true)
    assert float(row["validation_loss"]) == pytest.approx(float(expected), rel=1e-5)
    for index, name in enumerate(CLASSES):
        guessed, there = logits.argmax(1) == index, true == index
        tp, fp, fn = ((guessed & there).sum(), (guessed & ~there).sum(), (~guessed & there).sum())
        counted = [int(row[f"{kind}_{name}"]) for kind in ("tp", "fp", "fn")]
        assert counted == [int(tp), int(fp), int(fn)]
        dice = row[f"validation_dice_{name}"]
        assert float(dice) == pytest.approx(float(2 * tp / (2 * tp + fp + fn)))
    steps = [line.split(",") for line in (reference / "steps.csv").read_text().splitlines()]
    rate = steps[0].index("learning_rate")
    assert float(steps[4][rate]) == pytest.approx(float(epochs(reference)[0]["learning_rate"]))


def test_tensorboard_gets_the_measures(reference: Path) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    events = event_accumulator.EventAccumulator(str(reference / "tensorboard")).Reload()
    shown = [event.value for event in events.Scalars("epoch/validation_dice_organ")]
    written = [float(row["validation_dice_organ"]) for row in epochs(reference)]
    assert shown == pytest.approx(written)


def again(recipe: Path, *overrides: str) -> None:
    run(recipe, *overrides)


def resumed(recipe: Path, *overrides: str) -> None:
    run(recipe, *overrides, resume=True)


def check_epochs(run: Path, reference: Path) -> None:
    """Each voxel is counted once, in the class that the serial run counts it in."""
    assert losses(run) == pytest.approx(losses(reference), rel=TOLERANCE)
    voxels = SHAPE[0] * SHAPE[1] * SHAPE[2]
    for row, expected in zip(epochs(run), epochs(reference), strict=True):
        for name in CLASSES:
            assert float(row[f"tp_{name}"]) == pytest.approx(float(expected[f"tp_{name}"]), abs=3)
        counted = sum(int(row[f"{kind}_{name}"]) for name in CLASSES for kind in ("tp", "fn"))
        assert counted == voxels


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "grid"),
    [
        (2, ["grid.depth=2"]),
        (4, ["grid.height=2", "grid.width=2"]),
        (4, ["grid.data=2", "grid.depth=2"]),  # the validation's one sample is not cut by data
    ],
    ids=lambda v: "-".join(v) if isinstance(v, list) else None,
)
def test_the_same_on_every_grid(
    tmp_path: Path, scans: Path, reference: Path, ranks: int, grid: list[str]
) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", scans)
    run_ranks(ranks, again, recipe, *grid)
    check_epochs(tmp_path / "run", reference)


def test_gone_on_with_on_another_grid(tmp_path: Path, scans: Path, reference: Path) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", scans)
    run_ranks(2, stopped, recipe, 4, 1, "grid.depth=2")
    assert 4 <= len(losses(tmp_path / "run")) < 9
    run_ranks(4, resumed, recipe, "grid.data=2", "grid.width=2")
    check_epochs(tmp_path / "run", reference)
    assert [row["epoch"] for row in epochs(tmp_path / "run")] == ["0", "1", "2"]


@pytest.mark.parametrize("loss", SegmentationLoss.__args__)  # type: ignore[attr-defined]
def test_every_loss_trains(tmp_path: Path, scans: Path, loss: str) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", scans, epochs=1)
    run(recipe, f"loss={loss}", "data.batch_size=11")
    assert len(losses(tmp_path / "run")) == 1


def test_every_loss_of_a_recipe_is_there() -> None:
    assert {*get_args(RegressionLoss), *get_args(SegmentationLoss)} == set(LOSSES)


def test_bf16_is_close(tmp_path: Path, scans: Path, reference: Path) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", scans, epochs=1)
    run(recipe, "precision=bf16")
    assert losses(tmp_path / "run")[0] == pytest.approx(losses(reference)[0], rel=0.02)


def test_statistics_per_replica(tmp_path: Path, scans: Path) -> None:
    """As the paper trains it: other numbers than over the grid, but only if there are replicas."""
    recipe = write_recipe(tmp_path / "run.yaml", scans, epochs=1)
    found = {}
    for grid, statistics in (("data", "grid"), ("data", "replica"), ("depth", "replica")):
        keys = (f"grid.{grid}=2", f"model.statistics={statistics}", "data.batch_size=2", FEW)
        run_ranks(2, again, recipe, *keys)
        found[grid, statistics] = losses(tmp_path / "run")
        shutil.rmtree(tmp_path / "run")
    over_all = pytest.approx(found["data", "grid"], rel=TOLERANCE)
    assert found["depth", "replica"] == over_all
    assert found["data", "replica"] != over_all


def test_a_network_for_another_kind_of_data_is_refused(
    tmp_path: Path, scans: Path, universes_folder: Path
) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", universes_folder)
    words = r"data\.path .* parameters .*model\.name=unet3d and loss=dice_cross_entropy"
    with pytest.raises(RecipeError, match=f"{words}.*\n.*use model.name=cosmoflow and loss=mse"):
        run(recipe, "data.window=null")
    recipe = universes.write_recipe(tmp_path / "other.yaml", scans)
    with pytest.raises(RecipeError, match=r"a class for every voxel.*\n.*use model.name=unet3d"):
        run(recipe)


@pytest.fixture(scope="module")
def universes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return universes.write_universes(tmp_path_factory.mktemp("other") / "universes", 13)


def test_too_many_poolings_are_refused(tmp_path: Path, scans: Path) -> None:
    recipe = write_recipe(tmp_path / "run.yaml", scans)
    with pytest.raises(RecipeError, match=r"model\.levels=4 needs volumes of at least 16 voxels"):
        run(recipe, "model.levels=4")


def test_a_checkpoint_says_what_the_network_was_trained_on(reference: Path, scans: Path) -> None:
    state = load(folder_of(reference) / "best", hs.models.UNet3D(1, 3, channels=2, levels=2))
    about = DataCard.from_state(state["about"], reference)
    assert (about.shape, about.whole, about.classes) == ((1, *SHAPE), (1, *SHAPE), CLASSES)
    with hs.open(scans, hs.Grid(), batch_size=1) as data:
        assert about == data_card(data.source)
