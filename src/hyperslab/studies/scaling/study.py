"""Defines scaling studies and runs them: a training on more and more ranks, measured, predicted.

In reading order: the rows, with a measured and a predicted step each, and the speed-up that
follows; `Predictor`, which predicts steps from the planner's traces, for ranks that need not be
there; a measured step: a training as every training runs, and its history; the whole study. Its
points are those of `points`.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from hyperslab import errors
from hyperslab.checkpoint import folder_of
from hyperslab.formats.files import lock_folder
from hyperslab.launch.restarts import StartTraining, launch_training
from hyperslab.launch.supervisor import cores_here, finish
from hyperslab.planner import search
from hyperslab.planner.cost import Breakdown
from hyperslab.planner.job import GridJob, job_of
from hyperslab.planner.machine import Machine
from hyperslab.planner.summary import unknown_time
from hyperslab.recipe.load import options_of_trust, save_recipe
from hyperslab.recipe.schema import Recipe
from hyperslab.studies.run_folder import NEEDED_OF_STEPS, check_recipe, read_table
from hyperslab.studies.scaling.points import RefusedPoint, ScalingKind, ScalingPoint, not_here
from hyperslab.train.run import awaiting_run
from hyperslab.util.atomic_files import partial_path
from hyperslab.util.documents import read_json

log = logging.getLogger("hyperslab")

TABLE = "study.json"
"""The file of a study's folder that has its kind and all of its numbers."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Holds the steps of one training, those of the first epoch left out.

    ``seconds`` is the median step, ``lower`` and ``upper`` are its quartiles [s], over ``steps``
    steps of ``samples`` samples each; ``waiting`` is the median wait for data [s]; ``memory`` the
    most that any rank has held [B]. ``crowded`` says why the times mean nothing, if they do not.
    """

    seconds: float
    lower: float
    upper: float
    steps: int
    samples: int
    waiting: float
    memory: float
    crowded: str = ""


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """Holds a predicted step: its ``parts`` [s], the ``memory`` and the ``limit`` of a rank [B].

    ``doubts`` say how far its times are to be trusted, and ``unknown`` why not at all.
    """

    parts: Breakdown
    memory: int
    limit: int
    doubts: tuple[str, ...] = ()
    unknown: str = ""

    @property
    def seconds(self) -> float:
        return self.parts.total

    @property
    def fits(self) -> bool:
        return self.memory <= self.limit


@dataclass(frozen=True, slots=True)
class StudyRow:
    """Holds a point with its measured and its predicted step, either of which may be missing.

    ``samples`` are those of a step: of more than one mini-batch where gradients are accumulated.
    ``failure`` says why a training of it failed, if one did.
    """

    point: ScalingPoint
    samples: int
    measured: MeasuredStep | None = None
    predicted: PredictedStep | None = None
    failure: str = ""

    @property
    def forecast(self) -> PredictedStep | None:
        """Returns the predicted step if its time is known."""
        return None if self.predicted is None or self.predicted.unknown else self.predicted

    @property
    def deviation(self) -> float | None:
        """Computes the prediction's deviation: predicted / measured - 1."""
        if self.measured is None or self.forecast is None:
            return None
        return self.forecast.seconds / self.measured.seconds - 1


@dataclass(frozen=True, slots=True)
class Speed:
    """Compares a point's speed with the smallest one of the same study that has a time.

    ``throughput`` [samples/s]; ``speedup`` is its ratio to that of ``base`` ranks; ``efficiency``
    is the speed-up over the ratio of the ranks: 1 where so many more ranks do so much more.
    """

    throughput: float
    speedup: float
    efficiency: float
    base: int


@dataclass(frozen=True, slots=True)
class Study:
    """Holds a scaling study, its rows by ranks; ``machine`` is that of the predictions.

    ``refused`` are the points that were asked for and cannot be.
    """

    kind: ScalingKind
    recipe: str
    rows: tuple[StudyRow, ...]
    machine: str = ""
    refused: tuple[RefusedPoint, ...] = ()

    def speeds(self, kind: Literal["measured", "forecast"]) -> list[Speed | None]:
        """Returns the speeds by row; None where there is no such time."""
        speeds: list[Speed | None] = []
        base: tuple[int, float] | None = None
        for row in self.rows:
            step: MeasuredStep | PredictedStep | None = getattr(row, kind)
            if step is None:
                speeds.append(None)
                continue
            throughput = row.samples / step.seconds
            base = base or (row.point.ranks, throughput)
            speedup = throughput / base[1]
            speeds.append(Speed(throughput, speedup, speedup * base[0] / row.point.ranks, base[0]))
        return speeds

    def rows_with_speeds(self) -> Iterator[tuple[StudyRow, Speed | None, Speed | None]]:
        return zip(self.rows, self.speeds("measured"), self.speeds("forecast"), strict=True)


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predicts for ``machine``; ``process`` [B] is what a rank takes there that holds nothing."""

    machine: Machine
    process: int = 0

    @property
    def bounds(self) -> search.PlanBounds:
        """Bounds plans by the memory that the machine's file says."""
        return search.machine_bounds(self.machine, self.process)

    def predict(self, job: GridJob) -> PredictedStep:
        """Predicts a step of the job on the grid of its recipe."""
        found = search.trace_one(job, job.recipe.grid, self.machine, self.bounds)
        unknown = unknown_time(found, self.machine)
        doubts = (*_prediction_doubts(found, self.machine), *([unknown] if unknown else ()))
        limit = self.machine.memory
        return PredictedStep(found.seconds, found.memory.total, limit, doubts, unknown)

    def best_points(self, recipe: Recipe, ranks: Iterable[int]) -> list[ScalingPoint]:
        """Makes points of the grid that the plan likes best for each number of ranks.

        Where none fits into memory, on that which needs least of it.
        """
        job = _described_job(recipe)
        points = []
        for count in ranks:
            plan = search.make_plan(job, self.machine, count, self.bounds)
            best = plan.best or plan.smallest
            assert best is not None
            points.append(ScalingPoint(best.grid, recipe.data.batch_size))
        return points


