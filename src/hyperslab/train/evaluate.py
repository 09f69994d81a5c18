"""Evaluate a run: predict a split that the network never saw and measure the errors."""

from __future__ import annotations

import csv
import datetime
import io
import json
import logging
import math
import os
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hyperslab.comm import Grid
from hyperslab.comm.grid import AXES
from hyperslab.data import Dataset
from hyperslab.errors import DataError
from hyperslab.train.about import About
from hyperslab.train.checkpoint import load
from hyperslab.train.checkpoints import folder_of, latest
from hyperslab.train.config import Recipe
from hyperslab.train.metrics import (
    Array,
    Predictions,
    errors_per_parameter,
    means_over_parameters,
)
from hyperslab.train.ranks import on_main, start_ranks
from hyperslab.train.recipe import load_recipe
from hyperslab.train.setup import build_model, open_data, training_digest, training_split

log = logging.getLogger("hyperslab")

UNCUT = tuple(f"grid.{axis}=1" for axis in AXES)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The errors of one checkpoint on one split; ``facts`` say how they came about."""

    predictions: Predictions
    errors: dict[str, dict[str, float]]
    facts: dict[str, Any]


def evaluate(
    run: str | Path,
    *,
    checkpoint: str = "best",
    split: str = "test",
    overrides: Sequence[str] = (),
) -> Evaluation:
    """Predict every sample of a split once and write the errors to ``run/evaluation``.

    Every rank calls it alike and gets the same numbers, which do not depend on the grid. The
    network predicts without dropout and augmentation, in the recipe's precision.

    Args:
        run: the folder of a training run.
        checkpoint: "best" (of the lowest validation loss), "latest", the name of one of the
            run's checkpoints, or a path.
        split: "test", "validation", "train" or "all".
        overrides: see `recipe_for`.

    Raises:
        DataError: not a run's folder, no such checkpoint, or the results cannot be written.
        CheckpointError: the checkpoint is corrupt or of another network.
        RecipeError: an override is bad.
        LayoutError: the grid does not match the ranks.
    """
    run = Path(run)
    recipe = recipe_for(run, overrides)
    started = start_ranks(recipe.device, recipe.timeout)
    try:
        grid = Grid(**recipe.grid.model_dump())
        path = find_checkpoint(run, checkpoint)
        result = _measure(recipe, grid, path, split)
        on_main(lambda: write(result, run), f"cannot write into {run / 'evaluation'}", DataError)
    finally:
        if started:
            dist.destroy_process_group()
    return result


def recipe_for(
    run: Path, overrides: Sequence[str], *, ranks: int | None = None, axis: str = "data"
) -> Recipe:
    """The run's recipe for this many ranks, by default those of the environment.

    Overrides such as ``grid.depth=2`` describe a grid of their own: the axes that they do not
    name are not cut. Without them the grid is the recipe's where it has as many places as there
    are ranks, and else cuts along ``axis`` alone: the mini-batch.
    """
    if not (run / "recipe.yaml").is_file():
        raise DataError(
            f"{run} is not the folder of a run: it has no recipe.yaml\n"
            "    `hyperslab train RECIPE` makes one and says where"
        )
    if any(override.startswith("grid") for override in overrides):
        return load_recipe(run / "recipe.yaml", [*UNCUT, *overrides])
    recipe = load_recipe(run / "recipe.yaml", overrides)
    if (size := ranks or _ranks()) == recipe.grid.size:
        return recipe
    return load_recipe(run / "recipe.yaml", [*UNCUT, f"grid.{axis}={size}", *overrides])


def find_checkpoint(run: Path, which: str) -> Path:
    """The folder that "best", "latest", a name or a path means; every rank calls it.

    Raises:
        DataError: there is none.
    """
    folder = folder_of(run)
    if which == "latest":
        found = latest(run)
    else:
        candidates = (folder / which, Path(which))
        found = next((path.resolve() for path in candidates if path.is_dir()), None)
    if found is None:
        there = sorted(path.name for path in folder.glob("[!.]*"))
        raise DataError(
            f"{run} has no checkpoint {which!r}; "
            + (f"it has: {', '.join(there)}" if there else "it has none: train it first")
        )
    return found


@torch.no_grad()
def predict(
    model: torch.nn.Module, data: Dataset, *, precision: str = "float32"
) -> tuple[Array, Array]:
    """True and predicted normalised parameters, both (N, P) float64, in the order of epoch 0.

    Every rank gets those of all samples.
    """
    model.eval()
    device, half = data.grid.device.type, precision == "bf16"
    true, predicted = [], []
    for x, y in data.epoch(0):
        with torch.autocast(device, torch.bfloat16, enabled=half):
            prediction = model(x)
        true.append(y.full().double().cpu())
        predicted.append(prediction.full().double().cpu())
    return torch.cat(true).numpy(), torch.cat(predicted).numpy()


def training_mean(data: Dataset, recipe: Recipe) -> Array:
    """The mean (P,) of the normalised targets over the training split."""
    source, chosen = data.source, training_split(recipe, data)
    return np.mean([source.target(sample) for sample in chosen], axis=0, dtype=np.float64)


def write(result: Evaluation, run: Path) -> None:
    """``predictions.csv``, ``metrics.csv``, ``metrics.json``: each is there whole or not at all."""
    folder, p = run / "evaluation", result.predictions
    folder.mkdir(exist_ok=True)
    columns = [p.true, p.predicted, p.true_physical, p.predicted_physical]
    values = np.stack(columns, axis=-1).reshape(len(p.samples), -1)
    kinds = ("true", "predicted", "true_phys", "predicted_phys")
    head = ["sample", *(f"{kind}_{name}" for name in p.names for kind in kinds)]
    rows = ([name, *row] for name, row in zip(p.samples, values.tolist(), strict=True))
    _replace(folder / "predictions.csv", _csv(head, rows))
    keys = list(result.errors[p.names[0]])
    errors = ([name, *row.values()] for name, row in result.errors.items())
    _replace(folder / "metrics.csv", _csv(["parameter", *keys], errors))
    content = {"parameters": result.errors, **result.facts}
    _replace(folder / "metrics.json", json.dumps(_defined(content), indent=1) + "\n")


def _measure(recipe: Recipe, grid: Grid, path: Path, split: str) -> Evaluation:
    """Predict and compare; every rank gets the same."""
    with open_data(recipe, grid, split=split, shuffle=False) as data:
        model = build_model(recipe, About.of(data), grid)
        state = load(path, model)
        if grid.is_main and state.get("samples") not in (None, training_digest(recipe, data)):
            log.warning(
                "%s was trained on another split or other files: the %s split of %s may hold "
                "samples that it has seen",
                path,
                split,
                recipe.data.path,
            )
        begin = time.perf_counter()
        true, predicted = predict(model, data, precision=recipe.precision)
        seconds = time.perf_counter() - begin
        predictions = Predictions(
            data.targets,
            tuple(data.names(0)),
            true,
            predicted,
            data.parameters.physical(true),
            data.parameters.physical(predicted),
            training_mean(data, recipe),
        )
    errors = errors_per_parameter(predictions)
    facts = {
        "mean": means_over_parameters(errors),
        "samples": len(predictions.samples),
        "split": split,
        "checkpoint": path.name,
        "epochs": state.get("position", {}).get("epoch"),
        "training_mean": dict(zip(data.targets, predictions.training_mean.tolist(), strict=True)),
        "weights": sum(p.numel() for p in model.parameters()),
        "grid": grid.extents,
        "precision": recipe.precision,
        "seconds": seconds,
        **_environment(grid),
    }
    return Evaluation(predictions, errors, facts)


def _environment(grid: Grid) -> dict[str, Any]:
    cuda = grid.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(grid.device) if cuda else "CPU",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {
            "hyperslab": version("hyperslab"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _ranks() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _csv(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


def _defined(value: Any) -> Any:
    """The same without NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _defined(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
