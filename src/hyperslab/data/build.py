"""What the store keeps on this grid, within its budget; and the `Supply` that follows."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from hyperslab.comm import Grid
from hyperslab.comm.agreement import together
from hyperslab.data.batch import Places
from hyperslab.data.batch_assembler import Supply
from hyperslab.data.reader import Reader
from hyperslab.data.sampler import Schedule
from hyperslab.data.skip import Skipped
from hyperslab.data.store.boxes import Store
from hyperslab.data.store.budget import disk_budget, memory_budget, stores
from hyperslab.data.store.ownership import Owners
from hyperslab.data.store.transport import Courier
from hyperslab.data.transforms import Transform
from hyperslab.formats.source import Source

Mode = Literal["direct", "store", "preload"]

log = logging.getLogger("hyperslab")


@dataclass(frozen=True, slots=True)
class Keeping:
    """How much is kept: see `hyperslab.open`."""

    mode: Mode = "direct"
    budget: int | None = None
    staging: Path | None = None


def supply_of(
    source: Source,
    grid: Grid,
    schedule: Schedule,
    *,
    transform: Transform,
    augment: bool,
    dtype: torch.dtype,
    keeping: Keeping,
    skip: bool,
) -> Supply:
    """The blocks of a data set; every rank calls it. With ``"preload"`` the store is filled.

    Raises:
        DataError: the staging folder is no good, or a file cannot be read.
    """
    places = Places(source, grid)
    owners, in_memory = _owners(places, schedule, keeping)
    mine = owners.kept[grid.coords["data"]]
    store = _store(places, mine, in_memory, keeping.staging)
    travels = keeping.mode != "direct" and (grid.data > 1 or augment)
    courier = Courier(grid) if grid.size > 1 and (travels or skip) else None
    supply = Supply(
        Reader(source, transform),
        places,
        schedule,
        augment=augment,
        dtype=torch.promote_types(dtype, torch.float32),
        owners=owners,
        store=store,
        room=min(owners.most, in_memory) * places.sample_bytes,
        courier=courier,
        skipped=Skipped(source, courier) if skip else None,
    )
    if keeping.mode == "preload":
        _preload(supply)
    return supply


def _owners(places: Places, schedule: Schedule, keeping: Keeping) -> tuple[Owners, int]:
    """Who keeps what, and how many samples each rank keeps in memory at most."""
    grid, size = places.grid, places.sample_bytes
    if keeping.mode == "direct":
        return Owners(((),) * grid.data), 0
    budget = memory_budget(grid) if keeping.budget is None else keeping.budget
    in_memory = capacity = budget // size
    if keeping.staging is not None:
        capacity += disk_budget(keeping.staging, grid) // (size + Store.slack)
    owners = Owners.deal(schedule, grid.data, capacity)
    grid.notice(_words(owners, len(schedule.samples), in_memory, size, budget))
    return owners, in_memory


def _store(places: Places, mine: Sequence[int], in_memory: int, staging: Path | None) -> Store:
    def make() -> Store:
        return Store(mine, in_memory, places.sample_bytes, staging)

    store = make() if staging is None else together(places.grid, make)
    stores(places.grid).add(store)
    return store


def _words(owners: Owners, count: int, in_memory: int, size: int, budget: int) -> str:
    kept = sum(map(len, owners.kept))
    memory = sum(min(len(part), in_memory) for part in owners.kept)
    most = min(owners.most, in_memory)
    words = f"the store keeps {memory} of {count} samples in memory, {_gib(most * size)} a rank"
    if kept > memory:
        words += f", and {kept - memory} on disk, {_gib((owners.most - most) * size)} a rank"
    if count > kept:
        words += (
            f"; {count - kept} do not fit into the budget of {_gib(budget)} a rank and are read "
            "again in each epoch"
        )
    return words


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.2f} MiB"


def _preload(supply: Supply) -> None:
    begin = time.perf_counter()
    together(supply.places.grid, supply.fill)
    seconds = time.perf_counter() - begin
    grid, size = supply.places.grid, supply.reader.bytes_read
    grid.notice(f"the store was filled: {_gib(size)} a rank in {seconds:.1f} s")
