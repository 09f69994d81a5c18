"""Saves and loads checkpoints on any grid, keeps those that a run needs, restores its state.

What is here finds a run's checkpoints, by their names and what they say of themselves, and needs
no torch. A main rank does it for the others: see `hyperslab.checkpoint.retention`.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from hyperslab.checkpoint import files
from hyperslab.errors import CheckpointError, DataError, RecipeError
from hyperslab.util.atomic_files import check_output

log = logging.getLogger("hyperslab")

BEST = "best"

STEP_NAME = re.compile(r"step-(\d{8,})")

HIDDEN = re.compile(r"\.(step-\d{8,})\.(partial|replaced|removed)")
"""Matches what a run that was killed may leave; the word says at what."""


def folder_of(run: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return run / "checkpoints"


def path_of_step(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def step_of(name: str) -> int:
    match = STEP_NAME.fullmatch(name)
    assert match is not None
    return int(match[1])


def steps_in(folder: Path) -> list[Path]:
    """Return the checkpoints there, damaged ones too, the newest first."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = {name for name in names if STEP_NAME.fullmatch(name)}
    hidden = [HIDDEN.fullmatch(name) for name in names]
    found |= {match[1] for match in hidden if match and match[2] == "replaced"}
    return [folder / name for name in sorted(found, key=step_of, reverse=True)]


def check_unused(run: Path) -> None:
    """Refuse the folder of a run for a training that begins.

    Raises:
        RecipeError: there are checkpoints in it, one that is aside for a moment too; or it is none.
    """
    check_output(run, "--output")
    if steps_in(folder_of(run)):
        raise RecipeError(
            f"output {run} holds a run already\n"
            "    go on with --resume (hyperslab.fit: resume=True), or choose another --output"
        )


def find_checkpoint(run: Path, which: str) -> Path:
    """Find the folder of "best", "latest", a name or a path.

    The latest is intact; that the files of others are as they were written is found out when they
    are read.

    Raises:
        CheckpointError: as `newest_intact`.
        DataError: there is no such checkpoint.
    """
    folder = folder_of(run)
    if which in (BEST, "latest"):
        found = best_in(folder) if which == BEST else newest_intact(folder)
    else:
        places = (folder / which, Path(which))
        found = next((path.resolve() for path in places if os.path.isdir(path)), None)
    if found is None:
        there = sorted(path.name for path in folder.glob("[!.]*"))
        has = f"it has: {', '.join(there)}" if there else "it has none: train it first"
        raise DataError(f"{run} has no checkpoint {which!r}; {has}")
    return found


def newest_intact(folder: Path) -> Path | None:
    """Return the newest intact checkpoint of a run's folder of them, None if there is none.

    A corrupt one is passed over for the one before, and the log says so.

    Raises:
        CheckpointError: there are some, but none is intact.
    """
    paths = steps_in(folder)
    for path in paths:
        if (found := _intact(path, "trying the one before it")) is not None:
            return found
    if paths:
        raise CheckpointError(
            f"none of the {len(paths)} checkpoints in {folder} is intact; the newest: "
            f"{paths[0].name}\n"
            "    to start again, move the folder away or choose another --output"
        )
    return None


def best_in(folder: Path) -> Path | None:
    """Return the checkpoint that ``best`` means, None if there is none.

    Where the link is damaged, the one that the newest intact one names, and the log says so.

    Raises:
        CheckpointError: there are some, but none is intact.
    """
    link = folder / BEST
    name = best_name(folder)
    if name is not None or (link.is_dir() and not link.is_symlink()):  # a copy, without links
        return files.standing(folder / (name or BEST))
    newest = newest_intact(folder)
    if newest is None:
        return None
    step = position_in(newest, "best_step")
    best = None
    if step is not None:  # that checkpoint may have gone
        best = _intact(path_of_step(newest.parent, step), "trying the newest one")
    found = best or newest
    log.warning("%s points to no checkpoint\n    taking %s", link, found)
    return found


def best_name(folder: Path) -> str | None:
    """Return the name of the checkpoint that ``best`` points to, if it does and that is there."""
    try:
        name = os.readlink(folder / BEST)
    except OSError:  # there is none, or it is no link
        return None
    return name if STEP_NAME.fullmatch(name) and files.standing(folder / name).is_dir() else None


def position_in(path: Path, key: str) -> int | None:
    """Read a whole number of the position of a checkpoint; None where there is no such."""
    position = files.read_values(path)["extra"].get("position")
    found = position.get(key) if isinstance(position, dict) else None
    return found if type(found) is int else None


def _intact(path: Path, otherwise: str) -> Path | None:
    found = files.standing(path)
    try:
        files.verify_checksums(found)
    except CheckpointError as error:
        log.warning("%s\n    %s", error, otherwise)
        return None
    return found
