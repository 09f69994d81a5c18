"""What a sweep will take: its runs, with the times that the planner predicts."""

from __future__ import annotations

from rich.table import Table

from hyperslab.errors import HyperslabError
from hyperslab.machine import Machine
from hyperslab.plan.auto import machine_for, planned_device
from hyperslab.plan.job import job_of
from hyperslab.plan.limits import Bounds, Limit
from hyperslab.plan.search import trace_one
from hyperslab.plan.show import time_text
from hyperslab.sweep.execute import finished
from hyperslab.sweep.load import Sweep, SweepVariant


def forecast_table(sweep: Sweep, machine: str | None) -> Table:
    """One row a variant and stage, and their sum; nothing is run.

    Times are those of the training steps, by the plan for a machine; validation, evaluation and
    start-up come on top. Where there is no prediction, the reason stands in its place.

    Raises:
        RecipeError: a folder holds another run.
        MachineError: there is no such machine.
    """
    table = Table(box=None, pad_edge=False)
    for name in ("variant", "runs", "rates", "seeds", "epochs", "done", "a step", "all"):
        table.add_column(name, justify="left" if name == "variant" else "right")
    total = 0.0
    known = True
    device = planned_device(sweep.variants[0].recipe)
    chosen = machine_for(machine, device)
    choosing = sweep.choosing()
    for variant in sweep.variants:
        step, steps, words = _predicted(variant, chosen)
        runs = [run for run in choosing if run.variant == variant.name]
        done = sum(finished(run) is not None for run in runs)
        stages = [("choose the rate", len(runs), done, runs[0].recipe.epochs)] if runs else []
        stages += [("seeds", len(variant.seeds), 0, variant.recipe.epochs)]
        for stage, count, ready, epochs in stages:
            seconds = None if step is None else step * steps * epochs * (count - ready)
            total += seconds or 0.0
            known = known and seconds is not None
            table.add_row(
                f"{variant.name}: {stage}",
                str(count),
                _list(variant.rates) if stage != "seeds" else "the best",
                _list(variant.seeds if stage == "seeds" else variant.choosing_seeds),
                str(epochs),
                str(ready) if stage != "seeds" else "",
                words if step is None else time_text(step),
                "" if seconds is None else time_text(seconds),
            )
    words = f"training steps, predicted for {chosen.name}"
    table.add_row(words, *[""] * 6, f"{'' if known else 'more than '}{time_text(total)}")
    return table


def _predicted(variant: SweepVariant, machine: Machine) -> tuple[float | None, int, str]:
    """Of a step [s], steps of an epoch, and why there is no prediction."""
    recipe = variant.recipe
    try:
        job = job_of(recipe)
        steps = -(-job.samples // (job.batch * job.accumulated))
        found = trace_one(job, recipe.grid, machine, Bounds(Limit(machine.memory, "")))
    except HyperslabError as error:
        return None, 0, str(error).splitlines()[0]
    return found.seconds.total, steps, ""


def _list(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)
