"""Evaluate a run: predict a split that the network never saw and measure the errors."""

from __future__ import annotations

import datetime
import logging
import os
import platform
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hyperslab.checkpoint.retention import best_of, folder_of, latest
from hyperslab.checkpoint.save_load import load
from hyperslab.comm import Grid
from hyperslab.comm.agreement import from_main, start_alike
from hyperslab.comm.grid import AXES
from hyperslab.comm.start.last_words import last_words
from hyperslab.comm.start.variables import read_variables
from hyperslab.data import Dataset
from hyperslab.errors import DataError
from hyperslab.evaluate.regression import Evaluation, evaluate_regression
from hyperslab.evaluate.segmentation import ClassEvaluation, evaluate_segmentation
from hyperslab.evaluate.sliding_windows import OF_CLASSES_ONLY, WindowPolicy
from hyperslab.evaluate.surfaces import SurfacePolicy
from hyperslab.evaluate.trained_ranges import as_trained, card_of
from hyperslab.recipe.compare import launch_facts
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import Recipe
from hyperslab.train.build import build_model, data_card, open_data, training_digest
from hyperslab.train.built.objectives import build_metrics
from hyperslab.train.objective import MeansOfMetrics
from hyperslab.train.parts.given import NOTHING_GIVEN, Given

log = logging.getLogger("hyperslab")

ALL_SURFACES = SurfacePolicy()

UNCUT = tuple(f"grid.{axis}=1" for axis in AXES)


def evaluate(
    run: str | Path,
    *,
    checkpoint: str = "best",
    split: str = "test",
    overrides: Sequence[str] = (),
    calibrate: bool = False,
    surfaces: SurfacePolicy = ALL_SURFACES,
    windows: WindowPolicy | None = None,
    given: Given = NOTHING_GIVEN,
) -> Evaluation | ClassEvaluation:
    """Predict every sample of a split once and write what comes of it to ``run/evaluation``.

    Every rank calls it alike and gets the same numbers, which do not depend on the grid. The
    network predicts without dropout and augmentation, in the recipe's precision.

    Args:
        run: the folder of a training run.
        checkpoint: "best" (of the lowest validation loss), "latest", the name of one of the
            run's checkpoints, or a path.
        split: "test", "validation", "train" or "all".
        overrides: see `recipe_for`.
        calibrate: predict the validation split, too, and recalibrate the predictions for whole
            volumes by lines that are fitted to it; see `evaluate_regression`.
        surfaces: of classes, whether their distances are measured where the files say how large a
            voxel is, on one rank that then holds the masks of a sample.
        windows: of classes, predict volumes in windows that overlap, each cut over all ranks.
        given: the network and the source of a run that a program has trained.

    Raises:
        DataError: not a run's folder, no such checkpoint, nothing to calibrate or no other split
            to do so, or the results cannot be written.
        CheckpointError: the checkpoint is corrupt or of another network.
        RecipeError: an override is bad.
        LayoutError: the grid does not match the ranks.
    """
    run = Path(run)
    recipe = recipe_for(run, overrides, axis="data" if windows is None else "depth")
    options: dict[str, object] = {
        "checkpoint": checkpoint,
        "split": split,
        "calibrate": calibrate,
        **({} if windows is None else windows.facts),
    }
    facts = launch_facts(recipe, command="evaluate", run=str(run.absolute()), **options)
    started = start_alike(recipe.device, recipe.timeout, facts)
    try:
        with last_words():
            grid = Grid(**recipe.grid.model_dump())
            path = find_checkpoint(run, checkpoint)
            result = _measure(
                recipe,
                grid,
                path,
                split,
                given,
                calibrate=calibrate,
                surfaces=surfaces,
                windows=windows,
            )
            folder = run / "evaluation"
            from_main(
                lambda: _write(result, folder),
                failing=f"cannot write into {folder}",
                error=DataError,
            )
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
    if which in ("latest", "best"):
        found = latest(run) if which == "latest" else best_of(run)
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


def _measure(
    recipe: Recipe,
    grid: Grid,
    path: Path,
    split: str,
    given: Given,
    *,
    calibrate: bool,
    surfaces: SurfacePolicy,
    windows: WindowPolicy | None,
) -> Evaluation | ClassEvaluation:
    """Predict and compare; every rank gets the same."""
    if calibrate and split in ("validation", "all"):
        raise DataError(
            f"calibration fits lines to the validation split, so the {split} split says nothing "
            "about them\n    measure the test split"
        )
    with ExitStack() as stack:
        recipe, data = _opened_as_trained(recipe, grid, path, split, given, stack)
        if calibrate and data.classes:
            raise DataError(f"{recipe.data.where} has classes: calibration is for parameters")
        if windows is not None and not data.classes:
            raise DataError(OF_CLASSES_ONLY)
        model = build_model(recipe, data_card(data), grid, given)
        state = load(path, model, trust_pickle=recipe.checkpoint.trust_pickle)
        if grid.is_main and state.get("samples") not in (None, training_digest(recipe, data)):
            log.warning(
                "%s was trained on another split or other files: the %s split of %s may hold "
                "samples that it has seen",
                path,
                split,
                recipe.data.where,
            )
        begin = time.perf_counter()
        metrics = MeansOfMetrics(grid, build_metrics(recipe, data_card(data), given))
        result: Evaluation | ClassEvaluation
        if data.classes:
            result = evaluate_segmentation(model, data, recipe, surfaces, metrics, windows)
        else:
            seen = None
            if calibrate:
                seen = open_data(recipe, grid, split="validation", shuffle=False, given=given)
                stack.enter_context(seen)
            result = evaluate_regression(model, data, recipe, seen, metrics)
        result.facts.update(
            samples=len(data),
            split=split,
            checkpoint=path.name,
            epochs=state.get("position", {}).get("epoch"),
            weights=sum(p.numel() for p in model.parameters()),
            grid=grid.extents,
            precision=recipe.precision,
            **({"metrics": metrics.result()} if metrics.metrics else {}),
            seconds=time.perf_counter() - begin,
            **_environment(grid),
        )
    return result


def _opened_as_trained(
    recipe: Recipe, grid: Grid, path: Path, split: str, given: Given, stack: ExitStack
) -> tuple[Recipe, Dataset]:
    """The split, and the recipe that opens it with the ranges of targets of the checkpoint."""
    data = stack.enter_context(open_data(recipe, grid, split=split, shuffle=False, given=given))
    about = card_of(path, trust_pickle=recipe.checkpoint.trust_pickle)
    ranged = as_trained(recipe, data, about)
    if ranged is not recipe:
        data = stack.enter_context(open_data(ranged, grid, split=split, shuffle=False, given=given))
    return ranged, data


def _write(result: Evaluation | ClassEvaluation, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    result.write(folder)


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
    place = read_variables(os.environ)
    return 1 if place is None else place.size
