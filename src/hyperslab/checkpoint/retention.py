"""Keeps the last few checkpoints of a run and the best, and finds the one to go on from."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import torch

from hyperslab.checkpoint import files, folder_of, none_intact
from hyperslab.checkpoint.background import BackgroundWriter
from hyperslab.checkpoint.save_load import (
    on_main,
    read_extra_values,
    take_snapshot,
    write_checkpoint,
)
from hyperslab.comm.agreement import Group
from hyperslab.errors import CheckpointError
from hyperslab.util.atomic_files import partial_path, written_aside

log = logging.getLogger("hyperslab")

BEST = "best"

STEP_NAME = re.compile(r"step-(\d{8,})")

HIDDEN = re.compile(r"\.(step-\d{8,})\.(partial|replaced|removed)")
"""Matches what a run that was killed may leave; the word says at what."""


def save_step(
    run: Path,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    best: bool,
    keep: int,
    behind: BackgroundWriter | None = None,
    **extra: Any,
) -> Path:
    """Write the checkpoint of a step; afterwards only the last ``keep`` and the best remain.

    ``best`` is a link to the one with the lowest validation loss. With ``behind`` it is written
    while the run goes on.

    Raises:
        CheckpointError: it, or the one that was written ``behind`` before, cannot be written; the
            earlier ones are untouched.
    """
    path = _path_of(folder_of(run), step)
    if behind is not None:
        behind.wait()  # its memory holds the one before
    own = take_snapshot(model, optimizer, extra, None if behind is None else behind.memory)

    def write(group: Group, problem: CheckpointError | None) -> None:
        write_checkpoint(path, problem or own, group)
        tidying = f"cannot tidy {path.parent}"
        on_main(lambda: _tidy(path, best=best, keep=keep), tidying, group)

    if behind is None:
        write(None, None)
    else:
        behind.start(write, optimizer)
    return path


def latest(run: str | Path) -> Path | None:
    """Return the newest intact checkpoint of a run, None if there is none; every rank calls it.

    A corrupt one is passed over for the one before, and the log says so.

    Raises:
        CheckpointError: there are some, but none is intact.
    """
    folder = folder_of(Path(run))
    return on_main(lambda: _newest_intact(folder), f"cannot read {folder}")


def epochs_done(path: Path) -> int | None:
    """Tells how many epochs were done at an intact checkpoint; None where it does not say."""
    return _position(path, "epoch")


def _position(path: Path, key: str) -> int | None:
    """Reads a number of the position of an intact checkpoint; None where there is no such."""
    position = read_extra_values(path, files.read_checksum_manifest(path)).get("position")
    found = position.get(key) if isinstance(position, dict) else None
    return found if type(found) is int else None


def best_of(run: str | Path) -> Path | None:
    """Return the checkpoint that ``best`` means, None if there is none; every rank calls it.

    Where the link is damaged, the one that the newest intact one names, and the log says so.

    Raises:
        CheckpointError: there are some, but none is intact.
    """
    folder = folder_of(Path(run))
    return on_main(lambda: _best(folder), f"cannot read {folder}")


def steps_in(folder: Path) -> list[Path]:
    """Return the checkpoints there, damaged ones too, the newest first."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = {name for name in names if STEP_NAME.fullmatch(name)}
    hidden = [HIDDEN.fullmatch(name) for name in names]
    found |= {match[1] for match in hidden if match and match[2] == "replaced"}
    return [folder / name for name in sorted(found, key=_step, reverse=True)]


def mend_best(path: Path, best_step: int | None) -> None:
    """Let ``best`` be what the checkpoint ``path`` says, if that is there; every rank calls it.

    A run may have been killed between writing a checkpoint and pointing to it.
    """
    if best_step is None:
        return
    folder = path.parent
    best = _path_of(folder, best_step)

    def mend() -> None:
        files.remove(partial_path(folder / BEST))  # the run was killed while it pointed there
        if files.standing(best).is_dir() and best_name(folder) != best.name:
            _point(folder / BEST, best.name)

    on_main(mend, f"cannot tidy {folder}")


def _path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _step(name: str) -> int:
    match = STEP_NAME.fullmatch(name)
    assert match is not None
    return int(match[1])


def best_name(folder: Path) -> str | None:
    """Return the name of the checkpoint that ``best`` points to, if it does and that is there."""
    try:
        name = os.readlink(folder / BEST)
    except OSError:  # there is none, or it is no link
        return None
    return name if STEP_NAME.fullmatch(name) and files.standing(folder / name).is_dir() else None


def _newest_intact(folder: Path) -> Path | None:
    paths = steps_in(folder)
    for path in paths:
        if (found := _intact(path, "trying the one before it")) is not None:
            return found
    if paths:
        raise none_intact(folder, len(paths), paths[0].name)
    return None


def _best(folder: Path) -> Path | None:
    link = folder / BEST
    name = best_name(folder)
    if name is not None or (link.is_dir() and not link.is_symlink()):  # a copy, without links
        return files.standing(folder / (name or BEST))
    newest = _newest_intact(folder)
    if newest is None:
        return None
    found = _recorded_best(newest) or newest
    log.warning("%s points to no checkpoint\n    taking %s", link, found)
    return found


def _recorded_best(newest: Path) -> Path | None:
    """Return the checkpoint that a later one knows to be the best, if it is there."""
    step = _position(newest, "best_step")
    return None if step is None else _intact(_path_of(newest.parent, step), "trying the newest one")


def _intact(path: Path, otherwise: str) -> Path | None:
    found = files.standing(path)
    try:
        files.verify_checksums(found)
    except CheckpointError as error:
        log.warning("%s\n    %s", error, otherwise)
        return None
    return found


def _tidy(new: Path, *, best: bool, keep: int) -> None:
    """Later steps than the new one are from before a resume: it passed over them as corrupt."""
    folder = new.parent
    known = best_name(folder)
    if best or known is None or _step(known) > _step(new.name):
        _point(folder / BEST, new.name)
        known = new.name
    paths = steps_in(folder)
    earlier = [path for path in paths if _step(path.name) <= _step(new.name)]
    kept = {path.name for path in earlier[:keep]} | {known}
    for path in paths:
        if path.name in kept:
            files.put_back(path)
        elif path.is_dir():  # never half there under its name
            hidden = path.with_name(f".{path.name}.removed")
            files.remove(hidden)
            path.rename(hidden)
    for name in os.listdir(folder):
        if HIDDEN.fullmatch(name) or name == partial_path(folder / BEST).name:
            files.remove(folder / name)


def _point(link: Path, name: str) -> None:
    if link.is_dir() and not link.is_symlink():
        files.remove(files.aside(link))
        link.rename(files.aside(link))
    with written_aside(link) as partial:
        partial.unlink(missing_ok=True)  # of a run that was killed
        partial.symlink_to(name)
    files.remove(files.aside(link))
