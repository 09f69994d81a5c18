"""Tiny universes and recipes for the tests of training: noise whose mean tells the first target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import yaml

from hyperslab.models.cosmoflow import COSMOFLOW_VARIANTS
from hyperslab.recipe.load import load_recipe
from hyperslab.train.run import train

WIDTH = 16


def write_universes(folder: Path, count: int, *, width: int = WIDTH) -> Path:
    """Files in the public HDF5 layout."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(1)
    for i in range(count):
        unit = random.uniform(-1, 1, 4)
        with h5py.File(folder / f"univ_ics_{i:03}.hdf5", "w") as file:
            counts = random.poisson(1 + 0.5 * unit[0], (width, width, width, 4))
            file["full"] = counts.astype(np.int16)
            file["unitPar"] = unit
            file["physPar"] = 1 + 0.1 * unit
            file["namePar"] = np.array([b"Omega_m", b"sigma_8", b"n_s", b"H_0"])
            file["redshifts"] = np.array([0.0, 0.5, 1.5, 3.0])
    return folder


def write_recipe(path: Path, data: Path, **keys: Any) -> Path:
    """A recipe for them, with batch norm, dropout and augmentation; 11 of 13 train, 1 validates."""
    values: dict[str, Any] = {
        "model": {"variant": "lbann", "batch_norm": True},  # the smallest network
        "data": {"path": str(data), "batch_size": 4, "augment": True},
        # With eps=1e-8 Adam's first steps are signs, also of gradients that are rounding errors.
        "optimizer": {"learning_rate": 1e-3, "eps": 1e-3},
        "epochs": 3,
        "checkpoint": {"every": 10},
        "device": "cpu",
        "timeout": 60,
        "output": str(path.with_suffix("")),
    }
    path.write_text(yaml.safe_dump({**values, **keys}))
    return path


@contextmanager
def narrow_network() -> Iterator[None]:
    """Let the recipes' network have 64 and 16 hidden features.

    With its own, 4.7 million weights, what takes time is writing them to checkpoints.
    """
    wide = COSMOFLOW_VARIANTS["lbann"]
    with mock.patch.dict(COSMOFLOW_VARIANTS, lbann=lambda n: replace(wide(n), hidden=(64, 16))):
        yield


def losses(run: Path) -> list[float]:
    """By step, after checking that every step is there once."""
    header, *rows = [line.split(",") for line in (run / "steps.csv").read_text().splitlines()]
    assert header[:3] == ["step", "epoch", "loss"]
    assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1))
    return [float(row[2]) for row in rows]


def run(recipe: Path, *overrides: str, resume: bool = False) -> None:
    """Train a narrow network in this process, or as this rank."""
    with narrow_network():
        train(load_recipe(recipe, overrides), resume=resume)
