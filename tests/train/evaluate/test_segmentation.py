"""Evaluation of a segmentation made by hand (tiers: no process; a few gloo ranks)."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray
from rich.console import Console

from hyperslab.checkpoint.save_load import save
from hyperslab.cli.evaluate import show_evaluation
from hyperslab.data.sampler import samples_of
from hyperslab.models import UNet3D
from hyperslab.train.evaluate import MASKS_SHOWN, ClassEvaluation, evaluate, mean_dice
from tests.ranks import run_ranks
from tests.train.scans import CLASSES, SHAPE, WINDOW, write_recipe, write_scans

FRACTIONS = [0.4, 0.1, 0.5]


def network() -> UNet3D:
    torch.manual_seed(0)
    model = UNet3D(1, 3, channels=2, levels=2)
    model(torch.randn(2, 1, 16, 16, 16))  # running statistics of their own
    return model.eval()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of random weights beside its scans: five to test, in batches of four."""
    folder = tmp_path_factory.mktemp("made")
    scans = write_scans(folder / "scans", 10)
    recipe = write_recipe(folder / "run.yaml", scans)
    values = yaml.safe_load(recipe.read_text())
    values["data"]["fractions"] = FRACTIONS
    run = folder / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text(yaml.safe_dump(values))
    save(run / "checkpoints" / "step-00000007", network(), position={"epoch": 3})
    (run / "checkpoints" / "best").symlink_to("step-00000007")
    return run


@pytest.fixture(scope="module")
def serial(made: Path) -> ClassEvaluation:
    result = evaluate(made)
    assert isinstance(result, ClassEvaluation)
    return result


Volumes = dict[str, tuple[NDArray[np.uint8], NDArray[np.uint8]]]


def by_hand(run: Path) -> Volumes:
    """True and predicted classes of each test sample, through the plain network."""
    files = sorted((run.parent / "scans").glob("*.hdf5"))
    chosen = samples_of([f.stem for f in files], "test", FRACTIONS, 0)
    model, found = network(), {}
    low, high = WINDOW
    for file in (files[i] for i in chosen):
        with h5py.File(file) as content:
            values = torch.from_numpy(content["volume"][()]).float()
            true = content["segmentation"][0]
        with torch.no_grad():
            logits = model(((values.clamp(low, high) - low) / (high - low))[None])
        found[file.stem] = (true, logits[0].argmax(0).numpy().astype(np.uint8))
    return found


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def dice(true: NDArray[np.bool_], predicted: NDArray[np.bool_]) -> float:
    return float(2 * (true & predicted).sum() / (true.sum() + predicted.sum()))


def test_scores_of_all_voxels_and_of_every_sample(made: Path, serial: ClassEvaluation) -> None:
    expected = by_hand(made)
    true, predicted = (np.stack([pair[i] for pair in expected.values()]) for i in (0, 1))
    rows = {row["class"]: row for row in read(made / "evaluation" / "metrics.csv")}
    samples = {row["sample"]: row for row in read(made / "evaluation" / "samples.csv")}
    assert list(samples) == sorted(expected)
    assert len(samples) == 5
    for i, name in enumerate(CLASSES):
        t, p = true == i, predicted == i
        row = {key: float(value) for key, value in rows[name].items() if key != "class"}
        assert row["dice"] == pytest.approx(dice(t, p))
        assert row["iou"] == pytest.approx((t & p).sum() / (t | p).sum())
        assert row["recall"] == pytest.approx((t & p).sum() / t.sum())
        assert (row["true_positives"], row["false_negatives"]) == ((t & p).sum(), (t & ~p).sum())
        own = [dice(pair[0] == i, pair[1] == i) for pair in expected.values()]
        assert row["dice_mean"] == pytest.approx(np.mean(own))
        for sample, value in zip(expected, own, strict=True):
            assert float(samples[sample][f"dice_{name}"]) == pytest.approx(value)
    written = json.loads((made / "evaluation" / "metrics.json").read_text())
    counts = [[int(((true == t) & (predicted == p)).sum()) for p in range(3)] for t in range(3)]
    assert written["confusion"] == counts
    assert sum(map(sum, counts)) == 5 * math.prod(SHAPE)
    assert (written["samples"], written["split"], written["epochs"]) == (5, "test", 3)
    confusion = read(made / "evaluation" / "confusion.csv")
    assert [list(row.values()) for row in confusion] == [
        [name, *map(str, row)] for name, row in zip(CLASSES, counts, strict=True)
    ]


def test_some_masks_are_kept(made: Path, serial: ClassEvaluation) -> None:
    expected = by_hand(made)
    with np.load(made / "evaluation" / "masks.npz") as file:
        kept = dict(zip(file["samples"].tolist(), file["masks"], strict=True))
    assert list(kept) == sorted(expected)[:MASKS_SHOWN]
    for sample, mask in kept.items():
        np.testing.assert_array_equal(mask, expected[sample][1])
    assert not list((made / "evaluation").glob(".*")), "nothing half-written is left"


def test_every_class_is_printed(made: Path, serial: ClassEvaluation) -> None:
    console = Console(file=io.StringIO(), width=100)
    show_evaluation(serial, made, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "5 samples of the test split, step-00000007" in text
    for name in CLASSES:
        value = serial.scores[name]["dice"]
        assert re.search(rf"^ *{name} .*{value:.3g}", text, re.MULTILINE)


def test_mean_dice_leaves_out_samples_without_the_class() -> None:
    confusions = np.array([[[5, 1], [1, 3]], [[9, 1], [0, 0]]])
    assert mean_dice(confusions, ("background", "organ"))["organ"] == pytest.approx(6 / 8)
    assert math.isnan(mean_dice(confusions[1:], ("background", "organ"))["organ"])


def on_ranks(run: Path, *overrides: str) -> tuple[NDArray[np.int64], int]:
    result = evaluate(run, overrides=overrides)
    assert isinstance(result, ClassEvaluation)
    return result.confusions, len(result.masks)


@pytest.mark.parametrize(
    "overrides",
    [("grid.depth=2",), ("grid.data=2", "grid.width=2"), ("grid.data=3", "data.batch_size=5")],
    ids=str,
)
def test_the_same_on_every_grid(
    made: Path, serial: ClassEvaluation, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    run = Path(shutil.copytree(made, tmp_path / "run", symlinks=True))
    places = [int(o.rpartition("=")[2]) for o in overrides if o.startswith("grid")]
    results = run_ranks(math.prod(places), on_ranks, run, *overrides)
    for confusions, masks in results:
        assert np.abs(confusions - serial.confusions).max() <= 3
        np.testing.assert_array_equal(confusions.sum((1, 2)), [math.prod(SHAPE)] * 5)
        assert masks == (MASKS_SHOWN if confusions is results[0][0] else 0)
    assert [row["sample"] for row in read(run / "evaluation" / "samples.csv")] == list(
        serial.samples
    )
