"""This rank's part of a mini-batch, read from a `Source` and counted."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hyperslab.comm import Grid
from hyperslab.data.decode import Transform, check
from hyperslab.data.labels import check_classes
from hyperslab.data.source import Array, Source
from hyperslab.data.symmetry import STILL, Symmetry
from hyperslab.errors import DataError
from hyperslab.geometry import Box, Partition


@dataclass(frozen=True, slots=True)
class Block:
    """This rank's box (b, C, d, h, w) of a mini-batch in its storage type, and its targets.

    These are numbers (b, P) or the classes of the voxels (b, d, h, w) as uint8.
    """

    values: torch.Tensor
    targets: torch.Tensor
    partition: Partition  # of the values
    target_partition: Partition


class Reader:
    """Read boxes of ``source`` for the rank of ``grid``.

    With ``augment`` each sample is turned by a `Symmetry` drawn from (seed, epoch, sample), its
    labels with it; where there are labels it is only flipped. The box that the rank will hold is
    mapped back to the file's, so that the same number of bytes is read and nothing is communicated.
    """

    def __init__(
        self,
        source: Source,
        grid: Grid,
        *,
        transform: Transform,
        augment: bool,
        seed: int,
        target_dtype: torch.dtype,
    ) -> None:
        self.source, self.grid, self.transform = source, grid, transform
        self.augment, self.seed, self.target_dtype = augment, seed, target_dtype
        self.signed = isinstance(transform, tuple) or (transform is None and bool(source.classes))
        self.bytes_read = 0
        self._counting = threading.Lock()  # two epochs may be under way

    def read(self, epoch: int, samples: Sequence[int]) -> Block:
        """The block of the mini-batch that ``samples`` make.

        Raises:
            DataError: a file cannot be read or holds values that cannot be right.
        """
        partition = self.grid.partition((len(samples), *self.source.shape))
        box = partition.box(self.grid.coords)
        mine = samples[box.lo[0] : box.hi[0]]
        wanted = Box(box.lo[1:], box.hi[1:])
        turns = [self._turn(epoch, sample) for sample in mine]
        values = self._empty(box.shape, self.source.dtype)
        array = values.numpy()
        for place, (sample, turn) in enumerate(zip(mine, turns, strict=True)):
            array[place] = self._values(sample, turn, wanted)
        if self.source.classes:
            targets = self._empty((len(mine), *wanted.shape[1:]), np.dtype(np.uint8))
            array = targets.numpy()
            for place, (sample, turn) in enumerate(zip(mine, turns, strict=True)):
                array[place] = self._labels(sample, turn, wanted)
        else:
            numbers = np.array([self.source.target(sample) for sample in mine])
            targets = torch.from_numpy(numbers).to(self.target_dtype)
        return Block(values, targets, partition, self._cut(len(samples), targets))

    def _cut(self, count: int, targets: torch.Tensor) -> Partition:
        """How the targets of a mini-batch of ``count`` are cut; labels as the volumes are."""
        if self.source.classes:
            return self.grid.partition((count, *self.source.shape[1:]), channels=False)
        return self.grid.partition((count, *targets.shape[1:]))

    def _turn(self, epoch: int, sample: int) -> Symmetry:
        if not self.augment:
            return STILL
        turns = not self.source.classes
        return Symmetry.draw(self.source.shape, self.seed, epoch, sample, turns=turns)

    def _values(self, sample: int, turn: Symmetry, wanted: Box) -> Array:
        box = turn.stored(wanted, self.source.shape)
        self._count(box.size * np.dtype(self.source.dtype).itemsize)
        values = self.source.read(sample, box)
        where = self._where(sample, box, values)
        check(values, self.transform, where, signed=self.signed)
        return turn.apply(values)

    def _labels(self, sample: int, turn: Symmetry, wanted: Box) -> Array:
        stored = turn.stored(wanted, self.source.shape)
        box = Box(stored.lo[1:], stored.hi[1:])
        self._count(box.size * self.source.label_bytes)
        labels = self.source.labels(sample, box)
        check_classes(labels, self.source.classes, self._where(sample, box, labels))
        return turn.apply(labels[None])[0]

    def _where(self, sample: int, box: Box, got: Array) -> str:
        """The words by which an error names what was read, which has to be the box."""
        if got.shape != box.shape:
            raise DataError(f"{self.source.where(sample)}: {box} was read as {got.shape}")
        return f"{self.source.where(sample)}: {box}"

    def _count(self, size: int) -> None:
        with self._counting:
            self.bytes_read += size

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> torch.Tensor:
        like = torch.from_numpy(np.empty(0, dtype)).dtype
        return torch.empty(shape, dtype=like, pin_memory=self.grid.device.type == "cuda")


def os_bytes_read() -> int:
    """Bytes that this process has read by system calls so far [B], from any file (Linux).

    Against `Dataset.bytes_read` it shows what the file format read beyond the boxes asked for.
    """
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])
