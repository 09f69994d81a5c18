"""Saves and loads checkpoints on any grid, keeps those that a run needs, restores its state.

What is here goes by the names of a run's files, and needs no torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from hyperslab.checkpoint.files import read_checksum_manifest
from hyperslab.errors import CheckpointError, DataError, HyperslabError, RecipeError


def folder_of(run: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return run / "checkpoints"


def checkpoints_of(run: Path) -> list[Path]:
    """Return the checkpoints of steps, damaged ones too, and those that are aside for a moment."""
    names = ("step-*", ".step-*.replaced")
    return [path for name in names for path in sorted(folder_of(run).glob(name), reverse=True)]


def check_unused(run: Path) -> None:
    """Refuse the folder of a run for a training that begins.

    Raises:
        RecipeError: there are checkpoints in it, one that is aside for a moment too; or it is none.
    """
    there = next(path for path in (run, *run.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise RecipeError(f"output {there} is not a folder\n    choose another --output")
    if checkpoints_of(run):
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
    """Refuses a checkpoint, by "best", "latest", a name or a path, without a manifest.

    That its files are as they were written is found out when they are read. Of the latest one the
    one before may take the place.

    Raises:
        CheckpointError: a manifest is missing or is none of ours.
        DataError: there is no such checkpoint.
    """
    steps = checkpoints_of(run)
    if which not in ("best", "latest"):
        found = [named_checkpoint(run, which)]
    elif which == "best" and (folder_of(run) / which).is_dir():
        found = [folder_of(run) / which]
    else:
        found = steps
    problem: HyperslabError = no_checkpoint(run, which)
    for path in reversed(found):
        try:
            read_checksum_manifest(path)
            return
        except CheckpointError as error:
            problem = error
    if found and found is steps:
        raise none_intact(folder_of(run), len(found), str(problem))
    raise problem


def none_intact(folder: Path, count: int, newest: str) -> CheckpointError:
    """Returns the error for checkpoints that are all damaged, with the newest or what it lacks."""
    return CheckpointError(
        f"none of the {count} checkpoints in {folder} is intact; the newest: {newest}\n"
        "    to start again, move the folder away or choose another --output"
    )


def no_checkpoint(run: Path, which: str) -> DataError:
    """Return the error that names a run's checkpoints."""
    there = sorted(path.name for path in folder_of(run).glob("[!.]*"))
    found = f"it has: {', '.join(there)}" if there else "it has none: train it first"
    return DataError(f"{run} has no checkpoint {which!r}; {found}")
