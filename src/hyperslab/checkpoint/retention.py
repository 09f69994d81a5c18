"""Keeps the last few checkpoints of a run and the best, and finds the one to go on from.

On all ranks: what a single process finds is in the package itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hyperslab.checkpoint import (
    BEST,
    HIDDEN,
    best_name,
    files,
    folder_of,
    newest_intact,
    path_of_step,
    step_of,
    steps_in,
)
from hyperslab.checkpoint.background import BackgroundWriter
from hyperslab.checkpoint.save_load import on_main, take_snapshot, write_checkpoint
from hyperslab.comm.agreement import Group
from hyperslab.errors import CheckpointError
from hyperslab.util.atomic_files import created_aside, partial_path


def save_step(
    run: Path,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    best: bool,
    keep: int,
    behind: BackgroundWriter | None = None,
    check_folder: Callable[[], None] = lambda: None,
    **extra: Any,
) -> Path:
    """Write the checkpoint of a step; afterwards only the last ``keep`` and the best remain.

    ``best`` is a link to the one with the lowest validation loss. With ``behind`` it is written
    while the run goes on. The main rank calls ``check_folder`` before; what it raises is raised.

    Raises:
        CheckpointError: it, or the one that was written ``behind`` before, cannot be written; the
            earlier ones are untouched.
    """
    path = path_of_step(folder_of(run), step)
    if behind is not None:
        behind.wait()  # its memory holds the one before
    own = take_snapshot(model, optimizer, extra, None if behind is None else behind.memory)

    def begin() -> None:
        check_folder()
        # Of a run whose folder was removed this would be one that has only checkpoints.
        path.parent.mkdir(exist_ok=True)

    def write(group: Group, problem: CheckpointError | None) -> None:
        failing = f"cannot write the checkpoint {path}"
        on_main(begin, failing, group)
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
    return on_main(lambda: newest_intact(folder), f"cannot read {folder}")


def mend_best(path: Path, best_step: int | None) -> None:
    """Let ``best`` be what the checkpoint ``path`` says, if that is there; every rank calls it.

    A run may have been killed between writing a checkpoint and pointing to it.
    """
    if best_step is None:
        return
    folder = path.parent
    best = path_of_step(folder, best_step)

    def mend() -> None:
        files.remove(partial_path(folder / BEST))  # the run was killed while it pointed there
        if files.standing(best).is_dir() and best_name(folder) != best.name:
            _point(folder / BEST, best.name)

    on_main(mend, f"cannot tidy {folder}")


def _tidy(new: Path, *, best: bool, keep: int) -> None:
    """Keep the best checkpoint, and of those up to the new one the ``keep`` newest.

    Later steps than the new one are from before a resume: it passed over them as corrupt.
    """
    folder = new.parent
    known = best_name(folder)
    if best or known is None or step_of(known) > step_of(new.name):
        _point(folder / BEST, new.name)
        known = new.name
    paths = steps_in(folder)
    earlier = [path for path in paths if step_of(path.name) <= step_of(new.name)]
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
    with created_aside(link) as file:
        partial = Path(file.name)
        partial.unlink()  # it is to be a link
        partial.symlink_to(name)
    files.remove(files.aside(link))
