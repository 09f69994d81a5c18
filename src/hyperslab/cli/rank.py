"""Runs a command on several ranks: `train`, `evaluate`, `predict` and `calibrate` begin here.

Such a command is either the launcher, which starts one process a rank with the same command
line, or one of the ranks: one that its launcher, torchrun, srun or mpirun has started, or the
only one.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import typer
from torch.distributed.elastic.multiprocessing.errors import record

from hyperslab.cli.early import check_count
from hyperslab.cli.terminal import DEBUG
from hyperslab.comm.bootstrap import adopt_launcher, tell_ranks
from hyperslab.comm.launchers import check_thread_count, read_variables
from hyperslab.errors import HyperslabError, Stopped
from hyperslab.launch import supervisor
from hyperslab.recipe.schema import Recipe

P = ParamSpec("P")
T = TypeVar("T")


def adopt_rank() -> None:
    """Take this process's rank from the variables of the srun, jsrun or mpirun that started it.

    Raises:
        HyperslabError: one of them, or of torchrun's, is missing or odd; names it.
    """
    check_thread_count(os.environ)
    adopt_launcher(os.environ)
    read_variables(os.environ)


def is_started() -> bool:
    """Say whether this process is one of several ranks that something has started."""
    return "RANK" in os.environ


def is_started_again() -> bool:
    """Say whether what started this rank, such as torchrun with --max-restarts, did so before."""
    return os.environ.get(supervisor.RESTARTS_VARIABLE, "0") != "0"


def is_main_of_command() -> bool:
    """Say whether this process answers for the command: it alone, or the main rank of torchrun."""
    launched = supervisor.LAUNCHER_VARIABLE in os.environ  # by a hyperslab that answers itself
    return not is_started() or (os.environ["RANK"] == "0" and not launched)


def is_rank(recipe: Recipe) -> bool:
    """Say whether this process does the work itself; if not, it starts the ranks that do."""
    return is_started() or recipe.grid.size == 1


def become_rank() -> bool:
    """Begin the work of a rank; returns whether it is the main one."""
    if is_started():
        supervisor.end_with_parent()
    return os.environ.get("RANK", "0") == "0"


def launch_again(context: typer.Context, recipe: Recipe, logs: Path) -> None:
    """Run this very command line on every rank of the recipe's grid; raises what `launch` does."""
    command = ["-m", "hyperslab", *context.obj]
    supervisor.launch(recipe.grid.size, command, logs, limit=recipe.timeout)


@contextmanager
def telling_ranks() -> Iterator[None]:
    """End all ranks after an error before they start: they would wait for this one."""
    try:
        yield
    except HyperslabError as error:
        if is_started():
            tell_ranks(error)
        raise


def as_rank(work: Callable[P, T]) -> Callable[P, T]:
    """Write down what goes wrong for what started this process, too, as torch's `record` does.

    Of our own errors without the traceback, which torchrun would print in place of the words.
    """

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return recording(*args, **kwargs)
        except HyperslabError:
            if not os.environ.get(DEBUG):
                with suppress(OSError, ValueError, KeyError, TypeError):
                    _drop_traceback(Path(os.environ[supervisor.ERROR_FILE_VARIABLE]))
            raise

    recording: Any = record(work)
    return run


def _drop_traceback(file: Path) -> None:
    said = json.loads(file.read_text())
    del said["message"]["extraInfo"]["py_callstack"]
    file.write_text(json.dumps(said))


@contextmanager
def exit_when_stopped() -> Iterator[None]:
    """Leave with the signal's exit code where a signal ended the work."""
    try:
        yield
    except Stopped as stopped:
        if not stopped.said:
            print(stopped, file=sys.stderr)
        raise SystemExit(stopped.code) from None


def check_ranks(recipe: Recipe, ranks: int | None) -> None:
    """Compare the grid with the ranks that there are or shall be, before any work is done.

    Raises:
        LayoutError: with both numbers.
    """
    grid = recipe.grid.model_dump()
    place = read_variables(os.environ)
    if ranks is not None:
        check_count("--ranks", ranks, grid)
    if place is not None:
        check_count("WORLD_SIZE", place.size, grid)