def _prediction_doubts(found: search.Candidate, machine: Machine) -> Iterator[str]:
    if machine.note:
        yield f"{machine.name}: {machine.note}"
    cost = found.cost
    if cost.guessed >= 0.005:
        yield f"{cost.guessed:.0%} of the operators' time was not measured for these shapes"
    if cost.left_out:
        share = f"about {cost.left_out_share:.1%} of the step"
        yield f"{', '.join(cost.left_out)}: not predicted, because they have no meta form; {share}"


def jobs_of(
    points: Sequence[ScalingPoint], base: Recipe
) -> tuple[dict[ScalingPoint, GridJob], list[RefusedPoint]]:
    """Derives what every point asks of its ranks, and the points that cannot be.

    Those are the ones whose grid is none for such volumes, or whose mini-batch is more than there
    are samples.
    """
    described = _described_job(base)
    jobs = {}
    refused = []
    for point in points:
        recipe = point.recipe(base, output=base.output, epochs=base.epochs)
        # Volumes that are made grow in number with the mini-batch, so each point has its own.
        made = recipe.data.synthetic is not None or described.assumed
        job = _described_job(recipe) if made else replace(described, recipe=recipe)
        if job.batch < point.batch_size:
            words = (
                f"{job.recipe.data.where} has {job.samples} samples to train on, fewer than a "
                f"mini-batch of {point.batch_size} for {point.ranks} ranks\n"
                "    use fewer ranks, or data.path=null data.synthetic.width=N"
            )
            refused.append(RefusedPoint(point.ranks, errors.DataError(words)))
        elif why := search.refusal(point.grid, job):
            refused.append(point.refused(errors.LayoutError(why)))
        else:
            jobs[point] = job
    return jobs, refused


def _described_job(recipe: Recipe) -> GridJob:
    try:
        return job_of(recipe)
    except errors.DataError as error:
        if recipe.data.is_here:
            raise
        raise not_here(recipe) from error


def crowded(ranks: int, device: str) -> str:
    """Says why the times of so many ranks mean nothing on this machine; "" if they do.

    More processes than cores, or than GPUs, take turns instead of running side by side.
    """
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    places = torch.cuda.device_count() if cuda else cores_here()
    what = "GPU" if cuda else "core"
    if ranks <= places:
        return ""
    return f"{ranks} ranks on {places} {what}{'s' * (places > 1)} take turns"


STOPPING_ERRORS = (
    errors.CheckpointError,
    errors.DataError,
    errors.DivergedError,
    errors.RecipeError,
)
"""Lists errors of a training that would stop the other points as well. The rest, memory that does
not suffice above all, is a property of one point."""


@dataclass(frozen=True, slots=True)
class StudyRequest:
    """Says what is to be studied: ``points`` of a ``recipe`` called ``name``.

    Runs, tables and figure go into ``output``. Each run takes ``epochs``. Without ``trains``
    nothing is run, and what was measured before stands beside the prediction. ``refused`` are
    points that cannot be. ``start`` starts a run, by default here.
    """

    kind: ScalingKind
    name: str
    recipe: Recipe
    points: tuple[ScalingPoint, ...]
    output: Path
    epochs: int
    trains: bool = True
    refused: tuple[RefusedPoint, ...] = ()
    start: StartTraining | None = None

    def earlier(self, point: ScalingPoint) -> MeasuredStep | None:
        """Reads what was measured of a point before, if it was; raises as `check_recipe`."""
        folder = self.output / point.name
        if not folder.exists():
            return None
        wanted = point.recipe(self.recipe, output=folder, epochs=self.epochs)
        check_recipe(folder, wanted, "was measured with")
        return self._measured(point)

    def measure(self, point: ScalingPoint) -> MeasuredStep:
        """Measures the steps of a training on the point's grid; one that was stopped starts again.

        Raises:
            RecipeError: the output cannot be written.
            DataError: no step of the training had a whole mini-batch.
            HyperslabError: what the training raised.
        """
        folder = self.output / point.name
        # A folder of the point's own name holds a finished training, however this one ends.
        partial = partial_path(folder)
        file = partial / "recipe.yaml"
        with errors.system_errors_as(errors.RecipeError, f"cannot write into {self.output}"):
            if partial.is_dir():
                finish(awaiting_run(partial))
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            recipe = point.recipe(self.recipe, output=partial, epochs=self.epochs)
            save_recipe(recipe, file)
            words = ["train", str(file), "--resume", *options_of_trust(recipe)]
            logs, seconds = partial / "logs", self.recipe.timeout
            if self.start is None:
                launch_training(point.ranks, words, logs, seconds=seconds)
            else:
                finish(self.start(point.ranks, words, logs, seconds=seconds))
            shutil.rmtree(folder_of(partial))  # the weights of so short a training are of no use
            save_recipe(recipe.model_copy(update={"output": folder}), file)
            partial.rename(folder)
        return self._measured(point)

    def _measured(self, point: ScalingPoint) -> MeasuredStep:
        folder = self.output / point.name
        steps = read_table(folder / "steps.csv", NEEDED_OF_STEPS)
        if not steps or steps["epoch"].max() + 1 < self.epochs:
            raise errors.DataError(f"{folder} holds no training of {self.epochs} epochs: remove it")
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
            crowded=crowded(point.ranks, self.recipe.device) if self.start is None else "",
        )


