"""Defines a scaling study: its grids and mini-batches, its times, and the speed-up that follows.

A point is one grid with its mini-batch; `Study` has the measured and the predicted step of each;
`Predictor` predicts steps from the planner's traces, for ranks that need not be there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal

from hyperslab.errors import DataError, HyperslabError, LayoutError
from hyperslab.planner.cost import Breakdown
from hyperslab.planner.grids import refusal
from hyperslab.planner.job import GridJob, job_of
from hyperslab.planner.machine import Machine
from hyperslab.planner.search import Candidate, MemoryLimit, PlanBounds, make_plan, trace_one
from hyperslab.recipe.schema import GridSection, Recipe


class ScalingKind(StrEnum):
    """Tells strong scaling, of one mini-batch, from weak, of one number of samples a replica.

    Oyama et al. 2020, sections V-B and V-C.
    """

    STRONG = "strong"
    WEAK = "weak"


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """Holds one grid and the samples of a mini-batch on it."""

    grid: GridSection
    batch_size: int

    @property
    def ranks(self) -> int:
        return self.grid.size

    @property
    def name(self) -> str:
        """Names the point's folder."""
        extents = "x".join(map(str, self.grid.model_dump().values()))
        return f"{self.ranks:04}-ranks-{extents}-batch-{self.batch_size}"

    @property
    def cut(self) -> str:
        """Writes the grid in words: ``data 2 x depth 4``."""
        parts = [f"{axis} {n}" for axis, n in self.grid.model_dump().items() if n > 1]
        return " x ".join(parts) or "uncut"

    def recipe(self, base: Recipe, *, output: Path, epochs: int) -> Recipe:
        """Makes the recipe of the training that measures this point.

        Synthetic data are at least as many samples as the recipe says, in whole mini-batches,
        and one sample for the validation, which is not measured.
        """
        data = base.data.model_copy(update={"batch_size": self.batch_size})
        if data.synthetic is not None:
            count = math.ceil(data.synthetic.samples / self.batch_size) * self.batch_size + 1
            changes = {
                "synthetic": data.synthetic.model_copy(update={"samples": count}),
                "fractions": ((count - 1) / count, 1 / count, 0.0),
            }
            data = data.model_copy(update=changes)
        kept = base.checkpoint.model_copy(update={"every": epochs, "every_steps": None})
        return base.model_copy(
            update={
                "data": data,
                "grid": self.grid,
                "epochs": epochs,
                "checkpoint": kept,
                "output": output,
            }
        )


@dataclass(frozen=True, slots=True)
class RefusedPoint:
    """Holds a number of ranks that a study cannot have, and the error that says why."""

    ranks: int
    error: HyperslabError

    @property
    def reason(self) -> str:
        """Gives the reason in one line."""
        return "; ".join(line.strip() for line in str(self.error).splitlines())


def points_or_refusals(
    ranks: Iterable[int], points: Callable[[list[int]], list[ScalingPoint]]
) -> tuple[list[ScalingPoint], list[RefusedPoint]]:
    """Collects ``points`` by numbers of ranks; one that cannot be does not stop the others."""
    found = []
    refused = []
    for count in ranks:
        try:
            found += points([count])
        except LayoutError as error:
            refused.append(RefusedPoint(count, error))
    return found, refused


def own_points(
    kind: ScalingKind, recipe: Recipe, grids: Sequence[GridSection]
) -> list[ScalingPoint]:
    """Makes points of the user's grids, with the mini-batch that such a study has on them.

    Raises:
        LayoutError: two have as many ranks, or the mini-batch is no multiple of a data axis.
    """
    sizes = [grid.size for grid in grids]
    if twice := {size for size in sizes if sizes.count(size) > 1}:
        raise LayoutError(
            f"two grids have {min(twice)} ranks\n    a study has one for each number of ranks: "
            "give the other one an --output of its own"
        )
    if kind is ScalingKind.STRONG:
        return [_checked(grid, recipe.data.batch_size) for grid in grids]
    if not grids:
        return []
    if recipe.grid.auto:
        raise LayoutError(
            "weak scaling takes more and more replicas, and grid=auto does not say what one is\n"
            "    give the ranks of a replica, such as grid.depth=8"
        )
    replica = _checked(recipe.grid, recipe.data.batch_size)
    each = replica.batch_size // recipe.grid.data
    return [ScalingPoint(grid, each * grid.data) for grid in grids]


def strong_points(recipe: Recipe, ranks: Iterable[int], axis: str) -> list[ScalingPoint]:
    """Makes points of the recipe's mini-batch on its grid, of which ``axis`` grows.

    Raises:
        LayoutError: a number of ranks is no multiple of the other axes, or the mini-batch no
            multiple of the data axis.
    """
    grids = [_grown(recipe.grid, axis, count) for count in ranks]
    return own_points(ScalingKind.STRONG, recipe, grids)


def weak_points(recipe: Recipe, ranks: Iterable[int]) -> list[ScalingPoint]:
    """Makes points of more and more replicas of the recipe's grid, each with as many samples.

    Raises:
        LayoutError: as `strong_points`.
    """
    grids = [_grown(recipe.grid, "data", count) for count in ranks]
    return own_points(ScalingKind.WEAK, recipe, grids)


