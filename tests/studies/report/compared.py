"""Runs and sweeps written by hand, to be compared: networks of known errors."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.studies.report.fake import NAMES, write_csv

MEAN = 0.05  # of the training split's targets
EPOCHS = 12


def write_evaluation(
    folder: Path,
    *,
    noise: float,
    parts: int = 1,
    seed: int = 0,
    volumes: int = 40,
    shrink: float = 1.0,
    deviation: float | None = None,
) -> None:
    """Predictions off by ``noise``, towards zero by ``shrink``; ``parts`` samples a volume.

    Such a ``deviation`` is predicted of all, or none.
    """
    folder.mkdir(parents=True)
    for split, file in ((1, "predictions.csv"), (2, "validation.csv")):
        true = np.random.default_rng(split).uniform(-1, 1, (volumes, 4)).repeat(parts, 0)
        off = np.random.default_rng([split, seed]).normal(0, noise, true.shape)
        predicted = shrink * (true + off)
        names = [f"u{volume:03}" for volume in range(volumes) for _ in range(parts)]
        head = ["sample", "volume"]
        head += [f"{kind}_{name}" for name in NAMES for kind in ("true", "predicted")]
        rows = [
            [f"{name}_{i}", name, *itertools.chain(*zip(t, p, strict=True))]
            for i, (name, t, p) in enumerate(zip(names, true, predicted, strict=True))
        ]
        if deviation is not None:
            head += [f"std_{name}" for name in NAMES]
            rows = [[*row, *[deviation] * 4] for row in rows]
        write_csv(folder / file, head, rows)
    content = {
        "parameters": {name: {"mse": 0.1, "ratio": 0.3} for name in NAMES},
        "training_mean": dict.fromkeys(NAMES, MEAN),
    }
    (folder / "metrics.json").write_text(json.dumps(content))


def write_run(
    folder: Path, *, seed: int, noise: float, parts: int = 1, shrink: float = 1.0, width: int = 64
) -> Path:
    """A run with its histories and an evaluation; its loss falls and jumps."""
    write_evaluation(folder / "evaluation", noise=noise, parts=parts, seed=seed, shrink=shrink)
    recipe = {
        "model": {"name": "cosmoflow", "variant": "paper2020"},
        "data": {"path": "universes", "subvolume": width},
        "epochs": EPOCHS,
        "seed": seed,
        "loss": "mse",
        "output": str(folder),
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    random = np.random.default_rng(seed)
    head = ["epoch", "train_loss", "validation_loss", "test_loss", "seconds"]
    rows = []
    for epoch in range(EPOCHS):
        loss = noise**2 + 0.3 * np.exp(-epoch / 3) * (1 + 2 * random.random())
        rows.append((epoch, loss, 1.1 * loss, 1.2 * loss, 60.0 + seed))
    write_csv(folder / "epochs.csv", head, rows)
    return folder


def write_swept(folder: Path) -> Path:
    """A sweep of whole volumes, of parts that hedge, and of something better."""
    made = {
        "64 + batch norm": {"noise": 0.12},
        "64": {"noise": 0.25},
        "16": {"noise": 1.1, "parts": 8, "shrink": 0.3, "width": 16},
    }
    rows = []
    for name, keys in made.items():
        paths = []
        for seed in range(3):
            path = f"{name}/rate-0.001-seed-{seed}"
            write_run(folder / path, seed=seed, **keys)  # type: ignore[arg-type]
            paths.append(path)
        rows.append({"name": name, "paths": paths})
    rows.append({"name": "not done yet", "paths": []})
    (folder / "sweep.json").write_text(json.dumps({"variants": rows, "failures": {}}))
    return folder


def columns(path: Path, kind: str) -> NDArray[np.float64]:
    """(N, 4) of a file of predictions."""
    table = np.genfromtxt(path, delimiter=",", names=True, dtype=None, encoding="utf-8")
    return np.stack([table[f"{kind}_{name}"] for name in NAMES], 1)
