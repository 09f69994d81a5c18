"""Surfaces of scans of several shapes, in an evaluation (tiers: one process; gloo ranks)."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from hyperslab.checkpoint.save_load import save
from hyperslab.models import UNet3D
from hyperslab.train import evaluate as module
from hyperslab.train.evaluate import ClassEvaluation, evaluate
from hyperslab.train.metrics import surface_scores
from tests.formats.nifti.lists import CLASSES, SHAPES, SPACING, Case, decathlon
from tests.ranks import run_ranks

MULTIPLE = 4


def network() -> UNet3D:
    torch.manual_seed(0)
    model = UNet3D(1, 3, channels=2, levels=2)
    model(torch.randn(2, 1, 16, 16, 16))
    return model.eval()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Case]]:
    folder = tmp_path_factory.mktemp("surfaces")
    cases = decathlon(folder / "task")
    recipe = {
        "model": {"name": "unet3d", "channels": 2, "levels": 2},
        "data": {
            "path": str(folder / "task"),
            "batch_size": 1,
            "multiple": MULTIPLE,
            "window": [-100, 400],
        },
        "loss": "dice",
        "device": "cpu",
        "timeout": 60,
        "output": str(folder / "run"),
    }
    run = folder / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    save(run / "checkpoints" / "step-00000007", network(), position={"epoch": 3})
    (run / "checkpoints" / "best").symlink_to("step-00000007")
    return run, cases


def by_hand(case: Case) -> np.ndarray:
    """The mask of the plain network on the padded volume, cut back."""
    values, labels = case
    rims = [r for extent in reversed(labels.shape) for r in (0, -extent % MULTIPLE)]
    x = (torch.from_numpy(values).float().clamp(-100, 400) + 100) / 500
    with torch.no_grad():
        scores = network()(torch.nn.functional.pad(x, rims)[None])
    inside = tuple(map(slice, labels.shape))
    return scores[0].argmax(0)[inside].numpy().astype(np.uint8)


def evaluated(run: Path, *grid: str) -> ClassEvaluation:
    result = evaluate(run, split="all", overrides=grid)
    assert isinstance(result, ClassEvaluation)
    return result


def test_every_scan_by_its_own_voxels(made: tuple[Path, list[Case]]) -> None:
    run, cases = made
    result = evaluated(run)
    assert list(result.samples) == [f"BRATS_{number:03}" for number in range(4)]
    for name, case in zip(result.samples, cases, strict=True):
        mask = by_hand(case)
        for label in (1, 2):
            expected = surface_scores(case[1], mask, label, SPACING[::-1])
            found = result.surfaces[name][CLASSES[label]]
            assert found.presence == expected.presence
            assert found.average == pytest.approx(expected.average, nan_ok=True)
    assert result.confusion.sum() == sum(math.prod(shape) for shape in SHAPES), "no added voxel"
    written = json.loads((run / "evaluation/metrics.json").read_text())
    assert written["surfaces"] == {"tolerance_mm": 2.0, "samples": 4, "left_out": []}
    assert written["channels"] == ["FLAIR"]
    assert "hausdorff_95_mm" in written["classes"]["tumour"]
    assert "hausdorff_95_mm" not in written["classes"]["background"]
    with (run / "evaluation/samples.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["presence_edema"] for row in rows} <= {"both", "missed", "invented", "absent"}


def test_the_same_on_a_grid(made: tuple[Path, list[Case]]) -> None:
    run, _ = made
    serial = evaluated(run)
    for found in run_ranks(4, evaluated, run, "grid.depth=2", "grid.width=2"):
        assert np.abs(found.confusions - serial.confusions).max() <= 3
        assert found.surfaces.keys() == serial.surfaces.keys()
        for name, by in serial.surfaces.items():
            for of, one in by.items():
                got = found.surfaces[name][of].average
                assert got == pytest.approx(one.average, rel=0.05, nan_ok=True)


def test_what_is_too_large_is_left_out_and_said(
    made: tuple[Path, list[Case]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "free_memory", lambda: 1000)
    result = evaluated(made[0])
    assert not result.surfaces
    assert "BRATS_000: measuring it takes" in result.facts["surfaces"]["left_out"][0]
    plain = evaluate(made[0], split="all", surfaces=None)
    assert "surfaces" not in plain.facts
