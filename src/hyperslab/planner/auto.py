"""Chooses the grid of a recipe that says `grid: auto`, and predicts the profile of a run.

`choose_grid_here` takes the best grid of a plan and logs what it chose; `write_prediction` writes
the plan's times by layer beside those that a run's profile measures.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from dataclasses import replace

from hyperslab.errors import LayoutError, MachineError
from hyperslab.planner import search, summary
from hyperslab.planner.cost import LayerCost
from hyperslab.planner.job import GridJob, job_of
from hyperslab.planner.machine import Machine, load_machine
from hyperslab.planner.search import Candidate, PlanBounds, trace_one, words_of
from hyperslab.planner.summary import bytes_text, nothing_fits_text, ranks_text
from hyperslab.recipe.schema import Recipe, planned_device
from hyperslab.train.profile import LayerTime, Profile, Stage, predicted_path, write_profile

USUAL_MACHINES = {"cpu": "laptop-2core", "cuda": "lassen-v100"}
"""Names the shipped machine that a plan takes by default, by the kind of device."""

log = logging.getLogger("hyperslab")


def choose_grid_here(recipe: Recipe, ranks: int, machine: str | None = None) -> Recipe:
    """Returns the recipe with the best grid that fits, and with what saves memory if need be.

    ``machine`` is a name or a path as `load_machine` takes it; None: the usual one. One process
    calls it, on the machine where the ranks are or will be; it logs what it chose.

    Raises:
        LayoutError: nothing fits; says the least that would.
        DataError: the data cannot be opened.
        MachineError: there is no such machine.
    """
    chosen = machine_for(machine, recipe)
    here = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    return choose_grid(recipe, ranks, chosen, search.host_bounds(here, chosen.device))


def choose_grid(recipe: Recipe, ranks: int, machine: Machine, bounds: PlanBounds) -> Recipe:
    """Chooses the grid for ``ranks`` ranks of ``machine``, as `choose_grid_here` does."""
    job = job_of(recipe)
    if not recipe.grid.auto:
        return _choose_memory(job, machine, bounds)
    plan = search.make_plan(job, machine, ranks, bounds)
    if plan.best is None and recipe.memory == "none":
        again = search.make_plan(job.with_recipe(memory="auto"), machine, ranks, bounds)
        if again.best is not None:
            plan = again
    if plan.best is None:
        least = search.least_ranks(plan.first, plan.bounds).found
        remedy = f"{summary.NONE_FOUND}: take smaller mini-batches, more memory or more ranks"
        if least is not None:
            remedy = (
                f"{ranks_text(least.grid.size)} would do: {words_of(least.grid)}, "
                f"{bytes_text(least.memory.total)} each"
            )
        raise LayoutError(f"{nothing_fits_text(plan, f' ({plan.bounds.reason})')}\n    {remedy}")
    best = plan.best
    words = (
        f"grid=auto: {words_of(best.grid)} is the best of {ranks_text(ranks)} by the plan for "
        f"{machine.name}: {_of_a_step(best)}, "
        f"{bytes_text(best.memory.total)} of {bytes_text(bounds.nbytes)} a rank"
    )
    if best.saving != recipe.memory:
        words += f"; memory={best.saving}"
        words += "" if recipe.memory == "auto" else ", or no grid would fit"
    log.info("%s", words)
    return recipe.model_copy(update={"grid": best.grid, "memory": best.saving})


def _choose_memory(job: GridJob, machine: Machine, bounds: PlanBounds) -> Recipe:
    """Chooses how the recipe's own grid saves memory (`LayoutError`)."""
    recipe = job.recipe
    best = trace_one(job, recipe.grid, machine, bounds)
    if not best.fits(bounds.nbytes):
        raise LayoutError(
            f"memory=auto: {words_of(recipe.grid)} does not fit into {bytes_text(bounds.nbytes)} a "
            f"rank ({bounds.reason}): {bytes_text(best.memory.total)} with memory={best.saving}\n"
            "    take more ranks (grid=auto says how many would do), or precision=bf16"
        )
    usual = trace_one(job.with_recipe(memory="none"), recipe.grid, machine, bounds)
    log.info(
        "memory=auto: memory=%s by the plan for %s: %s and %s of %s a rank; memory=none "
        "takes %s and %s",
        best.saving,
        machine.name,
        _of_a_step(best),
        bytes_text(best.memory.total),
        bytes_text(bounds.nbytes),
        _of_a_step(usual),
        bytes_text(usual.memory.total),
    )
    return recipe.model_copy(update={"memory": best.saving})


def _of_a_step(one: Candidate) -> str:
    return f"{summary.step_text(one)} a step" if one.cost.known else "an unknown time a step"


MARGIN = 0.9  # of the tensors may be left, where a plan that should have fitted did not


def advice_for_memory(recipe: Recipe, machine: str | None = None) -> str:
    """Says what the plan expected of a run that ran out of memory, and what next would fit."""
    job = job_of(recipe)
    chosen = machine_for(machine, recipe)
    here = min(recipe.grid.size, int(os.environ.get("LOCAL_WORLD_SIZE", recipe.grid.size)))
    bounds = search.host_bounds(here, chosen.device)
    memory = trace_one(job, recipe.grid, chosen, bounds).memory
    planned = memory.total
    words = f"the plan expects {bytes_text(planned)} a rank of {bytes_text(bounds.nbytes)}"
    # What takes more than its plan here will elsewhere: the next one must plan with less.
    tensors = min(planned, bounds.nbytes) - memory.process
    less = replace(bounds, nbytes=memory.process + max(0, int(MARGIN * tensors)))
    plan = search.make_plan(job.with_recipe(memory="auto"), chosen, recipe.grid.size, less)
    best = plan.best or search.least_ranks(plan.first, plan.bounds).found
    if best is None:
        return f"{words}\n    no grid would take less: take smaller mini-batches or precision=bf16"
    axes = [f"grid.{axis}={count}" for axis, count in best.grid.model_dump().items() if count > 1]
    saving = best.saving or recipe.memory
    return (
        f"{words}\n    by the plan {bytes_text(best.memory.total)} would do: "
        f"{' '.join([*axes, f'memory={saving}'])} on {ranks_text(best.grid.size)}"
    )


def machine_for(name: str | None, recipe: Recipe) -> Machine:
    """Loads the machine that is named, or else the usual one for the recipe's device."""
    return load_machine(name or USUAL_MACHINES[planned_device(recipe)])


def write_prediction(recipe: Recipe, machine: str | None = None) -> None:
    """Writes ``RUN/profile/predicted.json`` for a run's recipe, as its profile is written.

    Raises:
        MachineError: the machine has measured nothing like most of the step.
    """
    chosen = machine_for(machine, recipe)
    found = trace_one(job_of(recipe), recipe.grid, chosen, search.machine_bounds(chosen))
    path = predicted_path(recipe.output)
    if why := summary.unknown_time(found, chosen):
        path.unlink(missing_ok=True)  # that of an earlier run
        raise MachineError(why)
    write_profile(path, predicted_profile(found, recipe))


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
