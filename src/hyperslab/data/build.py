"""What the store keeps on this grid, within its budget; and the `BatchAssembler` that follows."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from hyperslab.comm import Grid
from hyperslab.comm.agreement import all_or_raise
from hyperslab.data.batch import BoxMap
from hyperslab.data.batch_assembler import BatchAssembler
from hyperslab.data.reader import Reader
from hyperslab.data.sampler import Schedule
from hyperslab.data.skip import Skipped
from hyperslab.data.store.boxes import Store
from hyperslab.data.store.budget import disk_budget, memory_budget, stores
from hyperslab.data.store.ownership import Ownership
from hyperslab.data.store.transport import BoxTransport
from hyperslab.data.transforms import Transform
from hyperslab.formats.source import Source

Mode = Literal["direct", "store", "preload"]

log = logging.getLogger("hyperslab")


@dataclass(frozen=True, slots=True)
class StorePolicy:
    """How much is kept: see `hyperslab.open`."""

    mode: Mode = "direct"
    budget: int | None = None
    staging: Path | None = None


def build_assembler(
    source: Source,
    grid: Grid,
    schedule: Schedule,
    *,
    transform: Transform,
    augment: bool,
    dtype: torch.dtype,
    policy: StorePolicy,
    skip: bool,
) -> BatchAssembler:
    """The blocks of a data set; every rank calls it. With ``"preload"`` the store is filled.

    Raises:
        DataError: the staging folder is no good, or a file cannot be read.
    """
    boxes = BoxMap(source, grid)
    ownership, in_memory = _ownership(boxes, schedule, policy)
    mine = ownership.kept[grid.coords["data"]]
    store = _store(boxes, mine, in_memory, policy.staging)
    travels = policy.mode != "direct" and (grid.data > 1 or augment)
    transport = BoxTransport(grid) if grid.size > 1 and (travels or skip) else None
    assembler = BatchAssembler(
        Reader(source, transform),
        boxes,
        schedule,
        augment=augment,
        dtype=torch.promote_types(dtype, torch.float32),
        ownership=ownership,
        store=store,
        room=min(ownership.most, in_memory) * boxes.sample_bytes,
        transport=transport,
        skipped=Skipped(source, transport) if skip else None,
    )
    if policy.mode == "preload":
        _preload(assembler)
    return assembler


def _ownership(boxes: BoxMap, schedule: Schedule, policy: StorePolicy) -> tuple[Ownership, int]:
    """Who keeps what, and how many samples each rank keeps in memory at most."""
    grid, size = boxes.grid, boxes.sample_bytes
    if policy.mode == "direct":
        return Ownership(((),) * grid.data), 0
    budget = memory_budget(grid) if policy.budget is None else policy.budget
    in_memory = capacity = budget // size
    if policy.staging is not None:
        capacity += disk_budget(policy.staging, grid) // (size + Store.slack)
    ownership = Ownership.deal(schedule, grid.data, capacity)
    grid.notice(_words(ownership, len(schedule.samples), in_memory, size, budget))
    return ownership, in_memory


def _store(boxes: BoxMap, mine: Sequence[int], in_memory: int, staging: Path | None) -> Store:
    def make() -> Store:
        return Store(mine, in_memory, boxes.sample_bytes, staging)

    store = make() if staging is None else all_or_raise(make)
    stores(boxes.grid).add(store)
    return store


def _words(ownership: Ownership, count: int, in_memory: int, size: int, budget: int) -> str:
    kept = sum(map(len, ownership.kept))
    memory = sum(min(len(part), in_memory) for part in ownership.kept)
    most = min(ownership.most, in_memory)
    words = f"the store keeps {memory} of {count} samples in memory, {_gib(most * size)} a rank"
    if kept > memory:
        words += f", and {kept - memory} on disk, {_gib((ownership.most - most) * size)} a rank"
    if count > kept:
        words += (
            f"; {count - kept} do not fit into the budget of {_gib(budget)} a rank and are read "
            "again in each epoch"
        )
    return words


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.2f} MiB"


def _preload(assembler: BatchAssembler) -> None:
    begin = time.perf_counter()
    all_or_raise(assembler.fill)
    seconds = time.perf_counter() - begin
    grid, size = assembler.boxes.grid, assembler.reader.bytes_read
    grid.notice(f"the store was filled: {_gib(size)} a rank in {seconds:.1f} s")
