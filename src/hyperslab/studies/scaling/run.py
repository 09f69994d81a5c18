"""Runs a scaling study: trains on each point's grid as every training runs, and reads the history.

Tables and figure are written after every point; a point that was measured is not run again.
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from hyperslab.checkpoint.retention import folder_of
from hyperslab.errors import (
    CheckpointError,
    DataError,
    DivergedError,
    HyperslabError,
    LayoutError,
    RecipeError,
    Stopped,
    UnsupportedOp,
    reason,
)
from hyperslab.launch.supervisor import launch
from hyperslab.planner.job import GridJob
from hyperslab.recipe.load import save_recipe
from hyperslab.recipe.schema import Recipe
from hyperslab.studies.run_folder import NEEDED_OF_STEPS, check_recipe, read_table
from hyperslab.studies.scaling.study import (
    MeasuredStep,
    Predictor,
    RefusedPoint,
    ScalingKind,
    ScalingPoint,
    Study,
    StudyRow,
    jobs_of,
    not_here,
)
from hyperslab.studies.scaling.summary import draw_study, write_tables
from hyperslab.util.atomic_files import partial_path

log = logging.getLogger("hyperslab")

MEASURED_EPOCHS = 4
"""Counts the epochs of each training; the first is left out (Oyama et al. 2020, V-B)."""


def measure_step(
    point: ScalingPoint, base: Recipe, study: Path, *, epochs: int = MEASURED_EPOCHS
) -> MeasuredStep:
    """Measures the steps of a training on the point's grid, in a folder below ``study``.

    A training that is there already is not repeated; one that was stopped begins anew.

    Raises:
        RecipeError: the folder holds the training of another recipe, or cannot be written.
        DataError: no step of the training had a whole mini-batch.
        HyperslabError: what the training raised.
    """
    folder = study / point.name
    found = earlier_measurement(point, base, study, epochs=epochs)
    if found is not None:
        log.info("%s is there already: its times are taken", folder)
        return found
    _train(point, base, folder, epochs)
    return _median_step(folder, epochs, crowded(point.ranks, base.device))


def earlier_measurement(
    point: ScalingPoint, base: Recipe, study: Path, *, epochs: int
) -> MeasuredStep | None:
    """Reads what was measured before, if it was.

    Raises:
        RecipeError: the folder holds the training of another recipe; names the keys.
    """
    folder = study / point.name
    if not folder.exists():
        return None
    wanted = point.recipe(base, output=folder, epochs=epochs)
    check_recipe(folder, wanted, "was measured with")
    return _median_step(folder, epochs, crowded(point.ranks, base.device))


def crowded(ranks: int, device: str) -> str:
    """Says why the times of so many ranks mean nothing on this machine; "" if they do.

    More processes than cores, or than GPUs, take turns instead of running side by side.
    """
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    # Not every system says on which cores a process may run.
    cores = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    places = torch.cuda.device_count() if cuda else len(cores)
    what = "GPU" if cuda else "core"
    if ranks <= places:
        return ""
    return f"{ranks} ranks on {places} {what}{'s' * (places > 1)} take turns"


def _train(point: ScalingPoint, base: Recipe, folder: Path, epochs: int) -> None:
    """Trains; the folder has its name when the training is complete."""
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


STOPPING_ERRORS = (CheckpointError, DataError, DivergedError, RecipeError)
"""Lists errors of a training that would stop the other points as well. The rest, memory that does
not suffice above all, is a property of one point."""


@dataclass(frozen=True, slots=True)
class StudyRequest:
    """Says what is to be studied: ``points`` of a ``recipe`` called ``name``.

    Runs, tables and figure go into ``output``. Each run takes ``epochs``. Without ``trains``
    nothing is run, and what was measured before stands beside the prediction. ``refused`` are
    points that cannot be.
    """

    kind: ScalingKind
    name: str
    recipe: Recipe
    points: tuple[ScalingPoint, ...]
    output: Path
    epochs: int
    trains: bool = True
    refused: tuple[RefusedPoint, ...] = ()


def run_study(request: StudyRequest, predictor: Predictor | None) -> Study:
    """Measures and predicts every point; what there is is written after each of them.

    A point that was measured before is not run again. Points that cannot be, and those whose
    training failed because of their grid, are named in the study and do not stop it.

    Raises:
        DataError, LayoutError, UnsupportedOp: there are no data, or no point can be.
        RecipeError: a point's folder holds another run, or ``output`` cannot be written.
        HyperslabError: what a training raised, of `STOPPING_ERRORS`, or if all failed.
    """
    jobs, refused = jobs_of(request.points, request.recipe)
    request = replace(request, refused=(*request.refused, *refused))
    if request.trains and any(job.assumed for job in jobs.values()):
        raise not_here(request.recipe, "; or --predict")
    study = _predicted_study(request, jobs, predictor)
    if not study.rows:
        raise study.refused[0].error
    _write_study(study, request.output)
    return _measured_study(request, study) if request.trains else study


def _predicted_study(
    request: StudyRequest, jobs: dict[ScalingPoint, GridJob], predictor: Predictor | None
) -> Study:
    """Makes the rows as far as they are known before anything runs."""
    rows = []
    refused = list(request.refused)
    accumulated = request.recipe.optimizer.accumulate
    for point, job in jobs.items():
        found = earlier_measurement(point, request.recipe, request.output, epochs=request.epochs)
        try:
            predicted = None if predictor is None else predictor.predict(job)
        except (LayoutError, UnsupportedOp) as error:
            words = f"{point.ranks} ranks ({point.cut}): {error}"
            refused.append(RefusedPoint(point.ranks, type(error)(words)))
            continue
        rows.append(StudyRow(point, point.batch_size * accumulated, found, predicted))
    machine = "" if predictor is None else predictor.machine.name
    refused.sort(key=lambda one: one.ranks)
    return Study(request.kind, request.name, tuple(rows), machine, tuple(refused))


def _measured_study(request: StudyRequest, study: Study) -> Study:
    """Measures every point of the study."""
    rows = list(study.rows)
    for place, row in enumerate(study.rows):
        point = row.point
        words = f"point {place + 1} of {len(rows)}: {point.ranks} ranks, {point.cut}, mini-batch"
        log.info("%s %d", words, point.batch_size)
        if crowd := crowded(point.ranks, request.recipe.device):
            log.warning("%s: its times say nothing about scaling", crowd)
        try:
            found = measure_step(point, request.recipe, request.output, epochs=request.epochs)
            rows[place] = replace(row, samples=found.samples, measured=found)
        except Stopped:
            log.warning("the same study again goes on here: %s begins anew", point.name)
            raise
        except STOPPING_ERRORS:
            raise
        except HyperslabError as error:
            log.warning("%s", error)
            rows[place] = replace(row, failure=str(error).splitlines()[0])
            if all(one.failure for one in rows):
                raise
        study = replace(study, rows=tuple(rows))
        _write_study(study, request.output)
    return study


def _write_study(study: Study, folder: Path) -> None:
    """Writes the study's tables and its figure, if there is anything in them."""
    if not any(row.measured or row.predicted for row in study.rows):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_tables(study, folder)
        draw_study(study, folder / "study.png")
    except OSError as error:
        raise RecipeError(f"cannot write into output {folder}: {reason(error)}") from None
