"""Saves and loads one checkpoint, a folder that is whole or not there and loads on any grid.

step-00000123/
    model.safetensors       weights under the names of the state dict; large ones are in
                            model-00001-of-00004.safetensors and so on, one a rank, with an index
    optimizer.safetensors   what the optimizer keeps, under "weight/what"; one a rank, too
    extra.safetensors       tensors of whatever else was given, such as states of generators
    state.json              all that is not tensors (see `hyperslab.checkpoint.state`)
    manifest.json           the SHA-256 of every file above; written last

What is read back is compared with what it should be.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from hyperslab.checkpoint import files, snapshot
from hyperslab.checkpoint.state import State, Tensors, check_fits, decode_value, fill, state_of
from hyperslab.checkpoint.tensors import SUFFIX, read_tensors, write_tensors
from hyperslab.comm import agreement, bootstrap
from hyperslab.errors import CheckpointError, reason
from hyperslab.util.atomic_files import partial_path


def read_state(path: Path, sums: files.Checksums, *, optimizer: bool) -> State:
    """Returns the weights, and if it is asked for and there what the optimizer keeps."""
    values = files.read_values(path)
    weights = _read_stem(path, sums, snapshot.MODEL_STEM)
    if not optimizer or values["optimizer"] is None:
        return State(values["model"], weights)
    kept = values["optimizer"]
    groups = kept.get("param_groups")
    if not isinstance(kept.get("state"), dict) or not isinstance(groups, list):
        raise files.damaged_state(path, "its optimizer has no groups")
    names = [g.get("params") if isinstance(g, dict) else None for g in groups]
    if not all(isinstance(n, list) and all(isinstance(one, str) for one in n) for n in names):
        raise files.damaged_state(path, "a group of its optimizer has no weights")
    if not {"other_state", "rest"} <= kept.keys():
        raise files.damaged_state(path, "its optimizer state is incomplete")
    moments = _read_stem(path, sums, snapshot.OPTIMIZER_STEM)
    return State(values["model"], weights, kept, moments)


def read_extra_values(path: Path, sums: files.Checksums) -> dict[str, Any]:
    """Read what was given besides; raises as `read_state`."""
    values = files.read_values(path)["extra"]
    beside = _read_stem(path, sums, snapshot.EXTRA_STEM)
    try:
        return {key: decode_value(value, beside) for key, value in values.items()}
    except (ValueError, RecursionError) as error:
        raise files.damaged_state(path, str(error)) from None


def _read_stem(path: Path, sums: files.Checksums, stem: str) -> Tensors:
    """Read all tensors of the files of one kind."""
    found: Tensors = {}
    for name in sorted(sums):
        if not (name.startswith((f"{stem}.", f"{stem}-")) and name.endswith(SUFFIX)):
            continue
        tensors = read_tensors(path / name)
        if twice := found.keys() & tensors.keys():
            raise CheckpointError(f"the checkpoint {path} has {min(twice)} twice")
        found |= tensors
    return found


LEAST_FREE_SPACE = 16 << 20
"""A disk with less space [B] than this is why a checkpoint could not be written."""

T = TypeVar("T")

RankPart = tuple[str, dict[str, str]]
"""Holds the digest of a rank's tensors, and the SHA-256 of its files by their names."""


def save(
    path: str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **extra: Any,
) -> None:
    """Write a checkpoint; every rank calls it. It loads on any other grid.

    Every rank writes its part into a hidden sibling folder; rank 0 adds ``extra`` (plain values and
    tensors, nested in any way) and the checksums, waits for the disk and gives the folder its name.
    So a checkpoint with its name is complete, and an earlier one of that name stays until then.

    Raises:
        CheckpointError: on every rank, if any cannot write, or the path holds something other than
            a checkpoint; an earlier checkpoint stays.
    """
    write_checkpoint(Path(path).absolute(), take_snapshot(model, optimizer, extra))


