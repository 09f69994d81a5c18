"""A whole study: one point after the other, its tables and its figure."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from hyperslab.errors import DataError, RecipeError, reason
from hyperslab.plan.job import GridJob
from hyperslab.recipe.schema import Recipe
from hyperslab.scaling.figure import draw_study
from hyperslab.scaling.measure import crowded, measure, measured
from hyperslab.scaling.points import ScalingKind, ScalingPoint
from hyperslab.scaling.predict import Predictor, jobs_of
from hyperslab.scaling.study import Study, StudyRow
from hyperslab.scaling.tables import write_tables

log = logging.getLogger("hyperslab")


@dataclass(frozen=True, slots=True)
class StudyRequest:
    """What is to be studied: ``points`` of a ``recipe`` called ``name``.

    Runs, tables and figure go into ``output``. Each run takes ``epochs``. Without ``trains``
    nothing is run, and what was measured before stands beside the prediction.
    """

    kind: ScalingKind
    name: str
    recipe: Recipe
    points: tuple[ScalingPoint, ...]
    output: Path
    epochs: int
    trains: bool = True


def run_study(request: StudyRequest, predictor: Predictor | None) -> Study:
    """Measure and predict every point; what there is is written after each of them.

    A point that was measured before is not run again.

    Raises:
        DataError, LayoutError: a point cannot be, see `jobs_of`.
        RecipeError: a point's folder holds another run, or ``output`` cannot be written.
        HyperslabError: what a training raised.
    """
    jobs = jobs_of(request.points, request.recipe)
    if request.trains and jobs[0].assumed:
        raise DataError(
            f"{request.recipe.data.where} is not here\n    data.path=null data.synthetic.width=N "
            "takes its place: volumes made in memory; or --predict"
        )
    pairs = zip(request.points, jobs, strict=True)
    rows = [_row(request, point, job, predictor) for point, job in pairs]
    study = _written(request, rows, predictor)
    if not request.trains:
        return study
    for place, point in enumerate(request.points):
        words = f"point {place + 1} of {len(rows)}: {point.ranks} ranks, {point.cut}, mini-batch"
        log.info("%s %d", words, point.batch_size)
        if crowd := crowded(point.ranks, request.recipe.device):
            log.warning("%s: its times say nothing about scaling", crowd)
        found = measure(point, request.recipe, request.output, epochs=request.epochs)
        rows[place] = StudyRow(point, found.samples, found, rows[place].predicted)
        study = _written(request, rows, predictor)
    return study


def _row(
    request: StudyRequest, point: ScalingPoint, job: GridJob, predictor: Predictor | None
) -> StudyRow:
    recipe = request.recipe
    found = measured(point, recipe, request.output, epochs=request.epochs)
    predicted = None if predictor is None else predictor.predict(job)
    samples = point.batch_size * recipe.optimizer.accumulate
    return StudyRow(point, samples, found, predicted)


def _written(request: StudyRequest, rows: list[StudyRow], predictor: Predictor | None) -> Study:
    machine = "" if predictor is None else predictor.machine.name
    study = Study(request.kind, request.name, tuple(rows), machine)
    if not any(row.measured or row.predicted for row in rows):
        return study
    try:
        request.output.mkdir(parents=True, exist_ok=True)
        write_tables(study, request.output)
        draw_study(study, request.output / "study.png")
    except OSError as error:
        raise RecipeError(f"cannot write into output {request.output}: {reason(error)}") from None
    return study
