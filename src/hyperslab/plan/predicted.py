"""What a plan predicts of a run, beside what its profile measured."""

from __future__ import annotations

from collections import defaultdict

from hyperslab.cost.breakdown import LayerCost
from hyperslab.plan.auto import machine_for, planned_device
from hyperslab.plan.candidate import Candidate
from hyperslab.plan.job import job_of
from hyperslab.plan.limits import Bounds, Limit
from hyperslab.plan.search import trace_one
from hyperslab.recipe.schema import Recipe
from hyperslab.trace.records import Stage
from hyperslab.train.profile.schema import LayerTime, Profile, predicted_path, write_profile


def write_prediction(recipe: Recipe, machine: str | None = None) -> None:
    """Write ``RUN/profile/predicted.json`` for a run's recipe, as its profile is written.

    Raises:
        MachineError: there is no such machine.
        DataError: the data cannot be opened.
        UnsupportedOp: the network cannot be traced.
    """
    chosen = machine_for(machine, planned_device(recipe))
    found = trace_one(job_of(recipe), recipe.grid, chosen, Bounds(Limit(chosen.memory, "")))
    write_profile(predicted_path(recipe.output), predicted_profile(found, recipe))


def predicted_profile(found: Candidate, recipe: Recipe) -> Profile:
    """Its layers, in the stages of a profile, which knows no BD and BF apart and no overhead."""
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
