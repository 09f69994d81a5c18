"""What a study's points would take, from the plan's traces: for ranks that need not be there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hyperslab.errors import DataError, HyperslabError, LayoutError
from hyperslab.machine import Machine
from hyperslab.plan.candidate import Candidate
from hyperslab.plan.grids import refusal
from hyperslab.plan.job import GridJob, job_of
from hyperslab.plan.limits import Bounds, Limit
from hyperslab.plan.search import make_plan, trace_one
from hyperslab.recipe.schema import Recipe
from hyperslab.scaling.points import RefusedPoint, ScalingPoint
from hyperslab.scaling.study import PredictedStep


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predicts for ``machine``; ``process`` [B] is what a rank takes there that holds nothing."""

    machine: Machine
    process: int = 0

    @property
    def bounds(self) -> Bounds:
        """A rank may have all the memory that the machine's file says."""
        limit = Limit(self.machine.memory, f"that of {self.machine.name}")
        return Bounds(limit, self.process)

    def predict(self, job: GridJob) -> PredictedStep:
        """A step of the job on the grid of its recipe.

        Raises:
            UnsupportedOp: the network has an operator that cannot be traced or cut.
        """
        found = trace_one(job, job.recipe.grid, self.machine, self.bounds)
        doubts = tuple(_doubts(found, self.machine))
        return PredictedStep(found.seconds, found.memory.total, self.machine.memory, doubts)

    def best_points(self, recipe: Recipe, ranks: Iterable[int]) -> list[ScalingPoint]:
        """The recipe's mini-batch on the grid that the plan likes best for each number of ranks.

        Where none fits into memory, on that which needs least of it.

        Raises:
            LayoutError: no grid of so many ranks can be.
        """
        job = _described(recipe)
        points = []
        for count in ranks:
            plan = make_plan(job, self.machine, count, self.bounds)
            best = plan.best or plan.smallest
            assert best is not None
            points.append(ScalingPoint(best.grid, recipe.data.batch_size))
        return points


def _doubts(found: Candidate, machine: Machine) -> Iterator[str]:
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
    """What every point asks of its ranks, and the points that cannot be.

    Those are the ones whose grid is none for such volumes, or whose mini-batch is more than there
    are samples.

    Raises:
        DataError: there are no data.
    """
    described = _described(base)
    jobs = {}
    refused = []
    for point in points:
        recipe = point.recipe(base, output=base.output, epochs=base.epochs)
        made = recipe.data.synthetic is not None or described.assumed
        job = _described(recipe) if made else replace(described, recipe=recipe)
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


def _described(recipe: Recipe) -> GridJob:
    try:
        return job_of(recipe)
    except DataError as error:
        if recipe.data.is_here:
            raise
        raise DataError(
            f"{recipe.data.where} is not here\n"
            "    data.path=null data.synthetic.width=N takes its place: volumes made in memory"
        ) from error
