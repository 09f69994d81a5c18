"""One checkpoint: a folder that is there whole or not at all, and loads on any grid.

step-00000123/
    model.safetensors       weights under the names of the state dict; large ones are in
                            model-00001-of-00004.safetensors and so on, one a rank, with an index
    optimizer.safetensors   what the optimizer keeps, under "weight/what"; one a rank, too
    extra.safetensors       tensors of whatever else was given, such as states of generators
    state.json              all that is not tensors (see `hyperslab.checkpoint.values`)
    manifest.json           the SHA-256 of every file above; written last
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import torch

from hyperslab.atomic_files import partial_path
from hyperslab.checkpoint.contents import read_extra_values, read_state
from hyperslab.checkpoint.in_place import (
    check_replaceable,
    put_back,
    put_in_place,
    remove,
    standing,
    sync,
)
from hyperslab.checkpoint.manifest import MANIFEST, STATE_FILE, ChecksumManifest, verify_checksums
from hyperslab.checkpoint.pickled import fill_from_pickled, read_pickled_extra, refuse_pickles
from hyperslab.checkpoint.safetensors_file import write_new, write_tensors
from hyperslab.checkpoint.snapshot import INDEX, Snapshot, snapshot_of
from hyperslab.checkpoint.snapshot_memory import SnapshotMemory
from hyperslab.checkpoint.state import Optimizer, State, check_fits, fill, state_of
from hyperslab.comm.agreement import Group, all_or_raise, from_all, from_main, own_rank, ranks_in
from hyperslab.errors import CheckpointError, reason

DISK_FULL = 16 << 20
"""A disk with less space [B] than this is why a checkpoint could not be written."""

FileSums = dict[str, str]
"""SHA-256 by names of files."""


def save(
    path: str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **extra: Any,
) -> None:
    """Write a checkpoint; every rank calls it. It loads on any other grid.

    Steps: every rank writes its part into a hidden sibling folder; rank 0 adds ``extra`` (plain
    values and tensors, nested as one likes) and the checksums, waits for the disk and lets the
    folder take its name. So a checkpoint under its own name is complete, and one that was there
    stays until then.

    Raises:
        CheckpointError: on every rank, if any cannot write, or what is there is no checkpoint;
            what was there before still is.
    """
    write_checkpoint(Path(path).absolute(), take_snapshot(model, optimizer, extra))


def load(
    path: str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    trust_pickle: bool = False,
) -> dict[str, Any]:
    """Fill model and optimizer from a checkpoint; every rank calls it. Returns ``extra``.

    No code that is in it is run. Only checkpoints of earlier versions may have some, and are
    refused without ``trust_pickle``.

    Raises:
        CheckpointError: a file is missing or not what was written, or the checkpoint is of
            another network; on every rank, and before anything is changed.
    """
    path, manifest = _verified(path)
    failing = f"the checkpoint {path} does not fit this model"
    if manifest.pickled:
        extra = _pickled_extra(path, trust_pickle)
        fill_from_pickled(path, model, optimizer, failing)
        return extra

    def read() -> dict[str, Any]:
        state = read_state(path, manifest, optimizer=optimizer is not None)
        extra = read_extra_values(path, manifest)
        _fill(state, model, optimizer, failing)
        return extra

    return all_or_raise(read)


def read_extra(path: str | Path, *, trust_pickle: bool = False) -> dict[str, Any]:
    """What a checkpoint holds besides model and optimizer; every rank calls it.

    Raises:
        CheckpointError: a file of it is missing or not what was written; on every rank.
    """
    path, manifest = _verified(path)
    if manifest.pickled:
        return _pickled_extra(path, trust_pickle)
    return all_or_raise(lambda: read_extra_values(path, manifest))


def take_snapshot(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: dict[str, Any],
    memory: SnapshotMemory | None = None,
) -> Snapshot | CheckpointError:
    """What this rank has to write, or why it cannot be; see `snapshot_of`. It waits for nobody."""
    try:
        state = state_of(model, optimizer)
        late = _of_optimizer(state, optimizer) if memory is not None else frozenset()
        rank = own_rank()
        return snapshot_of(state, extra, rank=rank, ranks=ranks_in(), memory=memory, late=late)
    except CheckpointError as error:
        return error
    except (ValueError, RecursionError, OSError, MemoryError) as error:
        return CheckpointError(reason(error))  # of what holds itself, or for want of memory


def _of_optimizer(state: State, optimizer: Optimizer) -> Set[int]:
    """The addresses of weights that it trains, and of what it keeps."""
    groups = [] if optimizer is None else optimizer.param_groups
    trained = {weight.data_ptr() for group in groups for weight in group["params"]}
    return trained | {tensor.data_ptr() for tensor in state.moments.values()}


def write_checkpoint(path: Path, own: Snapshot | CheckpointError, group: Group = None) -> None:
    """Write the parts of all ranks and make them a checkpoint; every rank of ``group`` calls it.

    Raises:
        CheckpointError: on every rank, as `save` does.
    """
    partial = partial_path(path)
    failing = f"cannot write the checkpoint {path}"

    def on_main(make: Callable[[], Any]) -> Any:
        return from_main(make, failing=failing, error=CheckpointError, group=group)

    try:
        on_main(lambda: _prepare(partial, path))
        parts = _from_every_rank(lambda: _write_part(partial, own), failing, group)
        on_main(lambda: _finish(partial, path, own, parts))
    except CheckpointError as error:
        full = on_main(lambda: _fullness(partial))
        if own_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        if full:
            raise CheckpointError(f"{error}\n    {full}") from error
        raise


def _verified(path: str | Path) -> tuple[Path, ChecksumManifest]:
    """The folder, whose files are as written."""
    named = Path(path).absolute()

    def verify() -> tuple[Path, ChecksumManifest]:
        found = standing(named)
        return found, verify_checksums(found)

    failing = f"cannot read the checkpoint {named}"
    return from_main(verify, failing=failing, error=CheckpointError)


def _pickled_extra(path: Path, trust_pickle: bool) -> dict[str, Any]:
    if not trust_pickle:
        raise refuse_pickles(path)
    return read_pickled_extra(path)


def _fill(state: State, model: torch.nn.Module, optimizer: Optimizer, failing: str) -> None:
    try:
        check_fits(state, model, optimizer)
        fill(state, model, optimizer)
    except (CheckpointError, ValueError, KeyError, TypeError, RuntimeError) as error:
        why = str(error) if isinstance(error, CheckpointError) else reason(error)
        raise CheckpointError(f"{failing}: {why}") from error


def _from_every_rank(
    make: Callable[[], tuple[str, FileSums]], failing: str, group: Group
) -> list[tuple[str, FileSums]]:
    """What all ranks have, or on all of them what went wrong on the first."""
    found: tuple[str, FileSums] | str
    try:
        found = make()
    except (OSError, CheckpointError) as error:
        found = str(error) if isinstance(error, CheckpointError) else reason(error)
    parts = from_all(found, group)
    for rank, part in enumerate(parts):
        if isinstance(part, str):
            raise CheckpointError(f"{failing}: {part} (rank {rank})")
    return [part for part in parts if not isinstance(part, str)]


def _write_part(partial: Path, own: Snapshot | CheckpointError) -> tuple[str, FileSums]:
    if isinstance(own, CheckpointError):
        raise own
    sums = {name: write_tensors(partial / name, part) for name, part in own.files.items()}
    return own.digest, sums


def _prepare(partial: Path, path: Path) -> None:
    """An empty folder to write into; what an interrupted run has put aside is back."""
    put_back(path)
    check_replaceable(path)
    remove(partial)
    partial.mkdir(parents=True)


def _finish(
    partial: Path,
    path: Path,
    own: Snapshot | CheckpointError,
    parts: list[tuple[str, FileSums]],
) -> None:
    """Complete the folder, make sure that it is on the disk, and give it its name."""
    assert isinstance(own, Snapshot)
    for rank, (digest, _) in enumerate(parts):
        if digest != own.digest:
            raise CheckpointError(
                f"cannot write the checkpoint {path}: rank {rank} has other tensors than rank 0"
            )
    sums = {name: value for _, part in parts for name, value in part.items()}
    for name, data in ((STATE_FILE, own.state), (INDEX, own.index)):
        if data:
            sums[name] = write_new(partial / name, [data])
    write_new(partial / MANIFEST, [ChecksumManifest(dict(sorted(sums.items()))).text()])
    sync(partial)
    put_in_place(partial, path)


def _fullness(path: Path) -> str:
    """That the disk below a path is full, while what was written is still there; else nothing."""
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    return f"no space left on the disk ({free >> 20} MiB free)" if free < DISK_FULL else ""
