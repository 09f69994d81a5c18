"""What else would help: fewer ranks that fit, recomputation, half precision."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hyperslab.machine import Machine
from hyperslab.plan.candidate import Candidate
from hyperslab.plan.grids import grids, refusal
from hyperslab.plan.job import GridJob
from hyperslab.plan.limits import Bounds
from hyperslab.plan.rough import Rough
from hyperslab.plan.search import GridPlan, trace_one
from hyperslab.recipe.schema import GridSection

MOST_RANKS = 4096
"""Ranks up to which the least number that fits is looked for."""

_TRIES = 12
"""Grids that are traced in that search."""

UNSURE = 1.03
"""A grid is traced in that search if its rough memory is at most this many times the limit."""


@dataclass(frozen=True, slots=True)
class Change:
    """What one change of the recipe would do to a grid."""

    override: str
    before: Candidate
    after: Candidate


def changes(plan: GridPlan, bounds: Bounds) -> list[Change]:
    """Recomputation and half precision, on the best grid, or else on that of the least memory."""
    before = plan.best or plan.smallest
    if before is None:
        return []
    recipe = plan.job.recipe
    wanted = []
    if recipe.memory == "keep":
        wanted.append(("memory=recompute", plan.job.with_recipe(memory="recompute")))
    if recipe.precision == "float32":
        wanted.append(("precision=bf16", plan.job.with_recipe(precision="bf16")))
    return [
        Change(override, before, trace_one(job, before.grid, plan.machine, bounds))
        for override, job in wanted
    ]


def least_ranks(
    job: GridJob, machine: Machine, bounds: Bounds, first: Rough, known: Candidate | None = None
) -> Candidate | None:
    """The grid of the fewest ranks that fits; None if none is found up to `MOST_RANKS` ranks.

    In the order of their numbers of ranks, those grids are traced that take least of so many, and
    of which ``first``, the rough estimate, says that they may fit; it is ``known``, a grid that
    fits, if there are none of fewer ranks.
    """
    room = UNSURE * (bounds.limit.nbytes - bounds.process)
    if room <= first.held:
        return known
    ranks = math.floor((first.memory(GridSection()) - first.held) / (room - first.held))
    tried = 0
    most = MOST_RANKS if known is None else known.grid.size - 1
    for count in range(max(1, ranks), most + 1):
        possible = [grid for grid in grids(count) if not refusal(grid, job)]
        grid = min(possible, key=first.memory, default=None)
        if grid is None or first.memory(grid) > room:
            continue
        found = trace_one(job, grid, machine, bounds)
        if found.fits(bounds.limit.nbytes):
            return found
        tried += 1
        if tried == _TRIES:
            break
    return known
