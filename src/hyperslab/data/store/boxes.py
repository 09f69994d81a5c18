"""The boxes that this rank keeps, in memory and, beyond its budget, in a file of the node."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hyperslab.errors import DataError
from hyperslab.formats.source import Array


class SampleBox(NamedTuple):
    """Of one sample the values of a box in their storage type (C, d, h, w), and its target.

    That is the labels (d, h, w) uint8 where voxels have classes, else the numbers (P,) float64.
    """

    values: Array
    target: Array


class Store:
    """Boxes of one shape by sample; the first ones in memory, the others in a mapped file.

    The file has no name: the system takes it away with the process, however that ends.
    """

    slack = mmap.PAGESIZE
    """What a box in the file may take beside its own bytes [B]."""

    def __init__(self, samples: Sequence[int], in_memory: int, size: int, staging: Path | None):
        """Room for these samples, of ``size`` [B] each at most.

        Raises:
            DataError: the staging folder cannot be written, or has too little space.
        """
        self._kept: dict[int, SampleBox] = {}
        self._numbers = {sample: number for number, sample in enumerate(samples[in_memory:])}
        self._size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._file: mmap.mmap | None = None
        if staging is not None and self._numbers:
            self._file = _reserve(staging, self._size * len(self._numbers))
        self.bytes = 0  # in memory
        self.room = min(in_memory, len(samples)) * size  # what that may become

    def keep(self, sample: int, read: Callable[[], SampleBox]) -> SampleBox:
        """What is kept of a sample; if it is not here yet, a copy of what ``read`` returns."""
        kept = self._kept.get(sample)
        if kept is None:
            kept = self._copy(sample, read())
            self._kept[sample] = kept
        return kept

    def _copy(self, sample: int, box: SampleBox) -> SampleBox:
        number = self._numbers.get(sample)
        if number is not None:
            return self._write(number * self._size, box)
        kept = SampleBox(*(np.array(part, order="C") for part in box))
        self.bytes += sum(part.nbytes for part in kept)
        return kept

    def close(self) -> None:
        """Let go of everything."""
        self._kept.clear()
        self._file = None
        self.bytes = self.room = 0

    def _write(self, offset: int, box: SampleBox) -> SampleBox:
        """A copy in the file: the part of larger items first, so that both are aligned."""
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
    """A file of so many bytes, all of which the disk has: a full one would end the process later.

    Raises:
        DataError: the folder cannot be written, or has too little space.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise DataError(
            f"staging folder {folder}: no room for {size / 2**20:.1f} MiB: {error.strerror}\n"
            "    give a folder on a local disk with more space, or no staging"
        ) from error
