"""`hyperslab evaluate`: the errors of a run's network on samples that it never saw."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch.distributed.elastic.multiprocessing.errors import record

from hyperslab.cli.train import check_ranks
from hyperslab.train.agree import Stopped
from hyperslab.train.evaluate import Evaluation, recipe_for
from hyperslab.train.evaluate import evaluate as evaluate_rank
from hyperslab.train.launch import adopt_slurm, end_with_parent, launch, settle_environment

COLUMNS = {
    "ratio": "ratio",
    "mse": "MSE",
    "mse_of_mean": "of mean",
    "mae": "MAE",
    "r2": "R²",
    "mae_physical": "MAE phys.",
    "relative_error": "relative",
}


def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a training run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value; grid.depth=2 is a grid of its own.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Processes to start. Default: as many as the grid, or 1."),
    ] = None,
    checkpoint: Annotated[
        str, typer.Option(help="best, latest, the name of one of the run's, or a path.")
    ] = "best",
    split: Annotated[str, typer.Option(help="test, validation, train or all.")] = "test",
) -> None:
    """Measure a network on the test split; also under torchrun and srun, on any grid."""
    adopt_slurm(os.environ)
    overrides = overrides or []
    config = recipe_for(run, overrides, ranks=ranks)
    check_ranks(config, ranks)
    try:
        if "RANK" in os.environ or config.grid.size == 1:
            be_rank(run, overrides, checkpoint=checkpoint, split=split)
            return
        settle_environment(os.environ, config.grid.size)
        arguments = ["-m", "hyperslab", "evaluate", str(run), *overrides]
        arguments += ["--checkpoint", checkpoint, "--split", split]
        launch(config.grid.size, arguments, run / "logs")
    except Stopped as stopped:
        raise SystemExit(stopped.code) from None


@record
def be_rank(run: Path, overrides: Sequence[str], *, checkpoint: str, split: str) -> None:
    """Evaluate as one rank; the main one prints."""
    if "RANK" in os.environ:
        end_with_parent()
    logging.basicConfig(format="%(message)s", stream=sys.stdout, level=logging.WARNING)
    result = evaluate_rank(run, checkpoint=checkpoint, split=split, overrides=overrides)
    if os.environ.get("RANK", "0") == "0":
        show(result, run, Console(soft_wrap=True))


def show(result: Evaluation, run: Path, console: Console) -> None:
    """Print the errors of every parameter, the bad ones too."""
    facts = result.facts
    console.print(
        f"{facts['samples']} samples of the {facts['split']} split, {facts['checkpoint']}, "
        f"{facts['seconds']:.1f} s",
        highlight=False,
    )
    console.print(table_of(result.errors))
    console.print(
        "ratio: MSE over that of predicting the training mean; 1 means nothing was learnt\n"
        f"all numbers are in {run / 'evaluation'}; see them with: hyperslab report {run}",
        highlight=False,
    )


def table_of(errors: dict[str, dict[str, float]]) -> Table:
    """One row a parameter."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("parameter", no_wrap=True)
    for head in COLUMNS.values():
        table.add_column(head, justify="right", no_wrap=True)
    for name, row in errors.items():
        cells = [f"{row[key]:.3g}" for key in COLUMNS if key != "relative_error"]
        table.add_row(name, *cells, f"{row['relative_error']:.2%}")
    return table
