"""One checkpoint: a folder that is there whole or not at all, and loads on any grid.

step-00000123/
    .metadata, __0_0.distcp, ...   torch.distributed.checkpoint: tensors under their names
    extra.pt                       whatever else was given, by rank 0
    manifest.json                  the SHA-256 of every file above; written last
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from hyperslab.atomic_files import partial_path
from hyperslab.comm.agreement import from_main, own_rank
from hyperslab.errors import CheckpointError, reason

MANIFEST = "manifest.json"
EXTRA = "extra.pt"

DISK_FULL = 16 << 20
"""A disk with less space [B] than this is why a checkpoint could not be written."""


def save(
    path: str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **extra: Any,
) -> None:
    """Write a checkpoint; every rank calls it. It loads on any other grid.

    Steps: every rank writes its part into a hidden sibling folder; rank 0 adds ``extra``
    (anything that ``torch.load(weights_only=True)`` takes) and the checksums, waits for the disk
    and renames. So a checkpoint under its own name is complete, and one that was there stays
    until then.

    Raises:
        CheckpointError: on every rank, if any cannot write; what was there before still is.
    """
    from hyperslab.checkpoint import (
        tensors,  # takes half as long to import as torch: only when needed
    )

    path = Path(path).absolute()
    partial = partial_path(path)
    failing = f"cannot write the checkpoint {path}"
    try:
        from_main(lambda: _clear(partial), failing=failing, error=CheckpointError)
        tensors.write_tensors(partial, model, optimizer, failing)
        from_main(lambda: _finish(partial, path, extra), failing=failing, error=CheckpointError)
    except CheckpointError as error:
        full = from_main(lambda: _fullness(partial), failing=failing, error=CheckpointError)
        if own_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        if full:
            raise CheckpointError(f"{error}\n    {full}") from error
        raise


def load(
    path: str | Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Fill model and optimizer from a checkpoint; every rank calls it. Returns ``extra``.

    Raises:
        CheckpointError: a file is missing or not what was written, or the checkpoint is of
            another network; on every rank.
    """
    from hyperslab.checkpoint import tensors

    path = Path(path).absolute()
    extra = read_extra(path)
    tensors.read_tensors(path, model, optimizer, f"the checkpoint {path} does not fit this model")
    return extra


def read_extra(path: Path) -> dict[str, Any]:
    """What a checkpoint holds besides model and optimizer; every rank calls it.

    Raises:
        CheckpointError: a file of it is missing or not what was written; on every rank.
    """
    from_main(
        lambda: verify_checksums(path),
        failing=f"cannot read the checkpoint {path}",
        error=CheckpointError,
    )
    extra: dict[str, Any] = torch.load(path / EXTRA, map_location="cpu", weights_only=True)
    return extra


def verify_checksums(path: Path) -> None:
    """Compare every file with the checksum that was written with it.

    Raises:
        CheckpointError: names the first file that is missing or differs.
    """
    try:
        sums: dict[str, str] = json.loads((path / MANIFEST).read_text())["sha256"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is no complete checkpoint: {reason(error)}") from None
    for name, expected in sums.items():
        if not (path / name).is_file():
            raise CheckpointError(f"the checkpoint {path} is corrupt: {name} is missing")
        if _sha256(path / name) != expected:
            raise CheckpointError(f"the checkpoint {path} is corrupt: {name} is not as written")


def _fullness(path: Path) -> str:
    """That the disk below a path is full, while what was written is still there; else nothing."""
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    return f"no space left on the disk ({free >> 20} MiB free)" if free < DISK_FULL else ""


def _clear(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _finish(partial: Path, path: Path, extra: dict[str, Any]) -> None:
    """Complete the folder, make sure that it is on the disk, and give it its name."""
    torch.save(extra, partial / EXTRA)
    torch.load(partial / EXTRA, weights_only=True)  # what could not be read is no checkpoint
    sums = {file.name: _sha256(file) for file in sorted(partial.iterdir())}
    (partial / MANIFEST).write_text(json.dumps({"sha256": sums}, indent=1))
    for written in (partial / EXTRA, partial / MANIFEST, partial):
        _sync(written)
    replaced = path.with_name(f".{path.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    _sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
