"""A run's folder written by hand, with numbers that look like a real one's."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import h5py
import numpy as np

NAMES = ("Omega_m", "sigma_8", "n_s", "H_0")
RANGES = ((0.27, 0.33), (0.72, 0.88), (0.86, 1.06), (63.0, 77.0))
SKILL = (0.55, 0.2, 0.95, 0.85)  # error of each parameter, against a spread of about 0.58


def fake_run(folder: Path, *, epochs: int = 30, wanted: int = 30, evaluated: bool = True) -> Path:
    """RUN/ with a recipe, histories, universes next to it, and perhaps an evaluation."""
    run, rng = folder / "run", np.random.default_rng(5)
    run.mkdir(parents=True)
    universes(folder / "universes", rng)
    (run / "recipe.yaml").write_text(RECIPE.format(data=folder / "universes", epochs=wanted))
    write_csv(run / "steps.csv", STEPS, step_rows(epochs, rng))
    write_csv(run / "epochs.csv", EPOCHS, epoch_rows(epochs, rng))
    if evaluated:
        evaluation(run / "evaluation", rng)
    return run


RECIPE = """\
model: {{name: cosmoflow, variant: paper2020, width: 32, batch_norm: true}}
data: {{path: "{data}", batch_size: 8}}
grid: {{data: 1, depth: 2, height: 1, width: 1}}
epochs: {epochs}
precision: float32
loss: mse
device: auto
seed: 1
"""
STEPS = ("step", "epoch", "loss", "learning_rate", "step_seconds", "wait_seconds",
         "samples_per_second", "memory_bytes")  # fmt: skip
EPOCHS = ("epoch", "train_loss", "validation_loss", "validation_mae", "seconds")


def step_rows(epochs: int, rng: np.random.Generator) -> Iterable[Sequence[float]]:
    for step in range(1, 10 * epochs + 1):
        seconds = 0.4 + 0.05 * rng.random() + (2.0 if step == 1 else 0)
        loss = 0.08 + 0.35 * np.exp(-step / 60) * (1 + 0.3 * rng.standard_normal())
        yield (step, (step - 1) // 10, abs(loss), 1e-3, seconds, 0.01 * rng.random() * seconds,
               8 / seconds, 3.1e8 + 1e6 * rng.random() + 2e6 * min(step, 20))  # fmt: skip


def epoch_rows(epochs: int, rng: np.random.Generator) -> Iterable[Sequence[float]]:
    for epoch in range(epochs):
        train = 0.08 + 0.35 * np.exp(-epoch / 6)
        valid = train + 0.03 + 0.015 * rng.standard_normal()
        yield (epoch, train, valid, valid**0.5 * 0.8, 4.6)


def evaluation(folder: Path, rng: np.random.Generator, *, samples: int = 64) -> None:
    folder.mkdir()
    true = rng.uniform(-1, 1, (samples, 4))
    skill = np.array(SKILL)
    predicted = true * (1 - skill**2) + 0.55 * skill * rng.standard_normal(true.shape) * 0.8
    low, high = np.array(RANGES).T
    physical = [low + (high - low) * (v + 1) / 2 for v in (true, predicted)]
    head = ["sample"]
    for n in NAMES:
        head += [f"true_{n}", f"predicted_{n}", f"true_phys_{n}", f"predicted_phys_{n}"]
    rows = [
        [f"univ_{i:04d}.hdf5", *(v[i, p] for p in range(4) for v in (true, predicted, *physical))]
        for i in range(samples)
    ]
    write_csv(folder / "predictions.csv", head, rows)
    errors = {
        n: errors_by_hand(true[:, i], predicted[:, i], physical[0][:, i], physical[1][:, i])
        for i, n in enumerate(NAMES)
    }
    value = {"parameters": errors, "samples": samples, "split": "test", "checkpoint": "best"}
    (folder / "metrics.json").write_text(json.dumps(value))


def errors_by_hand(
    t: np.ndarray, p: np.ndarray, tp: np.ndarray, pp: np.ndarray
) -> dict[str, float]:
    mse, of_mean = ((p - t) ** 2).mean(), (t**2).mean()
    return {
        "mse": mse, "mse_of_mean": of_mean, "ratio": mse / of_mean, "mae": abs(p - t).mean(),
        "rmse": mse**0.5, "bias": (p - t).mean(), "r2": 1 - mse / t.var(),
        "correlation": np.corrcoef(t, p)[0, 1], "mae_physical": abs(pp - tp).mean(),
        "rmse_physical": ((pp - tp) ** 2).mean() ** 0.5, "bias_physical": (pp - tp).mean(),
        "relative_error": (abs(pp - tp) / tp).mean(),
    }  # fmt: skip


def universes(folder: Path, rng: np.random.Generator, *, count: int = 10, size: int = 16) -> None:
    """Lumpy int16 counts in the public layout."""
    folder.mkdir()
    k = np.fft.fftfreq(size)
    power = (k[:, None, None] ** 2 + k[:, None] ** 2 + k**2 + 1e-3) ** -0.9
    for i in range(count):
        noise = np.fft.fftn(rng.standard_normal((size, size, size)))
        field = np.real(np.fft.ifftn(noise * power))
        rate = np.exp(1.3 * field / field.std())
        counts = rng.poisson(rate / rate.mean())[..., None].repeat(4, axis=-1)
        unit = rng.uniform(-1, 1, 4)
        low, high = np.array(RANGES).T
        with h5py.File(folder / f"univ_ics_{i:04d}.hdf5", "w") as file:
            file["full"] = counts.astype(np.int16)
            file["unitPar"] = unit
            file["physPar"] = low + (high - low) * (unit + 1) / 2
            file["namePar"] = np.array(NAMES, dtype="S")
            file["redshifts"] = np.array([0.0, 0.5, 1.5, 3.0])


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows(rows)
