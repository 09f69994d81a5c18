"""Keeps boxes of samples on ranks, and plans which are sent to whom for a mini-batch.

`Store` holds boxes in memory and, beyond its budget, in a file of the node; `memory_budget` says
how much that may be: by default each rank's part of half of the free memory. `deal_samples`
says which replica keeps which sample, found by every rank alike, without a message. `BatchPlanner`
says what this rank keeps, sends and receives for each slot of a mini-batch. Without augmentation
a box only ever travels between ranks of the same position of two replicas. With it, a rank wants
the stored box that becomes its own one, from all ranks that keep parts of that. Where samples are
kept whole, each by one rank (`whole_samples`), that rank sends every other one its box.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hyperslab.comm import AXES, Grid, per_grid
from hyperslab.comm.agreement import all_gather, collective_try
from hyperslab.comm.grid import hosts_of_ranks
from hyperslab.data.sampler import IDENTITY, DrawSymmetry, Schedule, Symmetry
from hyperslab.errors import DataError, system_errors_as
from hyperslab.formats.source import Array, Source
from hyperslab.geometry import Box, Cut, Partition
from hyperslab.geometry.transfer import TransferPlan, plan_transfers
from hyperslab.util.free_memory import free_memory


class SampleBox(NamedTuple):
    """Holds a box of one sample: values in their storage type (C, d, h, w), and its target.

    That is the labels (d, h, w) uint8 where voxels have classes, else the numbers (P,) float64.
    """

    values: Array
    target: Array


class Store:
    """Keeps boxes of one shape by sample: the first ones in memory, the others in a mapped file.

    The file has no name: the system takes it away with the process, however that ends.
    """

    slack = mmap.PAGESIZE
    """The most that a box in the file may take beside its own bytes [B]."""

    def __init__(self, samples: Sequence[int], in_memory: int, size: int, staging: Path | None):
        """Makes room for samples of at most ``size`` [B]; without staging for the first ones."""
        self._kept: dict[int, SampleBox] = {}
        self._in_memory = frozenset(samples[:in_memory])
        staged = () if staging is None else samples[in_memory:]
        self._numbers = {sample: number for number, sample in enumerate(staged)}
        self._size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._file: mmap.mmap | None = None
        if staging is not None and self._numbers:
            self._file = _reserve(staging, self._size * len(self._numbers))
        self.bytes = 0  # in memory
        self.room = min(in_memory, len(samples)) * size  # what that may become

    def holds(self, sample: int) -> bool:
        """Tells if a sample is kept by now."""
        return sample in self._kept

    def has_room(self, sample: int) -> bool:
        """Tells if a sample will be kept once it is read."""
        return sample in self._numbers or sample in self._in_memory

    def keep(self, sample: int, read: Callable[[], SampleBox]) -> SampleBox:
        """Returns what is kept of a sample, first of all a copy of what ``read`` returns.

        A sample for which there is no room is read each time.
        """
        if sample not in self._kept:
            box = read()
            if sample in self._numbers:
                self._kept[sample] = self._write(self._numbers[sample] * self._size, box)
            elif sample in self._in_memory:
                kept = SampleBox(*(np.array(part, order="C") for part in box))
                self.bytes += sum(part.nbytes for part in kept)
                self._kept[sample] = kept
            else:
                return box
        return self._kept[sample]

    def close(self) -> None:
        """Let go of everything."""
        self._kept.clear()
        self._file = None
        self.bytes = self.room = 0

    def _write(self, offset: int, box: SampleBox) -> SampleBox:
        """Returns a copy in the file: the part of larger items first, so that both are aligned."""
        assert self._file is not None
        copies = {}
        for number in sorted((0, 1), key=lambda number: -box[number].itemsize):
            part = box[number]
            flat: Array = np.frombuffer(self._file, part.dtype, part.size, offset)
            copies[number] = flat.reshape(part.shape)
            copies[number][...] = part
            offset += part.nbytes
        return SampleBox(copies[0], copies[1])


def _reserve(folder: Path, size: int) -> mmap.mmap:
    """Maps a new file, all of whose bytes the disk has: a full one would end the process later."""
    what = f"staging folder {folder}: no room for {size / 2**20:.1f} MiB"
    remedy = "\n    give a folder on a local disk with more space, or no staging"
    with system_errors_as(DataError, what, named=False, then=remedy):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)


MEMORY_SHARE = 0.5
"""The share of free memory; the rest is for the network and for reading ahead."""

DISK_SHARE = 0.9
"""The share of the free space on the disk of the staging folder."""


def memory_budget(grid: Grid) -> int:
    """Computes what each rank's store may take [B]: its part of half of its machine's free memory.

    The least of all ranks, so that they all keep equally many samples. Every rank calls it. What
    the other stores on this grid will still fill is not free.
    """
    promised = sum(store.room - store.bytes for store in stores_in_use(grid))
    return _least_share(grid, free_memory(), MEMORY_SHARE, promised)


@per_grid
def stores_in_use(_grid: Grid) -> weakref.WeakSet[Store]:
    """Returns the stores that are in use on this rank."""
    return weakref.WeakSet()


def disk_budget(folder: Path, grid: Grid) -> int:
    """Computes the same for the disk on which ``folder`` is, or will be, on each machine [B]."""

    def free_disk() -> int:
        what = f"staging folder {folder}"
        with system_errors_as(DataError, what, named=False, then="; give another"):
            there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            return shutil.disk_usage(there).free

    return _least_share(grid, collective_try(free_disk), DISK_SHARE)


def _least_share(grid: Grid, machine: int, share: float, promised: int = 0) -> int:
    """Returns the smallest share of a rank, where the ranks of a machine share what it has."""
    hosts = hosts_of_ranks(grid)
    own = int(share * (machine // hosts.count(hosts[grid.rank]) - promised))
    return min(all_gather(max(0, own)))


def consumers(count: int, replicas: int) -> list[tuple[int, ...]]:
    """Lists the replicas that compute each slot of a mini-batch of ``count`` samples.

    One of them, as `Grid.partition` cuts the batch; all of them where there are fewer samples than
    replicas.

    >>> consumers(3, 2)
    [(0,), (0,), (1,)]
    >>> consumers(1, 2)
    [(0, 1)]
    """
    cut = Cut.balanced("data", count, replicas)
    if cut.thin:
        return [tuple(range(replicas))] * count
    return [(i,) for i, (lo, hi) in enumerate(cut.intervals) for _ in range(lo, hi)]


def deal_samples(schedule: Schedule, replicas: int, capacity: int) -> list[list[int]]:
    """Lists the samples that each replica keeps, at most ``capacity``, in the order it gets them.

    A sample goes to the replica that computes it in epoch 0 and would read it then anyway (if
    all do, to the emptiest); where that one is full, to the emptiest one that is not. What is
    shown again is kept already. A sample that none keeps is read again each time by the replica
    that computes it.
    """
    kept: list[list[int]] = [[] for _ in range(replicas)]
    dealt: set[int] = set()
    for batch in schedule.batches(0):
        for sample, first in zip(batch, consumers(len(batch), replicas), strict=True):
            if sample in dealt:
                continue
            dealt.add(sample)
            wanted = min(first, key=lambda replica: len(kept[replica]))
            if len(kept[wanted]) >= capacity:
                wanted = min(range(replicas), key=lambda replica: len(kept[replica]))
            if len(kept[wanted]) < capacity:
                kept[wanted].append(sample)
    return kept


def whole_samples(kept: Sequence[Sequence[int]], boxes: BoxMap) -> list[list[int]]:
    """Deals the samples of each replica to its ranks by turns, of which each keeps them whole.

    So a mini-batch is read by as many ranks as it has samples, whatever the cut of a sample
    (Oyama et al. 2020, figure 5).
    """
    found: list[list[int]] = [[] for _ in range(boxes.grid.size)]
    for replica, part in enumerate(kept):
        for sample, rank in zip(part, itertools.cycle(boxes.ranks(replica))):
            found[rank].append(sample)
    return found


PLANS_KEPT = 4096
"""Transfers that are remembered, of pairs of replicas and of symmetries."""


@dataclass(frozen=True)
class BoxMap:
    """The box (C, d, h, w) that each rank of ``grid`` holds of every sample of ``shape``."""

    grid: Grid
    shape: tuple[int, ...]

    @functools.cached_property
    def own(self) -> Box:
        """Returns the box of this rank."""
        return self.of(self.grid.rank)

    @functools.cached_property
    def whole(self) -> Box:
        """Returns the box of all of a sample."""
        return Box.whole(self.shape)

    @functools.cached_property
    def _partition(self) -> Partition:
        return self.grid.partition((self.grid.data, *self.shape))

    def of(self, rank: int) -> Box:
        """Returns a rank's box, which is that of the same position in other replicas."""
        box = self._partition.box(self.grid.coords_of(rank))
        return Box(box.lo[1:], box.hi[1:])

    def ranks(self, replica: int) -> Iterator[int]:
        """Yields the ranks of a replica, one for each position."""
        grid = self.grid
        for position in itertools.product(*(range(grid.extents[axis]) for axis in AXES[1:])):
            coords = dict(zip(AXES[1:], position, strict=True))
            yield grid.rank_of({"data": replica, **coords})

    def peer(self, replica: int) -> int:
        """Returns the rank of a replica at this rank's position."""
        return self.grid.rank_of({**self.grid.coords, "data": replica})


