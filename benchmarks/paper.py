"""What the model predicts for Lassen, beside what was published.

    python benchmarks/paper.py [--json OUT]

Steps are traced on the grids of the papers, along depth alone, with the kernels of a GPU; the
machine is `lassen-v100`, whose numbers are published peaks, bandwidths and local kernels. Work
hides all messages that it can, as the papers assume. Beside each scaling stands what it would be
with nothing hidden, with one speed of convolutions for blocks of all sizes, with a latency of each
message, and with batch norm (the papers do not say which runs had it). No GPU is needed; it takes
less than a minute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

import torch
from lassen import (
    cost,
    kept_by_table_1,
    local_kernels,
    memory,
    speed,
    trace,
    with_latency,
    with_nothing_hidden,
    with_one_rate,
)
from published import (
    FASTEST,
    FASTEST_FLOPS,
    LEAST,
    READING,
    STRONG,
    TABLE_2,
    WEAK,
    Kernels,
    Run,
    SpeedUp,
)

from hyperslab.planner.grids import words_of
from hyperslab.planner.job import job_of
from hyperslab.planner.machine import Machine, load_machine
from hyperslab.planner.search import MemoryLimit, PlanBounds, make_plan
from hyperslab.recipe.load import load_recipe

RECIPES = Path(__file__).parent.parent / "recipes"
WAYS = (1, 2, 4, 8, 16, 32)

PLANS = (
    ("cosmoflow-512.yaml", Run("cosmoflow", 512, 16, 512, 32)),
    ("cosmoflow-512.yaml", Run("cosmoflow", 512, 64, 512, 8)),
    ("cosmoflow-512.yaml", Run("cosmoflow", 512, 64, 2048, 32)),
    ("unet-lits.yaml", Run("unet3d", 256, 16, 512, 32, batch_norm=True)),
)
"""Runs for which the planner chooses the grid."""


@dataclass(frozen=True)
class Row:
    """One published number and what is predicted for it; ``others`` are further predictions."""

    part: str
    name: str
    where: str
    published: float
    predicted: float
    others: dict[str, float]

    @property
    def ratio(self) -> float:
        return self.predicted / self.published


def speed_up(case: SpeedUp, part: str, machine: Machine) -> Row:
    """Predicted, and predicted again with other assumptions."""

    def between(before: Run, after: Run, on: Machine = machine) -> float:
        return speed(after, on) / speed(before, on)

    others = {
        "nothing hidden": between(case.before, case.after, with_nothing_hidden(machine)),
        "one rate": between(case.before, case.after, with_one_rate(machine)),
        "10 us latency": between(case.before, case.after, with_latency(machine, 1e-5)),
    }
    if not case.before.batch_norm:
        with_norm = [replace(run, batch_norm=True) for run in (case.before, case.after)]
        others["batch norm"] = between(*with_norm)
    predicted = between(case.before, case.after)
    return Row(part, case.name, case.where, case.published, predicted, others)


def fastest(machine: Machine) -> Row:
    """[Pflop/s], by the flops of the paper's Table I: three times the forward pass."""
    seconds = cost(FASTEST, machine).seconds.total
    sample = trace(replace(FASTEST, samples=1, gpus=1, ways=1))
    forward = FASTEST.samples * sample.flops("forward")
    done = FASTEST.samples * sample.flops()
    return Row(
        "speed",
        "CosmoFlow 512³, N=128, 512 GPUs [Pflop/s]",
        "poster",
        FASTEST_FLOPS / 1e15,
        3 * forward / seconds / 1e15,
        {"without the first layer's backward-data": done / seconds / 1e15},
    )


def kernels(case: Kernels, machine: Machine) -> Iterator[Row]:
    """A row of table II: its time, and its performance relative to the local kernels alone."""
    run = Run("cosmoflow", 512, 64, 64 * case.ways, case.ways)
    wanted = "features.conv" if case.layer == "all" else f"features.{case.layer}"
    layers = [part for part in cost(run, machine).layers if part.layer.startswith(wanted)]
    seconds = sum(part.seconds for part in layers)
    alone = local_kernels(replace(run, samples=1, gpus=case.ways), wanted, machine)
    name = f"{case.layer}, {case.ways}-way"
    where = "2020, table II"
    yield Row("kernels", f"{name}: time [ms]", where, 1e3 * case.seconds, 1e3 * seconds, {})
    yield Row("kernels", f"{name}: of the local kernel", where, case.relative, alone / seconds, {})


