"""Measure a point: train on its grid, as every training runs, and read the history."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import numpy as np
import torch

from hyperslab.atomic_files import partial_path
from hyperslab.checkpoint.retention import folder_of
from hyperslab.errors import DataError, RecipeError, reason
from hyperslab.launch.launcher import launch
from hyperslab.recipe.compare import differences, settings_of
from hyperslab.recipe.load import load_recipe, save_recipe
from hyperslab.recipe.schema import Recipe
from hyperslab.report.run_folder import NEEDED_OF_STEPS, read_table
from hyperslab.scaling.points import ScalingPoint
from hyperslab.scaling.study import MeasuredStep

log = logging.getLogger("hyperslab")

EPOCHS = 4
"""Of each training; the first is left out (Oyama et al. 2020, section V-B)."""


def measure(
    point: ScalingPoint, base: Recipe, study: Path, *, epochs: int = EPOCHS
) -> MeasuredStep:
    """The steps of a training on the point's grid, into a folder of its own below ``study``.

    A training that is there already is not repeated; one that was stopped begins anew.

    Raises:
        RecipeError: the folder holds the training of another recipe, or cannot be written.
        DataError: no step of the training had a whole mini-batch.
        HyperslabError: what the training raised.
    """
    folder = study / point.name
    found = measured(point, base, study, epochs=epochs)
    if found is not None:
        log.info("%s is there already: its times are taken", folder)
        return found
    _train(point, base, folder, epochs)
    return _median_step(folder, epochs, crowded(point.ranks, base.device))


def measured(point: ScalingPoint, base: Recipe, study: Path, *, epochs: int) -> MeasuredStep | None:
    """What was measured before, if it was.

    Raises:
        RecipeError: the folder holds the training of another recipe; names the keys.
    """
    folder = study / point.name
    if not folder.exists():
        return None
    wanted = point.recipe(base, output=folder, epochs=epochs)
    others = differences(settings_of(wanted), settings_of(load_recipe(folder / "recipe.yaml")))
    if others:
        raise RecipeError(
            f"{folder} was measured with another recipe: {', '.join(others)} differ\n"
            "    choose another --output, or remove it"
        )
    return _median_step(folder, epochs, crowded(point.ranks, base.device))


def crowded(ranks: int, device: str) -> str:
    """Why the times of so many ranks of this machine mean nothing; "" if they do.

    More processes than cores, or than GPUs, take turns instead of running side by side.
    """
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    places = torch.cuda.device_count() if cuda else _cores()
    what = "GPU" if cuda else "core"
    if ranks <= places:
        return ""
    return f"{ranks} ranks on {places} {what}{'s' * (places > 1)} take turns"


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _train(point: ScalingPoint, base: Recipe, folder: Path, epochs: int) -> None:
    """The folder has its name when the training is complete."""
    partial = partial_path(folder)
    file = partial / "point.yaml"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_recipe(point.recipe(base, output=partial, epochs=epochs), file)
        command = ["-m", "hyperslab", "train", str(file)]
        seconds = base.timeout
        launch(point.ranks, command, partial / "logs", limit=seconds, patience=seconds)
        file.unlink()
        shutil.rmtree(folder_of(partial))  # the weights of so short a training are of no use
        save_recipe(point.recipe(base, output=folder, epochs=epochs), partial / "recipe.yaml")
        partial.rename(folder)
    except OSError as error:
        raise RecipeError(f"cannot write into {folder.parent}: {reason(error)}") from None


def _median_step(folder: Path, epochs: int, crowded: str) -> MeasuredStep:
    steps = read_table(folder / "steps.csv", NEEDED_OF_STEPS)
    if not steps or steps["epoch"].max() + 1 < epochs:
        raise DataError(f"{folder} holds no training of {epochs} epochs: remove it")
    samples = np.rint(steps["samples_per_second"] * steps["step_seconds"])
    whole = samples.max()
    chosen = (steps["epoch"] > 0) & (samples == whole)
    seconds = steps["step_seconds"][chosen]
    lower, median, upper = np.quantile(seconds, (0.25, 0.5, 0.75))
    return MeasuredStep(
        seconds=float(median),
        lower=float(lower),
        upper=float(upper),
        steps=len(seconds),
        samples=int(whole),
        waiting=float(np.median(steps["wait_seconds"][chosen])),
        memory=float(np.nanmax(steps["memory_bytes"])),
        crowded=crowded,
    )
