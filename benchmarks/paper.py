"""What the model predicts for Lassen, beside what was published.

    python benchmarks/paper.py [--json OUT] [--fit]

Steps are traced on the grids of the papers, along depth alone, with the kernels of a GPU; the
machine is `lassen-v100`, whose numbers are published ones but for three constants, which --fit fits
to every second scaling (`FITTED`). Beside each scaling stands what it would be with the column
"Peak" of Table II and nothing fitted (`lassen-v100-peak`), with one speed of convolutions for all
forms of blocks, with a latency of each message, and with batch norm (the papers do not say which
runs had it). The figures of Mathuriya et al. 2018 are predicted with `cori-knl`. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import math
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
    step_seconds,
    trace,
    with_latency,
    with_one_rate,
)
from published import (
    EFFICIENCY,
    EPOCH,
    FASTEST,
    FASTEST_FLOPS,
    FITTED,
    LEAST,
    NODES,
    READING,
    STRONG,
    TABLE_2,
    WEAK,
    Kernels,
    Run,
    SpeedUp,
    cori,
)

from hyperslab.planner.job import job_of
from hyperslab.planner.machine import Machine, SumsOverNodes, load_machine
from hyperslab.planner.search import machine_bounds, make_plan, words_of
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
        "column Peak": between(case.before, case.after, load_machine("lassen-v100-peak")),
        "one rate": between(case.before, case.after, with_one_rate(machine)),
        "10 us latency": between(case.before, case.after, with_latency(machine, 1e-5)),
    }
    if not case.before.batch_norm:
        with_norm = [replace(run, batch_norm=True) for run in (case.before, case.after)]
        others["batch norm"] = between(*with_norm)
    predicted = between(case.before, case.after)
    part += ", fitted" if case in FITTED else ", predicted"
    return Row(part, case.name, case.where, case.published, predicted, others)


def fastest(machine: Machine) -> Row:
    """[Pflop/s], by the flops of the paper's Table I: three times the forward pass."""
    seconds = step_seconds(FASTEST, machine)
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
    theirs = min(ways for ways in WAYS if counted / ways + machine.reserved <= machine.memory)
    others = {"memory of Table I": float(theirs), "GiB of Table I": counted / 2**30}
    others |= {f"GiB {ways}-way": nbytes / 2**30 for ways, nbytes in needed.items()}
    return Row("least GPUs", name, "2020, V-B, V-C", published, ours, others)


def reading(machine: Machine) -> Row:
    """Of 64 samples on 512 GPUs, each its part [s]."""
    gpus = 512
    seconds = machine.read_seconds(64 * 2**30 // gpus, gpus)
    return Row("reading", "64 samples of 1 GiB [ms]", "2020, III-B", 1e3 * READING,
               1e3 * seconds, {})  # fmt: skip


def on_cori() -> Iterator[Row]:
    """Of 8,192 nodes over one, and their epoch."""
    machine = load_machine("cori-knl")
    one, all_nodes = (step_seconds(cori(nodes), machine) for nodes in (1, NODES))
    where = "2018, V-D"
    yield Row("Cori", "8192 nodes: efficiency", where, EFFICIENCY, one / all_nodes, {})
    yield Row("Cori", "8192 nodes: epoch [s]", where, EPOCH, 20 * all_nodes, {})


def fitted(machine: Machine) -> Machine:
    """The machine with the constants that are nearest to `FITTED`, by the squares of logarithms.

    In turn each is moved by a step that is halved whenever none gets nearer.
    """

    def with_constants(logs: list[float]) -> Machine:
        scale, exponent, exchange = logs
        sums = SumsOverNodes(scale=math.exp(scale), exponent=exponent)
        return machine.model_copy(update={"node_sums": sums, "exchange": math.exp(exchange)})

    def distance(logs: list[float]) -> float:
        found = with_constants(logs)
        return sum(
            math.log(speed(case.after, found) / speed(case.before, found) / case.published) ** 2
            for case in FITTED
        )

    best = [math.log(1e-10), 0.5, math.log(2e9)]
    least = distance(best)
    step = 0.5
    while step > 0.01:
        tries = [
            [value + sign * step * (at == other) for other, value in enumerate(best)]
            for at in range(len(best))
            for sign in (-1, 1)
        ]
        nearest, logs = min((distance(logs), logs) for logs in tries)
        if nearest < least:
            least, best = nearest, logs
        else:
            step /= 2
    return with_constants(best)


def rows(machine: Machine) -> Iterator[Row]:
    """All of them."""
    for case in sorted(STRONG, key=lambda case: case not in FITTED):
        yield speed_up(case, "strong scaling", machine)
    for case in sorted(WEAK, key=lambda case: case not in FITTED):
        yield speed_up(case, "weak scaling", machine)
    yield from on_cori()
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
    plan = make_plan(job, machine, run.gpus, machine_bounds(machine))
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
    parser.add_argument("--fit", action="store_true", help="print the constants, and no more")
    options = parser.parse_args()
    machine = load_machine("lassen-v100")
    if options.fit:
        found = fitted(machine)
        print(f"node_sums {found.node_sums} exchange {found.exchange:.3g}")
        return
    predictions = list(rows(machine))
    print_rows(predictions)
    choices = [choose(recipe, run, machine) for recipe, run in PLANS]
    print_choices(choices)
    if options.json:
        values = {
            "date": date.today().isoformat(),
            "machine": machine.name,
            "torch": torch.__version__,
            "rows": [asdict(row) for row in predictions],
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