def least_gpus(name: str, published: int, run: Run, machine: Machine) -> Row:
    """For a sample: with this program's memory, and with that of the paper's Table I."""
    counted = kept_by_table_1(run)
    needed = {ways: memory(replace(run, gpus=ways, ways=ways), machine) for ways in WAYS}
    ours = min(ways for ways in WAYS if needed[ways] <= machine.memory)
    theirs = min(ways for ways in WAYS if counted / ways <= machine.memory)
    others = {"memory of Table I": float(theirs), "GiB of Table I": counted / 2**30}
    others |= {f"GiB {ways}-way": nbytes / 2**30 for ways, nbytes in needed.items()}
    return Row("least GPUs", name, "2020, V-B, V-C", published, ours, others)


def reading(machine: Machine) -> Row:
    """Of 64 samples on 512 GPUs, each its part [s]."""
    gpus = 512
    seconds = machine.read_seconds(64 * 2**30 // gpus, gpus)
    return Row("reading", "64 samples of 1 GiB [ms]", "2020, III-B", 1e3 * READING,
               1e3 * seconds, {})  # fmt: skip


def rows(machine: Machine) -> Iterator[Row]:
    """All of them."""
    for case in STRONG:
        yield speed_up(case, "strong scaling", machine)
    for case in WEAK:
        yield speed_up(case, "weak scaling", machine)
    yield fastest(machine)
    for entry in TABLE_2:
        yield from kernels(entry, machine)
    for name, published, run in LEAST:
        yield least_gpus(name, published, run, machine)
    yield reading(machine)


@dataclass(frozen=True)
class Choice:
    """What the planner would take instead of the paper's grid, and the steps of both [s]."""

    name: str
    papers: str
    papers_seconds: float
    chosen: str
    seconds: float


def choose(recipe: str, run: Run, machine: Machine) -> Choice:
    """The grids of a recipe of the project, on the GPUs of a published run."""
    config = load_recipe(RECIPES / recipe, [f"data.batch_size={run.samples}"])
    channels = 4 if run.network == "cosmoflow" else 1
    job = job_of(config, (channels, *(run.width,) * 3))
    limit = MemoryLimit(machine.memory, f"that of {machine.name}")
    plan = make_plan(job, machine, run.gpus, PlanBounds(limit))
    assert plan.best is not None
    name = f"{run.network} {run.width}³, N={run.samples}, {run.gpus} GPUs"
    papers = " ".join(f"{axis}={extent}" for axis, extent in run.extents.items())
    return Choice(name, papers, cost(run, machine).seconds.total, words_of(plan.best.grid),
                  plan.best.seconds.total)  # fmt: skip


def print_rows(found: list[Row]) -> None:
    part = ""
    for row in found:
        if row.part != part:
            part = row.part
            print(f"\n{part:50}{'published':>10}{'predicted':>11}{'ratio':>7}")
        others = ", ".join(f"{name} {value:.4g}" for name, value in row.others.items())
        print(f"{row.name:50}{row.published:10.4g}{row.predicted:11.4g}{row.ratio:7.2f}  {others}")


def print_choices(choices: list[Choice]) -> None:
    print("\nwhat the planner chooses instead of the grid of the paper")
    for one in choices:
        print(
            f"{one.name}: {one.papers} takes {1e3 * one.papers_seconds:.1f} ms, {one.chosen} "
            f"{1e3 * one.seconds:.1f} ms, {one.papers_seconds / one.seconds:.2f} times as fast"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results there")
    options = parser.parse_args()
    machine = load_machine("lassen-v100")
    found = list(rows(machine))
    print_rows(found)
    choices = [choose(recipe, run, machine) for recipe, run in PLANS]
    print_choices(choices)
    if options.json:
        values = {
            "date": date.today().isoformat(),
            "machine": machine.name,
            "torch": torch.__version__,
            "rows": [asdict(row) for row in found],
            "choices": [asdict(choice) for choice in choices],
            "steps": {
                f"{run.network} {run.width} N={run.samples} on {run.gpus}, {run.ways}-way"
                f"{', batch norm' if run.batch_norm else ''}": cost(run, machine).seconds.as_dict()
                for case in (*STRONG, *WEAK)
                for run in (case.before, case.after)
            },
        }
        options.json.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
