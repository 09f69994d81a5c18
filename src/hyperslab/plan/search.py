"""The plan: every grid of a number of ranks, the promising ones traced, ranked by time."""

from __future__ import annotations

from dataclasses import dataclass

from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.machine import Machine
from hyperslab.plan.candidate import Candidate, trace_grid, weigh
from hyperslab.plan.grids import grids, refusal, words_of
from hyperslab.plan.job import GridJob
from hyperslab.plan.limits import Bounds, Limit
from hyperslab.plan.rough import Rough, rough
from hyperslab.recipe.schema import GridSection

TRACED = 8
"""Grids that are traced unless all are asked for: of the fastest by the rough estimate."""


@dataclass(frozen=True, slots=True)
class UntracedGrid:
    """A legal grid that is likely to be slower, with its rough estimates: [s] and [B]."""

    grid: GridSection
    seconds: float
    memory: int


@dataclass(frozen=True, slots=True)
class RefusedGrid:
    """A grid that cannot be, and why."""

    grid: GridSection
    reason: str


@dataclass(frozen=True)
class GridPlan:
    """All grids of ``ranks`` ranks: ``traced`` ones by time, those that fit first."""

    job: GridJob
    machine: Machine
    ranks: int
    limit: Limit
    traced: tuple[Candidate, ...]
    untraced: tuple[UntracedGrid, ...]
    refused: tuple[RefusedGrid, ...]
    first: Rough

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits; None where none does."""
        return next((one for one in self.traced if one.fits(self.limit.nbytes)), None)

    @property
    def alone(self) -> float:
        """The step of one rank that has all the samples and the memory for them [s]."""
        return self.first.alone

    @property
    def smallest(self) -> Candidate | None:
        """The one that needs the least memory."""
        return min(self.traced, key=lambda one: one.memory.total, default=None)


def make_plan(job: GridJob, machine: Machine, ranks: int, bounds: Bounds) -> GridPlan:
    """Rank the grids of so many ranks.

    1. Every grid is tried for its partition. 2. One sample is traced on one rank, from which the
    rough time and memory of every grid follow. 3. The `TRACED` grids that seem fastest are traced
    as they are, of those that seem to fit first; with ``everything`` all. Where none of them fits,
    those are traced that seem to need least, until one fits or as many have been tried. The result
    depends on nothing but the arguments: no clock is read. No grid stands for another one, for
    turning a grid turns blocks, and kernels are not as fast along every dim.

    Raises:
        LayoutError: no grid of so many ranks can be.
        UnsupportedOp: the network has an operator that cannot be traced or cut.
    """
    refused = []
    legal = []
    for grid in grids(ranks):
        reason = refusal(grid, job)
        if reason:
            refused.append(RefusedGrid(grid, reason))
        else:
            legal.append(grid)
    if not legal:
        raise LayoutError(
            f"no grid of {ranks} ranks is possible; one of the reasons:\n    {refused[-1].reason}"
        )
    first = rough(job, machine, ranks)
    pending = sorted(legal, key=lambda grid: _promise(grid, first, bounds))
    traced: list[Candidate] = []
    while pending and not _enough(traced, bounds):
        if len(traced) == TRACED and not bounds.everything:  # none of them fits
            pending.sort(key=lambda grid: (first.memory(grid), words_of(grid)))
        grid = pending.pop(0)
        try:
            traced.append(trace_one(job, grid, machine, bounds))
        except (LayoutError, UnsupportedOp) as error:
            refused.append(RefusedGrid(grid, str(error)))
    if not traced:
        raise UnsupportedOp(refused[-1].reason)
    return GridPlan(
        job=job,
        machine=machine,
        ranks=ranks,
        limit=bounds.limit,
        traced=tuple(sorted(traced, key=lambda one: _rank(one, bounds.limit))),
        untraced=tuple(
            UntracedGrid(grid, first.seconds(grid), first.memory(grid)) for grid in pending
        ),
        refused=tuple(refused),
        first=first,
    )


def trace_one(job: GridJob, grid: GridSection, machine: Machine, bounds: Bounds) -> Candidate:
    """One grid alone."""
    return weigh(job, grid, machine, trace_grid(job, grid, machine), bounds)


def _enough(traced: list[Candidate], bounds: Bounds) -> bool:
    """Whether no more grids have to be traced."""
    if bounds.everything or len(traced) < TRACED:
        return False
    return len(traced) >= 2 * TRACED or any(one.fits(bounds.limit.nbytes) for one in traced)


def _promise(grid: GridSection, first: Rough, bounds: Bounds) -> tuple[bool, float, str]:
    """Lower is better; grids that need clearly too much memory come last."""
    too_large = bounds.process + first.memory(grid) > 1.2 * bounds.limit.nbytes
    return too_large, first.seconds(grid), words_of(grid)


def _rank(one: Candidate, limit: Limit) -> tuple[bool, float, str]:
    return not one.fits(limit.nbytes), one.seconds.total, words_of(one.grid)
