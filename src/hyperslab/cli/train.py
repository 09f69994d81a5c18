"""`hyperslab train`: start the ranks, or be one of them."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from torch.distributed.elastic.multiprocessing.errors import record

from hyperslab.comm.mpi import adopt_mpi
from hyperslab.errors import LayoutError
from hyperslab.launch.launcher import adopt_slurm, end_with_parent, launch, settle_environment
from hyperslab.recipe.load import load_recipe
from hyperslab.recipe.schema import Places, Recipe
from hyperslab.train.run import prepare_folder
from hyperslab.train.run import train as train_rank
from hyperslab.train.step_vote import Stopped


def train(
    recipe: Annotated[Path, typer.Argument(help="A YAML file; recipes/ has some.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, such as grid.depth=2 epochs=10.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Processes to start; the grid must have as many places."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, on any grid.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="The run's folder. Default: the recipe's.")
    ] = None,
) -> None:
    """Train a network; also under torchrun and srun, where every rank runs this command."""
    config = load_recipe(recipe, overrides or [])
    if output is not None:
        config = config.model_copy(update={"output": output})
    adopt_mpi(os.environ)
    adopt_slurm(os.environ)
    check_ranks(config, ranks)
    try:
        if "RANK" in os.environ or config.grid.size == 1:
            be_rank(config, resume=resume)
            return
        with ExitStack() as stack:  # the ranks hold the folder afterwards
            prepare_folder(config, stack, resume=resume)
        settle_environment(os.environ, config.grid.size, config.timeout)
        arguments = ["-m", "hyperslab", "train", str(recipe), *(overrides or [])]
        arguments += ["--output", str(config.output), *(["--resume"] if resume else [])]
        launch(config.grid.size, arguments, config.output / "logs")
    except Stopped as stopped:
        raise SystemExit(stopped.code) from None


@record
def be_rank(config: Recipe, *, resume: bool) -> None:
    """Train as one rank; what goes wrong is also written down for the process that started it."""
    if "RANK" in os.environ:
        end_with_parent()
    main = os.environ.get("RANK", "0") == "0"
    handler = _Terminal()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.getLogger("hyperslab").addHandler(handler)
    logging.getLogger("hyperslab").setLevel(logging.INFO if main else logging.WARNING)
    try:
        train_rank(config, resume=resume)
    except Stopped as stopped:
        if main:
            logging.getLogger("hyperslab").info("%s", stopped)
        raise SystemExit(stopped.code) from None


class _Terminal(logging.Handler):
    """Writes to what is standard output now: a progress bar may have put itself in front of it.

    A reader that has gone, such as `head`, does not end the training.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stdout, flush=True)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


def check_ranks(config: Recipe, ranks: int | None) -> None:
    """Compare the grid with the ranks that there are or shall be, before any work is done.

    Raises:
        LayoutError: with both numbers.
    """
    grid, world = config.grid, os.environ.get("WORLD_SIZE")
    places = " x ".join(f"{axis} {extent}" for axis, extent in grid.model_dump().items())
    wanted = [
        ("--ranks", ranks, f"use --ranks {grid.size}"),
        ("WORLD_SIZE", int(world) if world else None, f"start {grid.size} ranks"),
    ]
    for name, count, remedy in wanted:
        if count is not None and count != grid.size:
            raise LayoutError(
                f"{name} is {count} but the grid has {grid.size} places ({places})\n"
                f"    {remedy}, or change the grid, such as {_grid_of(count, grid)}"
            )


def _grid_of(count: int, grid: Places) -> str:
    """Overrides that give a grid this many places, along the depth."""
    extents = grid.model_dump()
    others = [f"{axis}=1" for axis, extent in extents.items() if axis != "depth" and extent > 1]
    return " ".join(f"grid.{override}" for override in [*others, f"depth={count}"])
