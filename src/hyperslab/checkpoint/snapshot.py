"""Copies what one rank writes of a checkpoint: its share of the tensors, and on rank 0 the rest.

All ranks have the same state, so each writes a part of it, whole tensors, and together they
write each one once. Which rank writes which follows from names and sizes alone: nobody has to
ask.

`SnapshotMemory` is host memory, taken once and used again for every checkpoint. Small tensors,
and all that others than the optimizer may change, such as running statistics, are copied at
once. What only a step of the optimizer changes has time until the next one: a thread copies it
during the forward and backward pass, and the optimizer waits for that, as a validation does that
puts averages in place of the weights. A device copies in the order of its work, so there nobody
waits.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch

from hyperslab.checkpoint.files import STATE_LIMIT
from hyperslab.checkpoint.state import State, Tensors, encode_value
from hyperslab.checkpoint.tensors import SUFFIX, check_storable
from hyperslab.errors import CheckpointError
from hyperslab.util.documents import check_json_memory
from hyperslab.util.page_locked import fresh_memory, page_locked
from hyperslab.util.torch_internals import version_of

TENSOR_ALIGNMENT = 64
"""A tensor in it begins at a multiple of this [B]."""

SMALLEST_LATE = 256 << 10
"""The smallest tensor [B] that is copied by the thread."""

LateCopy = tuple[torch.Tensor, torch.Tensor, int]
"""Holds where to, of what, and how often that was changed so far."""


class SnapshotMemory:
    """Keeps as many bytes as this rank's share of the state had at most.

    What it held before is gone with the next `hold`. ``copied`` says that all is there.
    """

    def __init__(self) -> None:
        self.copied = threading.Event()
        self.copied.set()
        self._room = torch.empty(0, dtype=torch.uint8)
        self._on_device: torch.cuda.Event | None = None
        self._late: list[LateCopy] = []

    @property
    def nbytes(self) -> int:
        """Return how much it is [B]."""
        return self._room.nbytes

    def hold(self, files: dict[str, Tensors], late: Set[int]) -> dict[str, Tensors]:
        """Return where the copies are, or will be after `finish`.

        ``late``: addresses of what only the optimizer changes; it has to wait for ``copied``.
        """
        tensors = [tensor for part in files.values() for tensor in part.values()]
        cuda = any(tensor.is_cuda for tensor in tensors)
        size = sum(map(_padded, tensors))
        if size > self.nbytes:
            self._room = torch.empty(0, dtype=torch.uint8)  # not both at a time
            if cuda:  # so that the device copies asynchronously
                self._room = page_locked(size)
            else:
                self._room = torch.frombuffer(fresh_memory(size), dtype=torch.uint8)
        places = self._places(tensors, late)
        copies = {name: {key: next(places) for key in part} for name, part in files.items()}
        if self._late:
            self.copied.clear()
        if cuda:
            self._on_device = torch.cuda.Event()
            self._on_device.record()
        return copies

    def finish(self) -> None:
        """Copies the rest, and waits for a device's copies; the thread that reads them calls it.

        If something else than the optimizer has changed a weight meanwhile, the copy is refused.
        """
        late, self._late = self._late, []
        try:
            for place, tensor, _ in late:
                place.copy_(tensor)
            if any(version_of(tensor) != version for _, tensor, version in late):
                raise CheckpointError(
                    "weights were changed while they were copied, and not by optimizer.step()\n"
                    "    write checkpoints before the run goes on: checkpoint.background=false"
                )
        finally:
            self.copied.set()
        if self._on_device is not None:
            self._on_device.synchronize()
            self._on_device = None

    def _places(self, tensors: list[torch.Tensor], late: Set[int]) -> Iterator[torch.Tensor]:
        """Place first what is copied at once: it touches as little fresh memory as can be."""
        at_once = 0
        later = sum(_padded(tensor) for tensor in tensors if not _is_late(tensor, late))
        for tensor in tensors:
            waits = _is_late(tensor, late)
            begin = later if waits else at_once
            flat = self._room[begin : begin + tensor.nbytes].view(tensor.dtype)
            place = flat.view(tensor.shape)
            if waits:
                self._late.append((place, tensor, version_of(tensor)))
                later += _padded(tensor)
            else:
                place.copy_(tensor, non_blocking=True)
                at_once += _padded(tensor)
            yield place


def _is_late(tensor: torch.Tensor, late: Set[int]) -> bool:
    return tensor.nbytes >= SMALLEST_LATE and not tensor.is_cuda and tensor.data_ptr() in late


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT


MODEL_STEM = "model"
OPTIMIZER_STEM = "optimizer"
EXTRA_STEM = "extra"

INDEX_FILE = "model.safetensors.index.json"
"""Names the file that says which of several has which weight, as Hugging Face has it."""

MOST_IN_ONE_FILE = 256 << 20
"""Weights of at most so many bytes are one file, easy to take along; more are shared."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Holds what one rank writes."""

    files: dict[str, Tensors]  # by their names
    state: bytes  # of the main rank, as is the index
    index: bytes
    digest: str  # of the names and sizes of all tensors: equal where the ranks have one state


