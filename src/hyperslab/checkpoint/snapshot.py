"""What one rank writes of a checkpoint: its share of the tensors, and on the main rank the rest.

All ranks have the same state, so each writes a part of it, whole tensors, and together they write
each one once. Which rank writes which follows from names and sizes alone: nobody has to ask.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch

from hyperslab.checkpoint.safetensors_file import SUFFIX, check_storable
from hyperslab.checkpoint.snapshot_memory import SnapshotMemory
from hyperslab.checkpoint.state import State
from hyperslab.checkpoint.values import Tensors, encode_value
from hyperslab.errors import CheckpointError

MODEL_STEM = "model"
OPTIMIZER_STEM = "optimizer"
EXTRA_STEM = "extra"

INDEX = "model.safetensors.index.json"
"""Which of several files has which weight, as readers of Hugging Face look it up."""

ONE_FILE = 256 << 20
"""So many bytes of weights are one file, for whoever takes a network along; more are shared."""

STATE_LIMIT = 64 << 20
"""Of what is not tensors [B]: reading it must not take the memory of a machine."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``files`` are this rank's, by their names; ``state`` and ``index`` are the main rank's.

    ``digest`` is of the names and sizes of all tensors: equal where the ranks have one state.
    """

    files: dict[str, Tensors]
    state: bytes
    index: bytes
    digest: str


def snapshot_of(
    state: State,
    extra: dict[str, Any],
    *,
    rank: int,
    ranks: int,
    memory: SnapshotMemory | None = None,
    late: Set[int] = frozenset(),
) -> Snapshot:
    """This rank's part of a state, and on the main rank, 0, ``extra`` too.

    With ``memory`` its tensors are copied there, so that the state may change meanwhile; see
    `SnapshotMemory.hold` for ``late``.

    Raises:
        CheckpointError: something in ``extra`` cannot be stored.
    """
    tensors = {MODEL_STEM: state.weights, OPTIMIZER_STEM: state.moments}
    owners = _owners(tensors, ranks)
    names = _file_names(owners)
    files: dict[str, Tensors] = {}
    for (stem, name), owner in owners.items():
        if owner == rank:
            files.setdefault(names[stem, owner], {})[name] = tensors[stem][name]
    values: dict[str, Any] = {}
    if rank == 0:
        beside: Tensors = {}
        values = {key: encode_value(value, key, beside, _plain) for key, value in extra.items()}
        if beside:
            files[EXTRA_STEM + SUFFIX] = beside
    return Snapshot(
        _on_host(files) if memory is None else memory.hold(files, late),
        _json({"model": state.model, "optimizer": state.optimizer, "extra": values}),
        _index(owners, names, tensors[MODEL_STEM]),
        _digest(tensors),
    )


def _owners(tensors: dict[str, Tensors], ranks: int) -> dict[tuple[str, str], int]:
    """The largest first, each to the rank that has least: about as many bytes for everybody.

    Weights of less than `ONE_FILE` are all the main rank's.
    """
    load = [0] * ranks
    owners: dict[tuple[str, str], int] = {}
    weights = sum(weight.nbytes for weight in tensors[MODEL_STEM].values())
    if weights <= ONE_FILE:
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
    """By stem and rank; ``model-00001-of-00003.safetensors`` where three ranks have weights."""
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


def _json(values: dict[str, Any]) -> bytes:
    text = json.dumps(values, indent=1, allow_nan=False).encode()
    if len(text) > STATE_LIMIT:
        raise CheckpointError(
            f"what is not tensors takes {len(text) >> 20} MiB, more than {STATE_LIMIT >> 20}\n"
            "    give large tables as tensors"
        )
    return text


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """One of ``extra``: only the main rank has it, so it cannot be gathered."""
    if hasattr(tensor, "full_tensor"):
        raise CheckpointError("a tensor that is cut over ranks is no extra value: gather it")
    check_storable("of the extra values", tensor)
    return tensor.detach()


def _on_host(files: dict[str, Tensors]) -> dict[str, Tensors]:
    return {
        name: {key: tensor.cpu() for key, tensor in part.items()} for name, part in files.items()
    }
