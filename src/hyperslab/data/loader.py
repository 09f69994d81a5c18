"""`Dataset`: mini-batches of `Sharded`, each rank with its own boxes."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import torch

from hyperslab.comm import Grid
from hyperslab.data.decode import Transform, decode
from hyperslab.data.device import Mover, Moving
from hyperslab.data.parameters import Parameters
from hyperslab.data.prefetch import ahead
from hyperslab.data.reader import Reader
from hyperslab.data.schedule import Schedule
from hyperslab.data.source import Source
from hyperslab.errors import DataError
from hyperslab.tensor import Sharded

Batches = Generator[tuple[Sharded, Sharded], None, None]


class Dataset:
    """Samples of a `Source` in mini-batches over a grid; made by `hyperslab.open`."""

    def __init__(
        self,
        source: Source,
        grid: Grid,
        schedule: Schedule,
        *,
        transform: Transform,
        augment: bool,
        prefetch: int,
        dtype: torch.dtype,
    ) -> None:
        self.source, self.grid, self.schedule = source, grid, schedule
        self.transform, self.prefetch, self.dtype = transform, prefetch, dtype
        self.wait_seconds = 0.0
        """Time that the consumer has waited for data so far [s]."""
        self._reader = Reader(
            source,
            grid,
            transform=transform,
            augment=augment,
            seed=schedule.seed,
            target_dtype=torch.promote_types(dtype, torch.float32),
        )
        self._mover = Mover(grid.device)

    def __len__(self) -> int:
        """The number of samples of this split."""
        return len(self.schedule.samples)

    @property
    def steps(self) -> int:
        """Steps per epoch; the last one may have a smaller mini-batch."""
        return self.schedule.steps

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (C, D, H, W) of a sample."""
        return self.source.shape

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the P targets; none where voxels have classes."""
        return self.source.parameters.names

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the voxels' classes, background first; none where there are targets."""
        return self.source.classes

    @property
    def parameters(self) -> Parameters:
        """The targets' names and physical ranges."""
        return self.source.parameters

    @property
    def bytes_read(self) -> int:
        """Bytes of the boxes of volumes and labels asked for so far, read ahead or not [B]."""
        return self._reader.bytes_read

    def names(self, epoch: int = 0) -> list[str]:
        """The samples' names in the order in which the epoch shows them."""
        return [self.source.names[sample] for sample in self.schedule.order(epoch)]

    def epoch(self, epoch: int, start: int = 0) -> Batches:
        """The mini-batches of an epoch from step ``start`` on, read in the background.

        Yields ``x`` (B, C, D, H, W) and the normalised targets ``y`` (B, P), float32 (float64 if
        ``dtype`` is), cut along the batch only. Where there are ``classes``, ``y`` is (B, D, H, W)
        int64, cut like ``x``. Every sample comes once; order and augmentation depend on seed and
        epoch alone, so that an epoch resumed at a step goes on as it would have.

        Raises (at the step concerned):
            DataError: a file cannot be read or holds values that cannot be right.
        """
        if epoch < 0 or not 0 <= start <= self.steps:
            raise DataError(f"no step {start} of epoch {epoch}: an epoch has {self.steps} steps")
        return self._run(epoch, start)

    def _run(self, epoch: int, start: int) -> Batches:
        def load(samples: list[int]) -> Moving:
            return self._mover.send(self._reader.read(epoch, samples))

        blocks = ahead(load, self.schedule.batches(epoch)[start:], self.prefetch)
        try:
            while True:
                begin = time.perf_counter()
                moving = next(blocks, None)
                self.wait_seconds += time.perf_counter() - begin
                if moving is None:
                    return
                yield self._finish(moving)
        finally:
            blocks.close()

    def _finish(self, moving: Moving) -> tuple[Sharded, Sharded]:
        block = self._mover.receive(moving)
        x = decode(block.values, self.shape, self.grid, self.transform, self.dtype)
        y = block.targets.long() if self.classes else block.targets
        return (
            Sharded.from_local(x, block.partition, self.grid),
            Sharded.from_local(y, block.target_partition, self.grid),
        )

    def close(self) -> None:
        """Close the files; an epoch under way is ended by closing or dropping its iterator."""
        self.source.close()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
