"""Runs `hyperslab sweep`: trains variants of a recipe, each at its best rate, with some seeds."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from hyperslab.cli.rank import exit_when_stopped, is_started
from hyperslab.cli.terminal import log_to_stdout
from hyperslab.comm.grid import AXES
from hyperslab.errors import LayoutError, RecipeError, printable
from hyperslab.recipe.schema import Recipe
from hyperslab.studies.sweep.results import Spread, SweepRow
from hyperslab.studies.sweep.run import SweepProgress, forecast_table, run_sweep
from hyperslab.studies.sweep.schema import load_sweep

_WIDTH = 140
"""Columns where the output is no terminal."""


def sweep_command(
    sweep: Annotated[Path, typer.Argument(help="A YAML file, see `hyperslab recipes`.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key=value of the recipe, for all variants, such as data.path=x."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Of each run. Default: as many as the recipe's grid."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="The folder of all runs. Default: the sweep's.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs, with predicted times; run nothing.")
    ] = False,
    machine: Annotated[
        str | None, typer.Option(help="Whose times --dry-run predicts. Default: the usual one.")
    ] = None,
) -> None:
    """Choose a learning rate for each variant, then train it with several seeds and compare.

    Rates are compared by the validation loss of shorter runs. The same command goes on with a sweep
    that was stopped; what is done stays. A failed run is named, and the exit code is 1.
    """
    if is_started():
        raise LayoutError(
            "hyperslab sweep starts its ranks itself, on this machine: do not start it on several, "
            "by torchrun, mpirun or srun"
        )
    words = overrides or []
    wanted = load_sweep(sweep, [*_uncut(words, ranks), *words], output=output)
    count = _ranks([variant.recipe for variant in wanted.variants], ranks)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    if dry_run:
        console.print(forecast_table(wanted, machine))
        return
    log_to_stdout(logging.INFO)
    with exit_when_stopped():
        state = run_sweep(wanted, count, SweepProgress(wanted))
    rows = state.rows()
    for table in (rates_table(rows), runs_table(rows), of_test_table(rows)):
        console.print(table)
    console.print(
        f"all numbers are in {wanted.output}: sweep.json, sweep.csv; "
        f"see them with: hyperslab report {wanted.output}",
        highlight=False,
        soft_wrap=True,
    )
    if state.failures:
        for name, reason in state.failures.items():
            line = printable(f"failed: {name}: {reason}")
            console.print(
                printable(line), style="red", highlight=False, markup=False, soft_wrap=True
            )
        raise typer.Exit(1)


def runs_table(rows: list[SweepRow]) -> Table:
    """One row a variant: what was run, and the median time of a training."""
    table = _empty("variant", "rate", "seeds", "validation loss", "best epoch", "training", "")
    for row in rows:
        edge = "the best rate is at the edge of what was tried" if row.at_the_edge else ""
        table.add_row(
            row.name,
            "none" if row.rate is None else f"{row.rate:g}",
            f"{len(row.seeds)} of {row.wanted}",
            _range(row.validation_loss),
            "" if row.best_epoch is None else f"{row.best_epoch.median:g} of {row.epochs}",
            "" if row.seconds is None else f"{row.seconds.median:.0f} s",
            edge,
        )
    return table


def of_test_table(rows: list[SweepRow]) -> Table:
    """One row a variant: its scores on the test split, median (least to largest) over seeds."""
    names = list(dict.fromkeys(name for row in rows for name in row.test))
    table = _empty("variant", "mean", *names)
    for row in rows:
        scores = (row.test.get(name) for name in names)
        table.add_row(row.name, _range(row.test_mean), *map(_range, scores))
    segments = any(row.segments for row in rows)
    what = "Dice" if segments else "squared error over that of predicting the mean"
    table.caption = f"{what}, test split; median (least to largest) over seeds"
    table.caption_justify = "left"
    return table


def rates_table(rows: list[SweepRow]) -> Table:
    """One row a rate that was tried: its median validation loss."""
    table = _empty("variant", "rate tried", "validation loss", "")
    for row in rows:
        for one in row.tried:
            loss = "failed" if one.validation_loss is None else f"{one.validation_loss:.4g}"
            words = "chosen" if one.rate == row.rate else ""
            table.add_row(row.name, f"{one.rate:g}", loss, words)
    return table


def _empty(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for place, head in enumerate(heads):
        left = place == 0 or not head
        table.add_column(head, justify="left" if left else "right", no_wrap=True)
    return table


def _range(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return f"{spread.median:.3g} ({spread.least:.3g} to {spread.largest:.3g})"


def _uncut(overrides: list[str], ranks: int | None) -> list[str]:
    """Where ranks are given and no grid, they share the mini-batch."""
    if ranks is None or any(word.startswith("grid") for word in overrides):
        return []
    return [*(f"grid.{axis}=1" for axis in AXES if axis != "data"), f"grid.data={ranks}"]


def _ranks(recipes: list[Recipe], ranks: int | None) -> int:
    """How many each run takes.

    Raises:
        LayoutError, RecipeError: the grid has another number of places, or there is no number.
    """
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
