"""Runs `hyperslab sweep`: trains variants of a recipe, each at its best rate, with some seeds."""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from hyperslab.cli import options
from hyperslab.cli.rank import adopt_rank, exit_when_stopped, is_started
from hyperslab.cli.terminal import log_to_stdout
from hyperslab.comm import AXES
from hyperslab.errors import LayoutError, RecipeError, printable
from hyperslab.recipe.schema import OF_A_STEP, Recipe
from hyperslab.studies.sweep.schema import check_variant, load_sweep
from hyperslab.util.atomic_files import check_output
from hyperslab.util.signals import StopRequest

if TYPE_CHECKING:
    from hyperslab.launch.crew import Crew, Team
    from hyperslab.studies.sweep.run import SweepState

_WIDTH = 140  # columns where the output is no terminal


def sweep_command(
    sweep: Annotated[Path, typer.Argument(help="A YAML file, see `hyperslab recipes`.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Overrides of the recipe, for all variants, such as data.path=x."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks of each run. Default: those of the recipe's grid."),
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Runs beside each other. Default: so many that no core is idle, and one on GPUs.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of all runs. Default: the sweep's.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs with predicted times, and run nothing.")
    ] = False,
    machine: options.MachineOption = None,
    trust: options.TrustOption = None,
) -> None:
    """Train and compare variants of a recipe.

    The command chooses a learning rate for each variant, by the validation loss of shorter runs,
    and then trains each with several seeds. Repeat the command to continue after an interruption;
    finished runs are kept. A failed run is named, and the exit code is 1. Under srun, jsrun and
    torchrun groups of the job's ranks share the runs.
    """
    adopt_rank()
    words = overrides or []
    if ranks is not None and not any(word.startswith("grid") for word in words):
        # They share the mini-batch; the user's own words come last, and so win.
        uncut = [f"grid.{axis}=1" for axis in AXES if axis != "data"]
        words = [*uncut, f"grid.data={ranks}", *words]
    wanted = load_sweep(sweep, words, output=output, trusted=trust or ())
    count = _ranks([variant.recipe for variant in wanted.variants], ranks)
    options.check_machine(machine)
    check_output(wanted.output, "--output")
    for variant in wanted.variants:
        variant.recipe.check_targets_exist(*(OF_A_STEP if dry_run else ()))
        if dry_run or not is_started():
            check_variant(variant)
    from rich.console import Console

    from hyperslab.launch.crew import with_crew
    from hyperslab.launch.restarts import LaunchSlot
    from hyperslab.studies.sweep import budget, results, run

    console = Console(width=None if sys.stdout.isatty() else _WIDTH, markup=False)
    if dry_run:
        table = budget.forecast_table(budget.forecast_sweep(wanted, machine))
        console.print(table.for_terminal(wrap="a step"))
        return
    log_to_stdout(logging.INFO)

    def train(crew: Crew | None, stop: StopRequest | None = None) -> SweepState:
        places: list[LaunchSlot | Team] = []
        if crew is not None:
            places += crew.teams(count)[:at_once]
            if len(places) < (at_once or 1):
                runs = "a run takes" if at_once is None else f"{at_once} runs at once take"
                needed = count * (at_once or 1)
                raise LayoutError(
                    f"{runs} {needed} ranks, and {crew.size} were started\n    start {needed} "
                    "tasks, or give a smaller grid or --at-once"
                )
        forecast = budget.forecast_sweep(wanted, machine)
        if stop is not None:
            slots = budget.runs_at_once(forecast, count, at_once)
            places += [LaunchSlot(stop, slot, slots) for slot in range(slots)]
        ways = [partial(run.do_run, start=one.start_training, stop=stop) for one in places]
        return run.run_sweep(wanted, count, run.SweepProgress(wanted), ways, forecast)

    with exit_when_stopped():
        if is_started():
            state = with_crew(train, wanted.output)
        else:
            with StopRequest().listening() as stop:
                state = train(None, stop)
    if state is None:
        return  # this rank is not the main one
    rows = state.rows()
    tables = [results.rates_table(rows), results.runs_table(rows), results.scores_table(rows)]
    for table in [*tables, budget.budget_table(state.records(), state.forecast)]:
        console.print(table.for_terminal())
    console.print(
        f"all numbers are in {wanted.output}: sweep.json, sweep.csv, runs.csv; "
        f"see them with: hyperslab report {quote(str(wanted.output))}",
        highlight=False,
        soft_wrap=True,
    )
    if state.failures:
        for name, reason in state.failures.items():
            line = printable(f"failed: {name}: {reason}")
            console.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1)


def _ranks(recipes: list[Recipe], ranks: int | None) -> int:
    """Count the ranks that each run takes (`LayoutError`, `RecipeError`)."""
    if all(recipe.grid.auto for recipe in recipes):
        if ranks is None:
            raise RecipeError("grid=auto needs to know how many ranks to start: give --ranks")
        return ranks
    sizes = {recipe.grid.size for recipe in recipes}
    if len(sizes) > 1 or (ranks is not None and sizes != {ranks}):
        given = f"--ranks is {ranks}, and " if ranks is not None else ""
        raise LayoutError(
            f"{given}the variants' grids have {', '.join(map(str, sorted(sizes)))} places\n"
            "    give the grid for all of them, such as grid.depth=2, with as many --ranks"
        )
    return sizes.pop()
