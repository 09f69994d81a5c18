"""Runs a command on several ranks: `train`, `evaluate`, `predict` and `calibrate` begin here.

Such a command is either the launcher, which starts one process a rank with the same command
line, or one of the ranks: one that its launcher, torchrun, srun or mpirun has started, or the
only one.
"""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import typer

from hyperslab.cli.terminal import DEBUG
from hyperslab.comm.launchers import adopt_launcher, check_thread_count, read_variables
from hyperslab.errors import HyperslabError, LayoutError, Stopped
from hyperslab.launch import supervisor
from hyperslab.util.gpu_memory import machine_has_gpu, torch_knows_cuda
from hyperslab.util.startup import exit_on_signal

if TYPE_CHECKING:
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
    if is_started() and signal.getsignal(signal.SIGTERM) is exit_on_signal:  # see `begin_command`
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def is_started() -> bool:
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
            from hyperslab.comm.bootstrap import tell_ranks  # torch

            tell_ranks(error)
        raise


def as_rank(work: Callable[P, T]) -> Callable[P, T]:
    """Write down what goes wrong for what started this process, too, as torch's `record` does.

    Of our own errors without the traceback, which torchrun would print in place of the words.
    """

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        from torch.distributed.elastic.multiprocessing.errors import record

        recording: Any = record(work)
        try:
            found: T = recording(*args, **kwargs)
            return found
        except HyperslabError:
            if not os.environ.get(DEBUG):
                with suppress(OSError, ValueError, KeyError, TypeError):
                    file = Path(os.environ[supervisor.ERROR_FILE_VARIABLE])
                    said = json.loads(file.read_text())
                    del said["message"]["extraInfo"]["py_callstack"]
                    file.write_text(json.dumps(said))
            raise

    return run


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
        LayoutError: with both numbers; there is no device of the kind that is asked for.
    """
    if recipe.device.startswith("cuda"):
        words, remedy = "", "use device=cpu"
        if not torch_knows_cuda():
            words = " for this torch, which was built without CUDA"
            remedy += ", or install torch for CUDA"
        elif not machine_has_gpu():
            words = " on this machine: no driver has a file in /dev"
        if words:
            raise LayoutError(
                f"device={recipe.device}: there is no CUDA device{words}\n    {remedy}"
            )
    grid = recipe.grid.model_dump()
    place = read_variables(os.environ)
    if ranks is not None:
        check_count("--ranks", ranks, grid)
    if place is not None:
        check_count("WORLD_SIZE", place.size, grid)


def check_count(name: str, count: int, grid: Mapping[str, int]) -> None:
    """Compare a number of ranks with the extents of a grid.

    ``name``: the option, or the variable of the launcher, that has the number.
    """
    size = math.prod(grid.values())
    if count == size:
        return
    places = " x ".join(f"{axis} {extent}" for axis, extent in grid.items())
    remedy = f"use --ranks {size}" if name == "--ranks" else f"start {size} ranks"
    others = [f"{axis}=1" for axis, extent in grid.items() if axis != "depth" and extent > 1]
    overrides = " ".join(f"grid.{override}" for override in [*others, f"depth={count}"])
    raise LayoutError(
        f"{name} is {count} but the grid has {size} places ({places})\n"
        f"    {remedy}, or change the grid, such as {overrides}"
    )
