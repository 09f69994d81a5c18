"""The operators of recipes on every grid of so many ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hyperslab.errors import LayoutError
from hyperslab.plan.grids import grids, refusal
from hyperslab.plan.job import GridJob, job_of
from hyperslab.recipe.load import load_recipe
from hyperslab.trace import LocalOperator, positions, trace_step
from hyperslab.trace.step import Device


def operators_of_recipes(
    recipes: Sequence[Path], overrides: Sequence[str], ranks: int, device: Device
) -> list[LocalOperator]:
    """Of a step on each grid of so many ranks, of one rank for each kind of position.

    Grids on which a recipe cannot run are left out.

    Raises:
        RecipeError: a recipe cannot be read or holds a bad value.
        DataError: the data of a recipe are not there, and it does not say what they would be.
        LayoutError: a recipe cannot run on any grid of so many ranks; says why for one.
    """
    found: list[LocalOperator] = []
    for path in recipes:
        job = job_of(load_recipe(path, overrides))
        operators = list(_operators(job, ranks, device))
        if not operators:
            reasons = [refusal(grid, job) for grid in grids(ranks)]
            raise LayoutError(f"{path} runs on no grid of {ranks} ranks\n    {reasons[-1]}")
        found += operators
    return found


def _operators(job: GridJob, ranks: int, device: Device) -> Iterator[LocalOperator]:
    workload = job.workload()
    for grid in grids(ranks):
        if refusal(grid, job):
            continue
        extents = grid.model_dump()
        try:
            for rank in positions(extents).values():
                yield from trace_step(workload, extents, rank, device).operators
        except LayoutError:  # some layer inside cannot be cut so
            continue