def snapshot_of(
    state: State,
    extra: dict[str, Any],
    *,
    rank: int,
    ranks: int,
    memory: SnapshotMemory | None = None,
    late: Set[int] = frozenset(),
) -> Snapshot:
    """Returns this rank's part of a state, and on the main rank, 0, a storable ``extra``, too.

    With ``memory`` its tensors are copied there, so that the state may change meanwhile; see
    `SnapshotMemory.hold` for ``late``.
    """
    tensors = {MODEL_STEM: state.weights, OPTIMIZER_STEM: state.moments}
    owners = _assign_owners(tensors, ranks)
    names = _file_names(owners)
    files: dict[str, Tensors] = {}
    for (stem, name), owner in owners.items():
        if owner == rank:
            files.setdefault(names[stem, owner], {})[name] = tensors[stem][name]
    values: dict[str, Any] = {}
    if rank == 0:
        beside: Tensors = {}
        values = {
            key: encode_value(value, key, beside, _check_extra_tensor)
            for key, value in extra.items()
        }
        if beside:
            files[EXTRA_STEM + SUFFIX] = beside
    if memory is None:
        held = {name: {key: t.cpu() for key, t in part.items()} for name, part in files.items()}
    else:
        held = memory.hold(files, late)
    return Snapshot(
        held,
        _encode_json({"model": state.model, "optimizer": state.optimizer, "extra": values}),
        _index(owners, names, tensors[MODEL_STEM]),
        _digest(tensors),
    )


def _assign_owners(tensors: dict[str, Tensors], ranks: int) -> dict[tuple[str, str], int]:
    """Assign the largest first, each to the rank that has least: about as many bytes to each.

    Weights of less than `MOST_IN_ONE_FILE` are all the main rank's.
    """
    load = [0] * ranks
    owners: dict[tuple[str, str], int] = {}
    weights = sum(weight.nbytes for weight in tensors[MODEL_STEM].values())
    if weights <= MOST_IN_ONE_FILE:
        load[0] = weights
        owners |= {(MODEL_STEM, name): 0 for name in tensors[MODEL_STEM]}
    sizes = [(part[name].nbytes, stem, name) for stem, part in tensors.items() for name in part]
    sizes = [one for one in sizes if one[1:] not in owners]
    for size, stem, name in sorted(sizes, key=lambda one: (-one[0], one[1:])):
        rank = min(range(ranks), key=load.__getitem__)
        owners[stem, name] = rank
        load[rank] += size
    return owners


def _file_names(owners: dict[tuple[str, str], int]) -> dict[tuple[str, int], str]:
    """Name files by stem and rank: ``model-00001-of-00003.safetensors`` of three ranks."""
    names: dict[tuple[str, int], str] = {}
    for stem in (MODEL_STEM, OPTIMIZER_STEM):
        ranks = sorted({rank for (of, _), rank in owners.items() if of == stem})
        for number, rank in enumerate(ranks, 1):
            part = f"-{number:05d}-of-{len(ranks):05d}" if len(ranks) > 1 else ""
            names[stem, rank] = f"{stem}{part}{SUFFIX}"
    return names


def _index(
    owners: dict[tuple[str, str], int], names: dict[tuple[str, int], str], weights: Tensors
) -> bytes:
    found = {name: names[stem, rank] for (stem, name), rank in owners.items() if stem == MODEL_STEM}
    if len({*found.values()}) < 2:
        return b""
    size = sum(weight.nbytes for weight in weights.values())
    content = {"metadata": {"total_size": size}, "weight_map": found}
    return json.dumps(content, indent=1, sort_keys=True).encode()


def _digest(tensors: dict[str, Tensors]) -> str:
    told = [
        (stem, name, str(tensor.dtype), list(tensor.shape))
        for stem, part in tensors.items()
        for name, tensor in sorted(part.items())
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _encode_json(values: dict[str, Any]) -> bytes:
    text = json.dumps(values, indent=1, allow_nan=False).encode()
    if len(text) > STATE_LIMIT:
        raise CheckpointError(
            f"values that are not tensors take {len(text) >> 20} MiB, more than "
            f"{STATE_LIMIT >> 20}\n"
            "    give large tables as tensors"
        )
    try:
        check_json_memory(text)  # else it could not be loaded
    except ValueError as error:
        raise CheckpointError(
            f"values that are not tensors: {error}\n    give large tables as tensors"
        ) from None
    return text


def _check_extra_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of ``extra`` if it is whole: the main rank alone has it and cannot gather."""
    if hasattr(tensor, "full_tensor"):
        raise CheckpointError("a tensor that is cut over ranks cannot be an extra value: gather it")
    check_storable("of the extra values", tensor)
    return tensor.detach()
