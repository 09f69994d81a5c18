"""A whole study: one point after the other, its tables and its figure."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

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
from hyperslab.plan.job import GridJob
from hyperslab.recipe.schema import Recipe
from hyperslab.scaling.figure import draw_study
from hyperslab.scaling.measure import crowded, measure, measured
from hyperslab.scaling.points import RefusedPoint, ScalingKind, ScalingPoint
from hyperslab.scaling.predict import Predictor, jobs_of
from hyperslab.scaling.study import Study, StudyRow
from hyperslab.scaling.tables import write_tables

log = logging.getLogger("hyperslab")

EVERYWHERE = (CheckpointError, DataError, DivergedError, RecipeError)
"""What a training may raise that would stop the other points as well. The rest, memory that does
not suffice above all, is a property of one point."""


@dataclass(frozen=True, slots=True)
class StudyRequest:
    """What is to be studied: ``points`` of a ``recipe`` called ``name``.

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
    """Measure and predict every point; what there is is written after each of them.

    A point that was measured before is not run again. Points that cannot be, and those whose
    training failed because of their grid, are named in the study and do not stop it.

    Raises:
        DataError, LayoutError, UnsupportedOp: there are no data, or no point can be.
        RecipeError: a point's folder holds another run, or ``output`` cannot be written.
        HyperslabError: what a training raised, of `EVERYWHERE`, or if all failed.
    """
    jobs, refused = jobs_of(request.points, request.recipe)
    request = replace(request, refused=(*request.refused, *refused))
    if request.trains and any(job.assumed for job in jobs.values()):
        raise DataError(
            f"{request.recipe.data.where} is not here\n    data.path=null data.synthetic.width=N "
            "takes its place: volumes made in memory; or --predict"
        )
    study = _predicted(request, jobs, predictor)
    if not study.rows:
        raise study.refused[0].error
    _write(study, request.output)
    return _measured(request, study) if request.trains else study


def _predicted(
    request: StudyRequest, jobs: dict[ScalingPoint, GridJob], predictor: Predictor | None
) -> Study:
    """The rows as far as they are known before anything runs."""
    rows = []
    refused = list(request.refused)
    accumulated = request.recipe.optimizer.accumulate
    for point, job in jobs.items():
        found = measured(point, request.recipe, request.output, epochs=request.epochs)
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


def _measured(request: StudyRequest, study: Study) -> Study:
    """The study with every point measured."""
    rows = list(study.rows)
    for place, row in enumerate(study.rows):
        point = row.point
        words = f"point {place + 1} of {len(rows)}: {point.ranks} ranks, {point.cut}, mini-batch"
        log.info("%s %d", words, point.batch_size)
        if crowd := crowded(point.ranks, request.recipe.device):
            log.warning("%s: its times say nothing about scaling", crowd)
        try:
            found = measure(point, request.recipe, request.output, epochs=request.epochs)
        except Stopped:
            log.warning("the same study again goes on here: %s begins anew", point.name)
            raise
        except EVERYWHERE:
            raise
        except HyperslabError as error:
            log.warning("%s", error)
            rows[place] = replace(row, failure=str(error).splitlines()[0])
            if all(one.failure for one in rows):
                raise
        else:
            rows[place] = replace(row, samples=found.samples, measured=found)
        study = replace(study, rows=tuple(rows))
        _write(study, request.output)
    return study


def _write(study: Study, folder: Path) -> None:
    """Its tables and its figure, if there is anything in them."""
    if not any(row.measured or row.predicted for row in study.rows):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_tables(study, folder)
        draw_study(study, folder / "study.png")
    except OSError as error:
        raise RecipeError(f"cannot write into output {folder}: {reason(error)}") from None
