"""Runs `hyperslab calibrate`: measures this machine, for the recipes that it shall predict."""

from __future__ import annotations

import logging
import math
import os
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hyperslab.cli.options import TrustOption, check_machine_file, without_overrides
from hyperslab.cli.rank import adopt_rank, as_rank, become_rank, exit_when_stopped, is_started
from hyperslab.cli.terminal import log_to_stdout, progress
from hyperslab.errors import MachineError
from hyperslab.launch.supervisor import LAUNCHER_VARIABLE, launch
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import OF_A_STEP
from hyperslab.recipe.trust import trust_of

if TYPE_CHECKING:
    from hyperslab.planner.calibrate import Calibration
    from hyperslab.planner.records import LocalOperator
    from hyperslab.planner.trace import Device

TIMEOUT = 600.0  # [s] that a rank waits for the others


def calibrate_command(
    context: typer.Context,
    out: Annotated[
        Path, typer.Option(help="The machine file to write; an existing one is completed.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE",
            help="Recipes whose operators are timed, and overrides such as data.batch_size=2.",
        ),
    ] = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Number of ranks that measure at once; may be repeated. Default: 1."
        ),
    ] = None,
    budget: Annotated[float, typer.Option(min=0.001, help="Seconds for each measurement.")] = 0.3,
    planned: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Measure only the operators of the best grids of this many ranks, which need not "
            "exist here, and leave time for their plan.",
        ),
    ] = None,
    limit: Annotated[
        float | None, typer.Option(min=1, help="Seconds for all; the longest operators come first.")
    ] = None,
    trust: TrustOption = None,
) -> None:
    """Measure how fast this machine is, for plans.

    Times operators, memory, messages, sums over ranks and reads, and how much communication hides
    behind computation. The operators are those of the recipes, on every grid of the given number of
    ranks; plans interpolate the others. Files are read beside OUT. Keep the machine idle meanwhile.
    Under torchrun and srun every rank runs this command.
    """
    adopt_rank()
    files, overrides = without_overrides(arguments or [])
    recipes = [*map(Path, files)]
    with exit_when_stopped():
        if is_started():
            if ranks and LAUNCHER_VARIABLE not in os.environ:
                raise MachineError("--ranks starts ranks, but these were started already: omit it")
            calibrate_as_rank(
                recipes,
                overrides,
                out=out,
                budget=budget,
                planned=planned,
                limit=limit,
                trusted=trust or (),
            )
            return
        # Before minutes of measuring, and once, not on every rank.
        _check(recipes, overrides, out, trust or ())
        import_module("hyperslab.planner.calibrate")  # for the ranks, which are forks
        for count in ranks or [1]:  # which share the cores, and run this very command line
            with tempfile.TemporaryDirectory(prefix="hyperslab-calibrate-") as logs:
                launch(count, ["-m", "hyperslab", *context.obj], Path(logs), limit=TIMEOUT)


@as_rank
def calibrate_as_rank(
    recipes: Sequence[Path],
    overrides: Sequence[str],
    *,
    out: Path,
    budget: float,
    planned: int | None = None,
    limit: float | None = None,
    trusted: Sequence[str] = (),
) -> None:
    """Measure as one rank; the main one writes the file and shows how far it is.

    ``limit`` [s] is for this and, where a plan of ``planned`` ranks follows, for that plan.
    """
    begin = time.monotonic()
    from hyperslab.comm import Grid
    from hyperslab.comm.agreement import broadcast_from_main
    from hyperslab.comm.bootstrap import start_ranks
    from hyperslab.comm.placement import number_by_node
    from hyperslab.planner.auto import USUAL_MACHINES
    from hyperslab.planner.calibrate import calibrate, operators_of_grids, operators_of_plan
    from hyperslab.planner.job import job_of
    from hyperslab.planner.machine import load_machine, save_machine
    from hyperslab.planner.search import host_bounds

    is_main = become_rank()
    log_to_stdout(logging.WARNING)
    start_ranks("auto", timeout=TIMEOUT, numbering=number_by_node)
    grid = Grid(data=int(os.environ["WORLD_SIZE"]))
    before = broadcast_from_main(lambda: load_machine(out) if out.exists() else None)
    device: Device = "cuda" if grid.device.type == "cuda" else "cpu"

    def operators_to_measure() -> list[LocalOperator]:
        found: list[LocalOperator] = []
        for path in recipes:
            job = job_of(load_recipe(path, overrides, trust=trust_of(path, trusted)))
            if planned is None:
                found += operators_of_grids(job, path, grid.size, device)
            else:
                likely = before or load_machine(USUAL_MACHINES[device])
                found += operators_of_plan(job, planned, likely, host_bounds(grid.size, device))
        return found

    # One rank traces for all: it takes as long as a plan, and they share the cores.
    operators = broadcast_from_main(operators_to_measure)
    begun = time.monotonic() - begin
    # A plan that follows traces the same once more.
    spent = begun if planned is None else 2 * begun
    folder = out.absolute().parent
    name = out.stem if before is None else before.name
    with progress(is_main=is_main) as bar:
        task = bar.add_task("calibrate", total=None)
        result = calibrate(
            grid,
            name,
            folder,
            operators,
            before,
            budget=budget,
            limit=math.inf if limit is None else limit - spent,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if is_main:
        save_machine(result.machine, out)
        print(_summary(result, grid.size, out), flush=True)


def _check(
    recipes: Sequence[Path], overrides: Sequence[str], out: Path, trusted: Sequence[str]
) -> None:
    """Check what can be wrong, before minutes of measuring."""
    for recipe in recipes:
        trust = trust_of(recipe, trusted)
        load_recipe(recipe, overrides, trust=trust).check_targets_exist(*OF_A_STEP)
    check_machine_file("--out", out)


def _summary(result: Calibration, ranks: int, out: Path) -> str:
    plural = "s" * (ranks > 1)
    left = f", no time for {result.left} more" if result.left else ""
    lines = [f"{out}: {ranks} rank{plural}, {result.measured} calls measured{left}"]
    lines += [f"    not measured: {name}: {why}" for name, why in sorted(result.failed.items())]
    return "\n".join(lines)