WriteStudy = Callable[[Study, Path], None]  # gets the folder, too


def run_study(request: StudyRequest, predictor: Predictor | None, write: WriteStudy) -> Study:
    """Measures and predicts every point, and has what there is written after each of them.

    A point that was measured before is not run again. Points that cannot be, and those whose
    training failed because of their grid, are named in the study and do not stop it.

    Raises:
        DataError, LayoutError, UnsupportedOp: there are no data, no point can be, or another study
            fills ``output``: it would remove the training that is under way there.
        RecipeError: a point's folder holds another run, ``output`` has a study of the other kind,
            or cannot be written.
        HyperslabError: what a training raised, of `STOPPING_ERRORS`, or if all failed.
    """
    _check_kind(request)
    jobs, refused = jobs_of(request.points, request.recipe)
    request = replace(request, refused=(*request.refused, *refused))
    if request.trains and any(job.assumed for job in jobs.values()):
        raise not_here(request.recipe, "; or --predict")
    study = _predicted_study(request, jobs, predictor)
    if not study.rows:
        raise study.refused[0].error
    with lock_folder(request.output, "study"):
        write(study, request.output)
        return _measured_study(request, study, write) if request.trains else study


def _check_kind(request: StudyRequest) -> None:
    """Refuse to write tables of strong over those of weak scaling, and the other way round."""
    file = request.output / TABLE
    found: object = None
    with suppress(OSError, ValueError):  # what cannot be read is no study
        found = read_json(file)
    kind = found.get("kind") if isinstance(found, dict) else None
    if kind in tuple(ScalingKind) and kind != request.kind:
        raise errors.RecipeError(f"{file} is of {kind} scaling: give another --output")


def _predicted_study(
    request: StudyRequest, jobs: dict[ScalingPoint, GridJob], predictor: Predictor | None
) -> Study:
    """Makes the rows as far as they are known before anything runs."""
    rows = []
    refused = list(request.refused)
    accumulated = request.recipe.optimizer.accumulate
    for point, job in jobs.items():
        found = request.earlier(point)
        try:
            predicted = None if predictor is None else predictor.predict(job)
        except (errors.LayoutError, errors.UnsupportedOp) as error:
            refused.append(point.refused(error))
            continue
        rows.append(StudyRow(point, point.batch_size * accumulated, found, predicted))
    machine = "" if predictor is None else predictor.machine.name
    refused.sort(key=lambda one: one.ranks)
    return Study(request.kind, request.name, tuple(rows), machine, tuple(refused))


def _measured_study(request: StudyRequest, study: Study, write: WriteStudy) -> Study:
    """Measures every point of the study."""
    rows = list(study.rows)
    for place, row in enumerate(study.rows):
        point = row.point
        words = f"point {place + 1} of {len(rows)}: {point.ranks} ranks, {point.cut}, mini-batch"
        log.info("%s %d", words, point.batch_size)
        if request.start is None and (crowd := crowded(point.ranks, request.recipe.device)):
            log.warning("%s: its times say nothing about scaling", crowd)
        try:
            if row.measured is not None:
                log.info("%s exists already: its times are used", request.output / point.name)
            found = row.measured or request.measure(point)
            rows[place] = replace(row, samples=found.samples, measured=found)
        except errors.Stopped:
            log.info(
                "run the same command to continue here: %s starts again from the beginning",
                point.name,
            )
            raise
        except STOPPING_ERRORS:
            raise
        except errors.HyperslabError as error:
            log.warning("%s", error)
            rows[place] = replace(row, failure=str(error).splitlines()[0])
            # A study of which nothing was measured ends as its last training did.
            if all(one.failure for one in rows):
                raise
        study = replace(study, rows=tuple(rows))
        write(study, request.output)
    return study
