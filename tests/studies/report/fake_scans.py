"""The folder of a segmentation's run, written by hand, beside its scans."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np

from tests.studies.report.fake import STEPS as STEP_COLUMNS
from tests.studies.report.fake import step_rows, write_csv
from tests.train.scans import CLASSES, write_scans

RECIPE = """\
model: {{name: unet3d, channels: 8, levels: 3, statistics: replica}}
data: {{path: "{data}", batch_size: 2, window: [-100.0, 200.0]}}
grid: {{data: 1, depth: 2, height: 1, width: 1}}
epochs: {epochs}
precision: float32
loss: dice_cross_entropy
device: auto
seed: 1
"""
SHAPE = (24, 30, 28)
CONFUSION = [[9000, 300, 10], [200, 3000, 60], [5, 100, 400]]


def fake_run(folder: Path, *, epochs: int = 25, evaluated: bool = True) -> Path:
    """RUN/ with a recipe, histories, and perhaps an evaluation of two scans."""
    run, rng = folder / "run", np.random.default_rng(5)
    run.mkdir(parents=True)
    write_scans(folder / "scans", 4, shape=SHAPE)
    (run / "recipe.yaml").write_text(RECIPE.format(data=folder / "scans", epochs=epochs))
    write_csv(run / "steps.csv", STEP_COLUMNS, step_rows(epochs, rng))
    measures = [f"validation_dice_{name}" for name in CLASSES]
    counts = [f"{kind}_{name}" for name in CLASSES for kind in ("tp", "fp", "fn")]
    head = ["epoch", "train_loss", "validation_loss", *measures, *counts]
    rows = []
    for epoch in range(epochs):
        loss = 0.3 + 1.2 * np.exp(-epoch / 6)
        dice = [0.99, 0.94 - 0.8 * np.exp(-epoch / 4), 0.7 - 0.7 * np.exp(-epoch / 12)]
        rows.append([epoch, loss, loss + 0.05, *dice, *[100] * 9, 1e-3, 4.6])
    write_csv(run / "epochs.csv", [*head, "learning_rate", "seconds"], rows)
    if evaluated:
        evaluation(run / "evaluation", folder / "scans", rng)
    return run


def evaluation(folder: Path, scans: Path, rng: np.random.Generator) -> None:
    folder.mkdir()
    scores = {}
    for i, name in enumerate(CLASSES):
        tp = CONFUSION[i][i]
        fp = sum(row[i] for row in CONFUSION) - tp
        fn = sum(CONFUSION[i]) - tp
        scores[name] = {
            "dice_mean": 0.9, "dice": 2 * tp / (2 * tp + fp + fn), "iou": tp / (tp + fp + fn),
            "precision": tp / (tp + fp), "recall": tp / (tp + fn), "true_positives": tp,
            "false_positives": fp, "false_negatives": fn,
        }  # fmt: skip
    content = {"classes": scores, "confusion": CONFUSION, "samples": 2, "split": "test"}
    (folder / "metrics.json").write_text(json.dumps({**content, "checkpoint": "step-7"}))
    samples, masks = ["volume-1", "volume-3"], []
    for sample in samples:
        with h5py.File(scans / f"{sample}.hdf5") as file:
            mask = file["segmentation"][0]
        off = rng.random(mask.shape) < 0.02
        masks.append(np.where(off, 1, np.roll(mask, 1, 2)).astype(np.uint8))
    np.savez_compressed(folder / "masks.npz", samples=np.array(samples), masks=np.stack(masks))
