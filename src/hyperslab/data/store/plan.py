"""The plan of a mini-batch: whose box lies where, and what this rank does for each slot.

Without augmentation a box only ever travels between ranks of the same position of two replicas.
With it, a rank wants the stored box that becomes its own one, whoever keeps parts of that.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hyperslab.comm import AXES, Grid
from hyperslab.data.augment import IDENTITY, Augmenter, Symmetry
from hyperslab.data.store.ownership import consumers
from hyperslab.formats.source import Source
from hyperslab.geometry import Box
from hyperslab.geometry.transfer import TransferPlan, plan_transfers

PLANS = 4096
"""Transfers that are remembered, of pairs of replicas and of symmetries."""


@dataclass(frozen=True, slots=True)
class BoxMap:
    """The box (C, d, h, w) that each rank of ``grid`` holds of every sample of ``shape``."""

    grid: Grid
    shape: tuple[int, ...]
    own: Box = field(init=False)
    _boxes: dict[int, Box] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "own", self.of(self.grid.rank))

    def of(self, rank: int) -> Box:
        """The box of a rank, which is that of the ranks of the same position in other replicas."""
        if rank not in self._boxes:
            whole = self.grid.partition((self.grid.data, *self.shape))
            box = whole.box(self.grid.coords_of(rank))
            self._boxes[rank] = Box(box.lo[1:], box.hi[1:])
        return self._boxes[rank]

    def ranks(self, replica: int) -> Iterator[int]:
        """The ranks of a replica, one for each position."""
        grid = self.grid
        for position in itertools.product(*(range(grid.extents[axis]) for axis in AXES[1:])):
            coords = dict(zip(AXES[1:], position, strict=True))
            yield grid.rank_of({"data": replica, **coords})

    def peer(self, replica: int) -> int:
        """The rank of a replica at this rank's position."""
        return self.grid.rank_of({**self.grid.coords, "data": replica})

    @property
    def largest(self) -> Box:
        """A box of the most voxels that a rank holds."""
        return max((self.of(rank) for rank in self.ranks(0)), key=lambda box: box.size)


class SampleBoxes:
    """The `BoxMap` of each sample of a source: ``maps``, and one for every shape ``by_shape``."""

    def __init__(self, grid: Grid, source: Source) -> None:
        self.grid = grid
        self.by_shape = boxes_by_shape(grid, source)
        self.maps: Sequence[BoxMap]
        if source.shapes:
            self.maps = [self.by_shape[tuple(shape)] for shape in source.shapes]
        else:
            self.maps = [self.by_shape[tuple(source.shape)]] * len(source.names)


def boxes_by_shape(grid: Grid, source: Source) -> dict[tuple[int, ...], BoxMap]:
    """A `BoxMap` for every shape that the samples of a source have."""
    shapes = {tuple(shape) for shape in source.shapes or (source.shape,)}
    return {shape: BoxMap(grid, shape) for shape in shapes}


def largest_box(grid: Grid, source: Source) -> Box:
    """A box of the most voxels that a rank holds of a sample."""
    maps = boxes_by_shape(grid, source).values()
    return max((boxes.largest for boxes in maps), key=lambda box: box.size)


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """What this rank does for one slot of a mini-batch.

    The boxes of the ``transfer`` are those of the stored sample; its wanted one is `None` where
    another replica computes the sample. ``keeps``: this rank keeps its own box, which it reads
    once. ``reads``: nobody keeps the sample, so that the wanted box is read now.
    """

    slot: int
    sample: int
    augmentation: Symmetry
    keeps: bool
    reads: bool
    transfer: TransferPlan


class BatchPlanner:
    """Plans mini-batches for one rank; ``owner`` is the replica that keeps a sample, if one does.

    Every rank plans its own part of the same exchange, without a message.
    """

    def __init__(
        self, boxes: SampleBoxes, owner: Mapping[int, int], augmenter: Augmenter | None
    ) -> None:
        self.boxes = boxes
        self.owner = owner
        self.augmenter = augmenter
        self._replica = boxes.grid.coords["data"]
        self._transfer = functools.lru_cache(PLANS)(self._plan)

    def keeps(self, sample: int) -> bool:
        """Whether this rank keeps its box of a sample."""
        return self.owner.get(sample) == self._replica

    def plan(self, turn: int, samples: Sequence[int]) -> list[SlotPlan]:
        """The slots of a mini-batch, of the pass ``turn``, for which this rank has things to do."""
        plans = []
        computed = consumers(len(samples), self.boxes.grid.data)
        for slot, (sample, replicas) in enumerate(zip(samples, computed, strict=True)):
            owner = self.owner.get(sample)
            keeps = owner == self._replica
            if not keeps and self._replica not in replicas:
                continue
            shape = self.boxes.maps[sample].shape
            augmentation = IDENTITY
            if self.augmenter is not None:
                augmentation = self.augmenter.of(turn, sample, shape)
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
        """From the ranks of the owner of a sample of ``shape`` to those that compute it.

        Only the ranks are named of which this one may hear: where it owns nothing nobody asks it,
        and where it computes nothing nobody sends to it.
        """
        boxes = self.boxes.by_shape[shape]
        rank = boxes.grid.rank
        computes = self._replica in replicas
        wanted = _wanted(boxes, replicas, augmentation) if owner == self._replica else {}
        if computes and rank not in wanted:
            wanted = {rank: _stored(boxes, rank, augmentation)}
        owned: dict[int, Box] = {}
        if owner is not None and computes:
            owned = {peer: boxes.of(peer) for peer in _holders(boxes, owner, augmentation)}
        elif owner is not None:
            owned = {rank: boxes.own}
        return plan_transfers(rank, owned, wanted)


def _wanted(boxes: BoxMap, replicas: tuple[int, ...], augmentation: Symmetry) -> dict[int, Box]:
    peers = (peer for replica in replicas for peer in _holders(boxes, replica, augmentation))
    return {peer: _stored(boxes, peer, augmentation) for peer in peers}


def _stored(boxes: BoxMap, rank: int, augmentation: Symmetry) -> Box:
    box = boxes.of(rank)
    return box if augmentation == IDENTITY else augmentation.stored(box, boxes.shape)


def _holders(boxes: BoxMap, replica: int, augmentation: Symmetry) -> Iterator[int]:
    """The ranks of a replica that may have, or want, a part of this rank's box."""
    if augmentation == IDENTITY:
        yield boxes.peer(replica)
    else:
        yield from boxes.ranks(replica)
