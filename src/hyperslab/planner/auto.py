"""Chooses the grid of a recipe that says `grid: auto`, and predicts the profile of a run.

`GridChooser` takes the best grid of a plan and logs what it chose; `write_prediction` writes
the plan's times by layer beside those that a run's profile measures.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from dataclasses import dataclass

from hyperslab.errors import LayoutError
from hyperslab.planner.cost import LayerCost
from hyperslab.planner.grids import words_of
from hyperslab.planner.job import GridJob, job_of
from hyperslab.planner.machine import Machine, load_machine
from hyperslab.planner.search import (
    Candidate,
    GridPlan,
    MemoryLimit,
    PlanBounds,
    host_limit,
    least_ranks,
    make_plan,
    process_bytes,
    trace_one,
)
from hyperslab.planner.summary import (
    NONE_FOUND,
    bytes_text,
    nothing_fits_text,
    ranks_text,
    time_text,
)
from hyperslab.recipe.schema import Recipe, planned_device
from hyperslab.train.profile import LayerTime, Profile, Stage, predicted_path, write_profile

USUAL_MACHINES = {"cpu": "laptop-2core", "cuda": "lassen-v100"}
"""Names the shipped machine that a plan takes by default, by the kind of device."""

log = logging.getLogger("hyperslab")


@dataclass(frozen=True, slots=True)
class GridChooser:
    """Chooses the grid of a recipe for the ranks that there are.

    ``machine`` is a name or a path as `load_machine` takes it; None: the usual one.
    """

    machine: str | None = None

    def __call__(self, recipe: Recipe, ranks: int) -> Recipe:
        """Returns the recipe with the best grid that fits, and with what saves memory if need be.

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
        return choose_grid(recipe, ranks, machine, PlanBounds(limit, process))


def choose_grid(recipe: Recipe, ranks: int, machine: Machine, bounds: PlanBounds) -> Recipe:
    """Chooses the grid for ``ranks`` ranks of ``machine``, as `GridChooser` does."""
    job = job_of(recipe)
    if not recipe.grid.auto:
        return _choose_memory(job, machine, bounds)
    plan = make_plan(job, machine, ranks, bounds)
    if plan.best is None and recipe.memory == "none":
        again = make_plan(job.with_recipe(memory="auto"), machine, ranks, bounds)
        if again.best is not None:
            plan = again
    if plan.best is None:
        raise LayoutError(_nothing_fits_words(plan, bounds))
    best = plan.best
    words = (
        f"grid=auto: {words_of(best.grid)} is the best of {ranks_text(ranks)} by the plan for "
        f"{machine.name}: {time_text(best.seconds.total)} a step, "
        f"{bytes_text(best.memory.total)} of {bytes_text(bounds.limit.nbytes)} a rank"
    )
    if best.saving != recipe.memory:
        words += f"; memory={best.saving}"
        words += "" if recipe.memory == "auto" else ", or no grid would fit"
    log.info("%s", words)
    return recipe.model_copy(update={"grid": best.grid, "memory": best.saving})


def _choose_memory(job: GridJob, machine: Machine, bounds: PlanBounds) -> Recipe:
    """Chooses how the recipe's own grid saves memory.

    Raises:
        LayoutError: nothing fits.
    """
    recipe = job.recipe
    best = trace_one(job, recipe.grid, machine, bounds)
    limit = bounds.limit
    if not best.fits(limit.nbytes):
        raise LayoutError(
            f"memory=auto: {words_of(recipe.grid)} does not fit into {bytes_text(limit.nbytes)} a "
            f"rank ({limit.reason}): {bytes_text(best.memory.total)} with memory={best.saving}\n"
            "    take more ranks (grid=auto says how many would do), or precision=bf16"
        )
    usual = trace_one(job.with_recipe(memory="none"), recipe.grid, machine, bounds)
    log.info(
        "memory=auto: memory=%s by the plan for %s: %s a step and %s of %s a rank, where none "
        "takes %s and %s",
        best.saving,
        machine.name,
        time_text(best.seconds.total),
        bytes_text(best.memory.total),
        bytes_text(limit.nbytes),
        time_text(usual.seconds.total),
        bytes_text(usual.memory.total),
    )
    return recipe.model_copy(update={"memory": best.saving})


def machine_for(name: str | None, device: str) -> Machine:
    """Loads the machine that is named, or else the usual one for such a device."""
    return load_machine(name or USUAL_MACHINES[device])


def _nothing_fits_words(plan: GridPlan, bounds: PlanBounds) -> str:
    least = least_ranks(plan.job, plan.machine, bounds, plan.first)
    remedy = f"{NONE_FOUND}: take smaller mini-batches, more memory or more ranks"
    if least is not None:
        remedy = (
            f"{ranks_text(least.grid.size)} would do: {words_of(least.grid)}, "
            f"{bytes_text(least.memory.total)} each"
        )
    return f"{nothing_fits_text(plan, f' ({plan.limit.reason})')}\n    {remedy}"


def write_prediction(recipe: Recipe, machine: str | None = None) -> None:
    """Writes ``RUN/profile/predicted.json`` for a run's recipe, as its profile is written.

    Raises:
        MachineError: there is no such machine.
        DataError: the data cannot be opened.
        UnsupportedOp: the network cannot be traced.
    """
    chosen = machine_for(machine, planned_device(recipe))
    found = trace_one(
        job_of(recipe), recipe.grid, chosen, PlanBounds(MemoryLimit(chosen.memory, ""))
    )
    write_profile(predicted_path(recipe.output), predicted_profile(found, recipe))


def predicted_profile(found: Candidate, recipe: Recipe) -> Profile:
    """Arranges a plan's layers in the stages of a profile, which has BD and BF together."""
    by_stage: dict[tuple[str, Stage], list[LayerCost]] = defaultdict(list)
    for layer in found.cost.layers:
        stage: Stage = "optimizer"
        if layer.phase != "optimizer":
            stage = "forward" if layer.phase == "forward" else "backward"
        by_stage[layer.layer, stage].append(layer)
    return Profile(
        kind="predicted",
        rank=found.cost.rank,
        ranks=found.grid.size,
        grid=found.grid.model_dump(),
        precision=recipe.precision,
        usual_seconds=found.seconds.total,
        layers=[
            LayerTime(
                layer=layer,
                stage=stage,
                compute=sum(part.compute for part in parts),
                communication=sum(part.waiting for part in parts),
            )
            for (layer, stage), parts in by_stage.items()
        ],
    )