class SampleBoxes:
    """Holds the `BoxMap` of each sample of a source, ``maps``, and of every shape, ``by_shape``."""

    def __init__(self, grid: Grid, source: Source) -> None:
        self.grid = grid
        distinct = {tuple(shape) for shape in source.shapes or [source.shape]}
        self.by_shape = {shape: BoxMap(grid, shape) for shape in distinct}
        shapes = source.shapes or [source.shape] * len(source.names)
        self.maps = [self.by_shape[tuple(shape)] for shape in shapes]

    @property
    def largest(self) -> Box:
        """Returns a box of the most voxels that a rank holds of a sample."""
        found = (boxes.of(rank) for boxes in self.by_shape.values() for rank in boxes.ranks(0))
        return max(found, key=lambda box: box.size)


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Plans what this rank does for one slot of a mini-batch."""

    slot: int
    sample: int
    augmentation: Symmetry
    keeps: bool  # this rank keeps its own box, or the whole sample, which it reads once
    reads: bool  # nobody keeps the sample, so that the wanted box is read now
    transfer: TransferPlan  # of boxes as stored; wanted is None where another replica computes it


class BatchPlanner:
    """Plans mini-batches for one rank; ``owner`` is the replica that keeps a sample, if one does.

    With ``whole`` it is the rank that keeps all of it. Every rank plans its own part of the same
    exchange, without a message.
    """

    def __init__(
        self,
        boxes: SampleBoxes,
        owner: Mapping[int, int],
        draw: DrawSymmetry | None,
        *,
        whole: bool = False,
    ) -> None:
        self.boxes = boxes
        self.owner = owner
        self.draw = draw
        self.whole = whole
        self._replica = boxes.grid.coords["data"]
        self._me = boxes.grid.rank if whole else self._replica
        self._transfer = functools.lru_cache(PLANS_KEPT)(self._plan)

    def keeps(self, sample: int) -> bool:
        """Tells if this rank keeps its box of a sample, or all of it."""
        return self.owner.get(sample) == self._me

    def kept_box(self, sample: int) -> Box:
        """Returns what this rank keeps of a sample that it keeps."""
        boxes = self.boxes.maps[sample]
        return boxes.whole if self.whole else boxes.own

    def plan(self, turn: int, samples: Sequence[int]) -> list[SlotPlan]:
        """Lists the slots of a mini-batch, of pass ``turn``, for which this rank has work."""
        plans = []
        computed = consumers(len(samples), self.boxes.grid.data)
        for slot, (sample, replicas) in enumerate(zip(samples, computed, strict=True)):
            owner = self.owner.get(sample)
            keeps = owner == self._me
            if not keeps and self._replica not in replicas:
                continue
            shape = self.boxes.maps[sample].shape
            augmentation = IDENTITY if self.draw is None else self.draw(shape, turn, sample)
            transfer = self._transfer(shape, owner, replicas, augmentation)
            plans.append(SlotPlan(slot, sample, augmentation, keeps, owner is None, transfer))
        return plans

    def _plan(
        self,
        shape: tuple[int, ...],
        owner: int | None,
        replicas: tuple[int, ...],
        augmentation: Symmetry,
    ) -> TransferPlan:
        """Plans the way from the ranks that own a sample of ``shape`` to those that compute it.

        Only the ranks are named of which this one may hear: where it owns nothing nobody asks it,
        and where it computes nothing nobody sends to it.
        """
        boxes = self.boxes.by_shape[shape]
        rank = boxes.grid.rank
        computes = self._replica in replicas
        asking = [rank] if computes else []
        if owner == self._me:
            asking += [r for other in replicas for r in self._partners(boxes, other, augmentation)]
        wanted = {peer: boxes.of(peer) for peer in asking}
        if augmentation != IDENTITY:
            wanted = {peer: augmentation.stored(box, shape) for peer, box in wanted.items()}
        if owner is None:
            return plan_transfers(rank, {}, wanted)
        if self.whole:
            return plan_transfers(rank, {owner: boxes.whole}, wanted)
        owners = self._partners(boxes, owner, augmentation) if computes else [rank]
        return plan_transfers(rank, {peer: boxes.of(peer) for peer in owners}, wanted)

    def _partners(self, boxes: BoxMap, replica: int, augmentation: Symmetry) -> Iterable[int]:
        """List the ranks of a replica that may have, or want, a part of what this rank keeps."""
        straight = augmentation == IDENTITY and not self.whole
        return [boxes.peer(replica)] if straight else boxes.ranks(replica)
