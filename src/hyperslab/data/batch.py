"""This rank's part of a mini-batch, and where on the grid the boxes of a sample lie."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hyperslab.comm import AXES, Grid
from hyperslab.data.store.ownership import consumers
from hyperslab.formats.source import Source
from hyperslab.geometry import Box, Partition


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """This rank's box (b, C, d, h, w) of a mini-batch in its storage type, and its targets.

    These are numbers (b, P) or the classes of the voxels (b, d, h, w) as uint8. ``kept``: the
    values are the store's own, which must not be changed (the targets never are).
    """

    values: torch.Tensor
    targets: torch.Tensor
    partition: Partition  # of the values
    target_partition: Partition
    samples: tuple[int, ...] = ()  # of the whole mini-batch
    kept: bool = False


@dataclass(frozen=True, slots=True)
class BoxMap:
    """Who holds what of the samples of ``source`` on ``grid``; boxes are (C, d, h, w)."""

    source: Source
    grid: Grid
    _home: dict[int, Box] = field(default_factory=dict)

    @property
    def own(self) -> Box:
        """This rank's box of every sample."""
        return self.of(self.grid.rank)

    def of(self, rank: int) -> Box:
        """The box of a rank, which is that of the ranks of the same position in other replicas."""
        if rank not in self._home:
            whole = self.grid.partition((self.grid.data, *self.source.shape))
            box = whole.box(self.grid.coords_of(rank))
            self._home[rank] = Box(box.lo[1:], box.hi[1:])
        return self._home[rank]

    def ranks(self, replica: int) -> Iterator[int]:
        """The ranks of a replica, one for each position."""
        grid = self.grid
        for place in itertools.product(*(range(grid.extents[axis]) for axis in AXES[1:])):
            coords = dict(zip(AXES[1:], place, strict=True))
            yield grid.rank_of({"data": replica, **coords})

    def peer(self, replica: int) -> int:
        """The rank of a replica at this rank's position."""
        return self.grid.rank_of({**self.grid.coords, "data": replica})

    def local_slots(self, count: int) -> list[int]:
        """The boxes of a mini-batch of ``count`` samples that this rank computes."""
        found = consumers(count, self.grid.data)
        return [place for place in range(count) if self.grid.coords["data"] in found[place]]

    @property
    def sample_bytes(self) -> int:
        """Of one sample the most that a rank holds, labels or targets included [B]."""
        most = max(self.of(rank).size for rank in self.ranks(0))
        size = most * np.dtype(self.source.dtype).itemsize
        if self.source.classes:
            return size + most // self.source.shape[0]
        return size + 8 * len(self.source.parameters.names)

    def block_bytes(self, count: int) -> int:
        """The most that a rank holds of a mini-batch of ``count`` samples [B]."""
        replicas = 1 if count < self.grid.data else self.grid.data
        return -(-count // replicas) * self.sample_bytes

    def empty(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for the values and labels of so many samples; on CUDA, page-locked."""
        box = self.own
        values = self._empty((count, *box.shape), self.source.dtype)
        if self.source.classes:
            return values, self._empty((count, *box.shape[1:]), np.dtype(np.uint8))
        names = self.source.parameters.names
        return values, torch.empty((count, len(names)), dtype=torch.float64)

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> torch.Tensor:
        like = torch.from_numpy(np.empty(0, dtype)).dtype
        return torch.empty(shape, dtype=like, pin_memory=self.grid.device.type == "cuda")

    def block(
        self,
        values: torch.Tensor,
        targets: torch.Tensor,
        samples: list[int],
        dtype: torch.dtype,
        *,
        kept: bool = False,
    ) -> LocalBatch:
        """The block of a mini-batch; targets that are numbers become ``dtype``."""
        count, shape = len(samples), self.source.shape
        if self.source.classes:
            cut = self.grid.partition((count, *shape[1:]), channels=False)
        else:
            targets = targets.to(dtype, copy=kept)
            cut = self.grid.partition((count, *targets.shape[1:]))
        partition = self.grid.partition((count, *shape))
        return LocalBatch(values, targets, partition, cut, tuple(samples), kept)
