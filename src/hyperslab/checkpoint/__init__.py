"""Saves and loads checkpoints on any grid, keeps those that a run needs, restores its state.

What is here goes by the names of a run's files, and needs no torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from hyperslab.errors import DataError, RecipeError


def folder_of(run: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return run / "checkpoints"


def check_unused(run: Path) -> None:
    """Refuse the folder of a run for a training that begins.

    Raises:
        RecipeError: there are checkpoints in it, one that is aside for a moment too; or it is none.
    """
    there = next(path for path in (run, *run.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise RecipeError(f"output {there} is not a folder\n    choose another --output")
    if any(any(folder_of(run).glob(name)) for name in ("step-*", ".step-*.replaced")):
        raise RecipeError(
            f"output {run} holds a run already\n"
            "    go on with --resume (hyperslab.fit: resume=True), or choose another --output"
        )


def named_checkpoint(run: Path, which: str) -> Path:
    """Returns the folder of the checkpoint that has a name, or lies at a path, or refuses it."""
    candidates = (folder_of(run) / which, Path(which))
    found = next((path.resolve() for path in candidates if os.path.isdir(path)), None)
    if found is None:
        raise no_checkpoint(run, which)
    return found


def check_checkpoint(run: Path, which: str) -> None:
    """Refuses a checkpoint, by "best", "latest", a name or a path, that is not there."""
    if which not in ("best", "latest"):
        named_checkpoint(run, which)
    elif not any(folder_of(run).glob("*step-*")):
        raise no_checkpoint(run, which)


def no_checkpoint(run: Path, which: str) -> DataError:
    """Return the error that names a run's checkpoints."""
    there = sorted(path.name for path in folder_of(run).glob("[!.]*"))
    found = f"it has: {', '.join(there)}" if there else "it has none: train it first"
    return DataError(f"{run} has no checkpoint {which!r}; {found}")