def load(
    path: str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Fill model and optimizer from a checkpoint; every rank calls it. Returns ``extra``.

    It runs no code that is in the checkpoint.

    Raises:
        CheckpointError: a file is missing or has changed, or the checkpoint belongs to another
            network; on every rank, and before anything is changed.
    """
    named = Path(path).absolute()

    def verify() -> tuple[Path, files.Checksums]:
        found = files.standing(named)
        return found, files.verify_checksums(found)

    path, sums = on_main(verify, f"cannot read the checkpoint {named}")

    def read() -> tuple[dict[str, Any], dict[str, Any]]:
        state = read_state(path, sums, optimizer=optimizer is not None)
        return vars(state), read_extra_values(path, sums)

    # The files are read once, and not by every rank.
    parts, extra = agreement.tensors_from_main(read)
    state = State(**parts)

    def put() -> dict[str, Any]:
        try:
            check_fits(state, model, optimizer)
            fill(state, model, optimizer)
        except (CheckpointError, ValueError, KeyError, TypeError, RuntimeError) as error:
            why = str(error) if isinstance(error, CheckpointError) else reason(error)
            raise CheckpointError(
                f"the checkpoint {path} does not fit this model: {why}"
            ) from error
        return extra

    return agreement.collective_try(put)


def take_snapshot(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: dict[str, Any],
    memory: snapshot.SnapshotMemory | None = None,
) -> snapshot.Snapshot | CheckpointError:
    """Take what this rank has to write, or why it cannot; waits for nobody. See `snapshot_of`."""
    try:
        state = state_of(model, optimizer)
        late: set[int] = set()
        if memory is not None and optimizer is not None:
            # What only its step changes: the weights that it trains, and what it keeps.
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            late = {tensor.data_ptr() for tensor in (*weights, *state.moments.values())}
        rank = bootstrap.own_rank()
        return snapshot.snapshot_of(
            state, extra, rank=rank, ranks=bootstrap.ranks_in(), memory=memory, late=late
        )
    except CheckpointError as error:
        return error
    except (ValueError, RecursionError, OSError, MemoryError) as error:
        return CheckpointError(reason(error))  # of what holds itself, or for want of memory


def on_main(make: Callable[[], T], failing: str, group: agreement.Group = None) -> T:
    """Gives all ranks what the main rank makes; its errors become a CheckpointError of all."""
    return agreement.broadcast_from_main(make, failing=failing, error=CheckpointError, group=group)


def write_checkpoint(
    path: Path, own: snapshot.Snapshot | CheckpointError, group: agreement.Group = None
) -> None:
    """Writes the parts of all ranks of ``group``, who all call it, and makes them a checkpoint."""
    partial = partial_path(path)
    failing = f"cannot write the checkpoint {path}"
    try:
        on_main(lambda: _prepare(partial, path), failing, group)
        parts = agreement.all_gather(_write_part(partial, own), group)
        on_main(lambda: _finish(partial, path, own, parts), failing, group)
    except CheckpointError as error:
        full = on_main(lambda: _fullness(partial), failing, group)
        if bootstrap.own_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        if full:
            raise CheckpointError(f"{error}\n    {full}") from error
        raise


def _write_part(partial: Path, own: snapshot.Snapshot | CheckpointError) -> RankPart | str:
    """Write this rank's files; returns why where that cannot be, for the others must hear of it."""
    if isinstance(own, CheckpointError):
        return str(own)
    try:
        sums = {name: write_tensors(partial / name, part) for name, part in own.files.items()}
        return own.digest, sums
    except OSError as error:
        return reason(error)


def _prepare(partial: Path, path: Path) -> None:
    """Make an empty folder to write into; what an interrupted run has put aside is back."""
    files.put_back(path)
    files.check_replaceable(path)
    files.remove(partial)
    partial.mkdir(parents=True)


def _finish(
    partial: Path,
    path: Path,
    own: snapshot.Snapshot | CheckpointError,
    parts: list[RankPart | str],
) -> None:
    """Complete the folder, make sure that it is on the disk, and give it its name."""
    failing = f"cannot write the checkpoint {path}"
    sums: dict[str, str] = {}
    for rank, part in enumerate(parts):
        if isinstance(part, str):
            raise CheckpointError(f"{failing}: {part} (rank {rank})")
        sums |= part[1]
    assert isinstance(own, snapshot.Snapshot)
    for rank, part in enumerate(parts):
        if part[0] != own.digest:
            raise CheckpointError(f"{failing}: rank {rank} has other tensors than rank 0")
    for name, data in ((files.STATE_FILE, own.state), (snapshot.INDEX_FILE, own.index)):
        if data:
            sums[name] = files.write_new(partial / name, [data])
    files.write_new(partial / files.MANIFEST, [files.manifest_text(sums)])
    files.sync(partial)
    files.put_in_place(partial, path)


def _fullness(path: Path) -> str:
    """Say that the disk below a path is full, while what was written is still there."""
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    return f"no space left on the disk ({free >> 20} MiB free)" if free < LEAST_FREE_SPACE else ""
