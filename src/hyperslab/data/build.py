"""Wires the pipeline: what the store keeps on this grid, and the `BatchAssembler` that follows."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from hyperslab.comm import Grid, log_once
from hyperslab.comm.agreement import collective_try
from hyperslab.comm.host_p2p import HostP2P
from hyperslab.data.assemble import BatchAllocator, BatchAssembler, Reader, Skipped, target_kind
from hyperslab.data.augment import Augmenter
from hyperslab.data.sampler import Schedule
from hyperslab.data.store import (
    BatchPlanner,
    Ownership,
    SampleBoxes,
    Store,
    disk_budget,
    largest_box,
    memory_budget,
    stores_in_use,
)
from hyperslab.data.transforms import Transform
from hyperslab.errors import DataError, LayoutError
from hyperslab.formats.source import Source

Mode = Literal["direct", "store", "preload"]


@dataclass(frozen=True, slots=True)
class StorePolicy:
    """Which boxes a rank keeps.

    ``mode``: ``"direct"`` reads every box when it is its turn. ``"store"`` keeps what was read in
    memory, so that after epoch 0 nothing is read again; the ranks send each other what they keep.
    ``"preload"`` fills the store before the first step. ``budget``: what each rank's store may
    take of its memory [B]; by default its part of half of what is free. What does not fit is read
    again in each epoch. ``staging``: a folder on a disk of the node for what does not fit.

    Raises:
        DataError: no such mode, a negative budget, or a budget or staging without a store.
    """

    mode: Mode = "store"
    budget: int | None = None
    staging: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise DataError(f"mode={self.mode!r}: choose from {', '.join(get_args(Mode))}")
        if self.budget is not None and self.budget < 0:
            raise DataError(f"budget={self.budget}: needs to be >= 0")
        if self.mode == "direct" and (self.budget is not None or self.staging is not None):
            raise DataError('budget and staging are of the store: say mode="store" or "preload"')

    @property
    def folder(self) -> Path | None:
        """The staging folder."""
        return None if self.staging is None else Path(self.staging)


def build_assembler(
    source: Source,
    grid: Grid,
    schedule: Schedule,
    *,
    transform: Transform,
    augment: bool,
    policy: StorePolicy,
    skip: bool,
) -> BatchAssembler:
    """What assembles the mini-batches of a data set; every rank calls it.

    With ``"preload"`` the store is filled.

    Raises:
        DataError: the staging folder is no good, or a file cannot be read.
    """
    kind = target_kind(source)
    boxes = SampleBoxes(grid, source)
    size = sample_bytes(source, grid)
    ownership, in_memory = _ownership(grid, schedule, policy, size)
    mine = ownership.kept[grid.coords["data"]]
    store = _store(mine, in_memory, size, policy.folder)
    stores_in_use(grid).add(store)
    travels = policy.mode != "direct" and (grid.data > 1 or augment)
    transport = HostP2P(grid) if grid.size > 1 and (travels or skip) else None
    augmenter = Augmenter(schedule.seed, turns=not source.classes)
    assembler = BatchAssembler(
        schedule,
        BatchPlanner(boxes, ownership.replica, augmenter if augment else None),
        Reader(source, transform),
        kind=kind,
        allocator=BatchAllocator(source, boxes, kind),
        store=store,
        store_room=min(ownership.most, in_memory) * size,
        transport=transport,
        skipped=Skipped(source, transport) if skip else None,
    )
    if policy.mode == "preload":
        _preload(assembler, grid)
    return assembler


def check_cut(source: Source, grid: Grid, batch_size: int) -> None:
    """Fail now and not in the background.

    Raises:
        DataError: mini-batches of several volumes that differ in shape.
        LayoutError: a volume has fewer voxels along a side than the grid has ranks.
    """
    if source.shapes and batch_size > 1:
        odd = next(i for i, shape in enumerate(source.shapes) if shape != source.shapes[0])
        raise DataError(
            f"{source.where(odd)}: has {_extents(source.shapes[odd])} voxels but "
            f"{source.where(0)} has {_extents(source.shapes[0])}, and the volumes of a mini-batch "
            f"have one shape, but {batch_size=}\n"
            "    use batch_size 1 (data.batch_size=1, and optimizer.accumulate=N for N a step), or "
            "bring them to one shape: hyperslab convert lits"
        )
    seen = set()
    for sample in range(len(source.shapes) or 1):
        shape = tuple(source.shape_of(sample))
        if shape in seen:
            continue
        seen.add(shape)
        try:
            grid.partition((batch_size, *shape))
        except LayoutError as error:
            raise LayoutError(f"{source.where(sample)}: {error}") from error


def _extents(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape[1:]))


def sample_bytes(source: Source, grid: Grid) -> int:
    """Of one sample the most that a rank holds, its target included [B]."""
    kind = target_kind(source)
    box = largest_box(grid, source)
    values = box.size * np.dtype(source.dtype).itemsize
    return values + math.prod(kind.shape(box.shape[1:])) * kind.dtype.itemsize


def batch_bytes(source: Source, grid: Grid, count: int) -> int:
    """Of a mini-batch of ``count`` samples the most that a rank holds [B]."""
    replicas = 1 if count < grid.data else grid.data
    return -(-count // replicas) * sample_bytes(source, grid)


def _ownership(
    grid: Grid, schedule: Schedule, policy: StorePolicy, size: int
) -> tuple[Ownership, int]:
    """Who keeps what, and how many samples each rank keeps in memory at most."""
    if policy.mode == "direct":
        return Ownership(((),) * grid.data), 0
    budget = memory_budget(grid) if policy.budget is None else policy.budget
    in_memory = budget // size
    capacity = in_memory
    if policy.folder is not None:
        capacity += disk_budget(policy.folder, grid) // (size + Store.slack)
    ownership = Ownership.deal(schedule, grid.data, capacity)
    log_once(grid, _words(ownership, len(schedule.samples), in_memory, size, budget))
    return ownership, in_memory


def _store(mine: Sequence[int], in_memory: int, size: int, staging: Path | None) -> Store:
    def make() -> Store:
        return Store(mine, in_memory, size, staging)

    return make() if staging is None else collective_try(make)


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


def _preload(assembler: BatchAssembler, grid: Grid) -> None:
    begin = time.perf_counter()
    collective_try(assembler.fill)
    seconds = time.perf_counter() - begin
    read = _gib(assembler.reader.bytes_read)
    log_once(grid, f"the store was filled: {read} a rank in {seconds:.1f} s")