def _grown(grid: GridSection, axis: str, ranks: int) -> GridSection:
    others = {name: extent for name, extent in grid.model_dump().items() if name != axis}
    size = math.prod(others.values())
    if ranks % size:
        cut = " ".join(f"grid.{name}={extent}" for name, extent in others.items() if extent > 1)
        raise LayoutError(
            f"{ranks} ranks cannot be made by more places along {axis}: with {cut} it takes a "
            f"multiple of {size}\n    choose other ranks, or change the grid"
        )
    return GridSection(**{**others, axis: ranks // size})


def _checked(grid: GridSection, batch_size: int) -> ScalingPoint:
    if batch_size % grid.data:
        raise LayoutError(
            f"a mini-batch of {batch_size} cannot be dealt out evenly to grid.data={grid.data} "
            f"replicas ({grid.size} ranks)\n    choose other ranks, or a data.batch_size that is a "
            f"multiple of {grid.data}"
        )
    return ScalingPoint(grid, batch_size)


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

    ``doubts`` say how far its times are to be trusted.
    """

    parts: Breakdown
    memory: int
    limit: int
    doubts: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Returns the time of the whole step [s]."""
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
    def deviation(self) -> float | None:
        """Computes the prediction's deviation: predicted / measured - 1."""
        if self.measured is None or self.predicted is None:
            return None
        return self.predicted.seconds / self.measured.seconds - 1


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

    def speeds(self, kind: Literal["measured", "predicted"]) -> list[Speed | None]:
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
        """Lists each row with its measured and its predicted speed."""
        return zip(self.rows, self.speeds("measured"), self.speeds("predicted"), strict=True)


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predicts for ``machine``; ``process`` [B] is what a rank takes there that holds nothing."""

    machine: Machine
    process: int = 0

    @property
    def bounds(self) -> PlanBounds:
        """Bounds plans by the memory that the machine's file says."""
        limit = MemoryLimit(self.machine.memory, f"that of {self.machine.name}")
        return PlanBounds(limit, self.process)

    def predict(self, job: GridJob) -> PredictedStep:
        """Predicts a step of the job on the grid of its recipe.

        Raises:
            UnsupportedOp: the network has an operator that cannot be traced or cut.
        """
        found = trace_one(job, job.recipe.grid, self.machine, self.bounds)
        doubts = tuple(_prediction_doubts(found, self.machine))
        return PredictedStep(found.seconds, found.memory.total, self.machine.memory, doubts)

    def best_points(self, recipe: Recipe, ranks: Iterable[int]) -> list[ScalingPoint]:
        """Makes points of the grid that the plan likes best for each number of ranks.

        Where none fits into memory, on that which needs least of it.

        Raises:
            LayoutError: no grid of so many ranks can be.
        """
        job = _described_job(recipe)
        points = []
        for count in ranks:
            plan = make_plan(job, self.machine, count, self.bounds)
            best = plan.best or plan.smallest
            assert best is not None
            points.append(ScalingPoint(best.grid, recipe.data.batch_size))
        return points


def _prediction_doubts(found: Candidate, machine: Machine) -> Iterator[str]:
    if machine.note:
        yield f"{machine.name} says of itself: {machine.note}"
    cost = found.cost
    if cost.guessed >= 0.005:
        yield f"{cost.guessed:.0%} of the operators' time was not measured for these shapes"
    if cost.left_out:
        share = f"about {cost.left_out_share:.1%} of the step"
        yield f"{', '.join(cost.left_out)}: not predicted, for want of a meta form; {share}"


def jobs_of(
    points: Sequence[ScalingPoint], base: Recipe
) -> tuple[dict[ScalingPoint, GridJob], list[RefusedPoint]]:
    """Derives what every point asks of its ranks, and the points that cannot be.

    Those are the ones whose grid is none for such volumes, or whose mini-batch is more than there
    are samples.

    Raises:
        DataError: there are no data.
    """
    described = _described_job(base)
    jobs = {}
    refused = []
    for point in points:
        recipe = point.recipe(base, output=base.output, epochs=base.epochs)
        made = recipe.data.synthetic is not None or described.assumed
        job = _described_job(recipe) if made else replace(described, recipe=recipe)
        if error := _obstacle(point, job):
            refused.append(RefusedPoint(point.ranks, error))
        else:
            jobs[point] = job
    return jobs, refused


def _obstacle(point: ScalingPoint, job: GridJob) -> HyperslabError | None:
    if job.batch < point.batch_size:
        return DataError(
            f"{job.recipe.data.where} has {job.samples} samples to train on, fewer than a "
            f"mini-batch of {point.batch_size} for {point.ranks} ranks\n"
            "    use fewer ranks, or data.path=null data.synthetic.width=N"
        )
    reason = refusal(point.grid, job)
    return LayoutError(f"{point.ranks} ranks ({point.cut}): {reason}") if reason else None


def _described_job(recipe: Recipe) -> GridJob:
    try:
        return job_of(recipe)
    except DataError as error:
        if recipe.data.is_here:
            raise
        raise not_here(recipe) from error


def not_here(recipe: Recipe, more: str = "") -> DataError:
    """Makes the error that says that there are no data, and what takes their place."""
    return DataError(
        f"{recipe.data.where} is not here\n    data.path=null data.synthetic.width=N takes its "
        f"place: volumes made in memory{more}"
    )
