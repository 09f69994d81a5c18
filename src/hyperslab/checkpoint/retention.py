"""The checkpoints of one run: the last few, the best, and which one to go on from."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from hyperslab.atomic_files import written_aside
from hyperslab.checkpoint.save_load import save, verify_checksums
from hyperslab.comm.agreement import from_main
from hyperslab.errors import CheckpointError

log = logging.getLogger("hyperslab")


def folder_of(run: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run / "checkpoints"


def save_step(
    run: Path,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    best: bool,
    keep: int,
    **extra: Any,
) -> Path:
    """Write the checkpoint of a step; afterwards only the last ``keep`` and the best remain.

    ``best`` is a link to the one with the lowest validation loss.

    Raises:
        CheckpointError: it cannot be written; the earlier ones are untouched.
    """
    path = _path_of(folder_of(run), step)
    save(path, model, optimizer, **extra)
    from_main(
        lambda: _tidy(path, best=best, keep=keep),
        failing=f"cannot tidy {path.parent}",
        error=CheckpointError,
    )
    return path


def latest(run: str | Path) -> Path | None:
    """The newest intact checkpoint of a run, None if there is none; every rank calls it.

    A corrupt one is passed over for the one before, and the log says so.

    Raises:
        CheckpointError: there are some, but none is intact.
    """
    folder = folder_of(Path(run))
    return from_main(
        lambda: _newest_intact(folder), failing=f"cannot read {folder}", error=CheckpointError
    )


def mend_best(path: Path, best_step: int | None) -> None:
    """Let ``best`` be what the checkpoint ``path`` says, if that is there; every rank calls it.

    A run may have been killed between writing a checkpoint and pointing to it.
    """
    if best_step is not None:
        from_main(
            lambda: _mend(path.parent, best_step),
            failing=f"cannot tidy {path.parent}",
            error=CheckpointError,
        )


def _mend(folder: Path, best_step: int) -> None:
    best = _path_of(folder, best_step)
    link = folder / "best"
    if best.is_dir() and (not link.exists() or os.readlink(link) != best.name):
        _point(link, best.name)


def _path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _newest_intact(folder: Path) -> Path | None:
    paths = sorted(folder.glob("step-*"), reverse=True)
    for path in paths:
        try:
            verify_checksums(path)
        except CheckpointError as error:
            log.warning("%s\n    trying the one before it", error)
        else:
            return path
    if paths:
        raise CheckpointError(
            f"none of the {len(paths)} checkpoints in {folder} is intact; the newest: {path.name}\n"
            "    to start again, move the folder away or choose another --output"
        )
    return None


def _tidy(new: Path, *, best: bool, keep: int) -> None:
    """Later steps than the new one are from before a resume: it passed over them as corrupt."""
    link = new.with_name("best")
    if best or not link.exists() or os.readlink(link) > new.name:
        _point(link, new.name)
    steps = sorted(new.parent.glob("step-*"))
    earlier = [path for path in steps if path.name <= new.name]
    kept = {path.name for path in earlier[-keep:]} | {os.readlink(link)}
    for path in [*steps, *new.parent.glob(".step-*")]:  # the hidden ones: killed while writing
        if path.name not in kept:
            shutil.rmtree(path)


def _point(link: Path, name: str) -> None:
    with written_aside(link) as partial:
        partial.unlink(missing_ok=True)  # of a run that was killed
        partial.symlink_to(name)
