"""`grid: auto`: the plan chooses, and says what it chose."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from hyperslab.errors import LayoutError
from hyperslab.machine import Machine, load_machine, shipped_machines
from hyperslab.plan.advice import least_ranks
from hyperslab.plan.grids import words_of
from hyperslab.plan.job import job_of
from hyperslab.plan.limits import Bounds, host_limit, process_bytes
from hyperslab.plan.search import GridPlan, make_plan
from hyperslab.plan.show import bytes_text, ranks_text, time_text
from hyperslab.recipe.schema import Recipe

USUAL = {"cpu": "laptop-2core", "cuda": "lassen-v100"}
"""The shipped machine that is taken where none is named, by the device."""

log = logging.getLogger("hyperslab")


@dataclass(frozen=True, slots=True)
class GridChooser:
    """Chooses the grid of a recipe for the ranks that there are.

    ``machine`` is a name or a path as `load_machine` takes it; None: the usual one.
    """

    machine: str | None = None

    def __call__(self, recipe: Recipe, ranks: int) -> Recipe:
        """The recipe with the best grid that fits, and perhaps with ``memory: recompute``.

        One process calls it, on the machine where the ranks are or will be; it logs what it chose.

        Raises:
            LayoutError: nothing fits; says the least that would.
            DataError: the data cannot be opened.
            MachineError: there is no such machine.
        """
        machine = machine_for(self.machine, planned_device(recipe))
        here = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
        limit = host_limit(here, machine.device)
        process = process_bytes() if machine.device == "cpu" else 0
        return choose_grid(recipe, ranks, machine, Bounds(limit, process))


def choose_grid(recipe: Recipe, ranks: int, machine: Machine, bounds: Bounds) -> Recipe:
    """See `GridChooser`."""
    job = job_of(recipe)
    plan = make_plan(job, machine, ranks, bounds)
    if plan.best is None and recipe.memory == "keep":
        again = make_plan(job.with_recipe(memory="recompute"), machine, ranks, bounds)
        if again.best is not None:
            plan = again
    if plan.best is None:
        raise LayoutError(_nothing(plan, bounds))
    log.info("%s", _words(plan, recipe))
    return recipe.model_copy(update={"grid": plan.best.grid, "memory": plan.job.recipe.memory})


def machine_for(name: str | None, device: str) -> Machine:
    """The one that is named, else the usual one for such a device."""
    if name is None:
        usual = USUAL[device]
        name = usual if usual in shipped_machines() else shipped_machines()[0]
    return load_machine(name)


def planned_device(recipe: Recipe) -> str:
    """On which kind of device the recipe computes here."""
    cuda = recipe.device == "cuda" or (recipe.device == "auto" and torch.cuda.is_available())
    return "cuda" if cuda else "cpu"


def _words(plan: GridPlan, recipe: Recipe) -> str:
    best = plan.best
    assert best is not None
    words = (
        f"grid=auto: {words_of(best.grid)} is the best of {ranks_text(plan.ranks)} by the plan for "
        f"{plan.machine.name}: {time_text(best.seconds.total)} a step, "
        f"{bytes_text(best.memory.total)} of {bytes_text(plan.limit.nbytes)} a rank"
    )
    if plan.job.recipe.memory != recipe.memory:
        words += "; activations are recomputed (memory=recompute), or no grid would fit"
    return words


def _nothing(plan: GridPlan, bounds: Bounds) -> str:
    smallest = plan.smallest
    assert smallest is not None
    least = least_ranks(plan.job, plan.machine, bounds, plan.first)
    remedy = (
        f"{ranks_text(least.grid.size)} would do: {words_of(least.grid)}, "
        f"{bytes_text(least.memory.total)} each"
        if least is not None
        else "no number of ranks was found that does: take smaller mini-batches or more memory"
    )
    return (
        f"no grid of {ranks_text(plan.ranks)} fits into {bytes_text(plan.limit.nbytes)} a rank "
        f"({plan.limit.reason}); {words_of(smallest.grid)} needs least, "
        f"{bytes_text(smallest.memory.total)}\n    {remedy}"
    )


def settled(recipe: Recipe) -> list[str]:
    """The overrides that say what was chosen, for the ranks that are started."""
    axes = ", ".join(f"{axis}: {extent}" for axis, extent in recipe.grid.model_dump().items())
    return [f"grid={{{axes}}}", f"memory={recipe.memory}"]
