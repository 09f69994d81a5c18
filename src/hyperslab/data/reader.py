"""This rank's part of a mini-batch, read from a `Source` and counted."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hyperslab.comm import Grid
from hyperslab.data.decode import check
from hyperslab.data.source import Array, Source
from hyperslab.data.symmetry import Symmetry
from hyperslab.errors import DataError
from hyperslab.geometry import Box, Partition


@dataclass(frozen=True, slots=True)
class Block:
    """This rank's box (b, C, d, h, w) of a mini-batch in its storage type, and targets (b, P)."""

    values: torch.Tensor
    targets: torch.Tensor
    partition: Partition  # of the values
    target_partition: Partition


class Reader:
    """Read boxes of ``source`` for the rank of ``grid``.

    With ``augment`` each sample is turned by a `Symmetry` drawn from (seed, epoch, sample). The
    box that the rank will hold is mapped back to the file's, so that the same number of bytes is
    read and nothing is communicated.
    """

    def __init__(
        self,
        source: Source,
        grid: Grid,
        *,
        transform: str | None,
        augment: bool,
        seed: int,
        target_dtype: torch.dtype,
    ) -> None:
        self.source, self.grid, self.transform = source, grid, transform
        self.augment, self.seed, self.target_dtype = augment, seed, target_dtype
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
        values = self._empty(box.shape)
        array = values.numpy()
        for place, sample in enumerate(mine):
            array[place] = self._sample(epoch, sample, wanted)
        targets = np.array([self.source.target(sample) for sample in mine])
        return Block(
            values,
            torch.from_numpy(targets).to(self.target_dtype),
            partition,
            self.grid.partition((len(samples), targets.shape[1])),
        )

    def _sample(self, epoch: int, sample: int, wanted: Box) -> Array:
        shape = self.source.shape
        turn = Symmetry.draw(shape, self.seed, epoch, sample) if self.augment else None
        box = turn.stored(wanted, shape) if turn is not None else wanted
        with self._counting:
            self.bytes_read += box.size * np.dtype(self.source.dtype).itemsize
        values = self.source.read(sample, box)
        if values.shape != box.shape:
            raise DataError(f"{self.source.where(sample)}: {box} was read as {values.shape}")
        check(values, self.transform, f"{self.source.where(sample)}: {box}")
        return turn.apply(values) if turn is not None else values

    def _empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = torch.from_numpy(np.empty(0, self.source.dtype)).dtype
        return torch.empty(shape, dtype=dtype, pin_memory=self.grid.device.type == "cuda")


def os_bytes_read() -> int:
    """Bytes that this process has read by system calls so far [B], from any file (Linux).

    Against `Dataset.bytes_read` it shows what the file format read beyond the boxes asked for.
    """
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])
