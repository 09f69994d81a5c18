"""What this rank reads from a `Source`: boxes, checked and counted."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from hyperslab.data.store.boxes import SampleBox
from hyperslab.data.transforms import Transform
from hyperslab.errors import DataError
from hyperslab.formats.shared.checks import as_stored, check_finite, check_shape, reading
from hyperslab.formats.shared.labels import check_classes
from hyperslab.formats.source import Array, Source
from hyperslab.geometry import Box


class Reader:
    """Reads boxes of ``source`` for one rank and refuses what ``transform`` cannot take."""

    def __init__(self, source: Source, transform: Transform) -> None:
        self.source = source
        self.transform = transform
        self.bytes_read = 0
        self._counting = threading.Lock()  # two epochs may be under way

    def read(self, sample: int, box: Box) -> SampleBox:
        """The values of a box (C, d, h, w) and its target; errors as `values`."""
        values = self.values(sample, box)
        return SampleBox(values, self.target(sample, Box(box.lo[1:], box.hi[1:])))

    def values(self, sample: int, box: Box) -> Array:
        """The values of ``box`` (C, d, h, w) in their storage type, not always contiguous.

        Raises:
            DataError: a file cannot be read or holds values that cannot be right.
        """
        self._count(box.size * np.dtype(self.source.dtype).itemsize)
        name = self.source.where(sample)
        with reading(name):
            values = np.asarray(self.source.read(sample, box))
        where = f"{name}: {box}"
        check_shape(values, box.shape, where)
        values = as_stored(values, np.dtype(self.source.dtype), where)
        check_values(values, self.transform, where)
        return values

    def labels(self, sample: int, box: Box) -> Array:
        """The classes of the voxels of ``box`` (d, h, w) as uint8; errors as `values`."""
        self._count(box.size * self.source.label_bytes)
        name = self.source.where(sample)
        with reading(name):
            labels = np.asarray(self.source.labels(sample, box))
        where = f"{name}: {box}"
        check_shape(labels, box.shape, where)
        check_classes(labels, self.source.classes, where)
        return labels

    def target(self, sample: int, box: Box) -> Array:
        """The labels of a box (d, h, w) where voxels have classes, else the numbers (P,) float64.

        Errors as `values`.
        """
        if self.source.classes:
            return self.labels(sample, box)
        name = self.source.where(sample)
        with reading(name):
            target = np.asarray(self.source.target(sample), np.float64)
        names = self.source.parameters.names
        if target.shape != (len(names),):
            raise DataError(
                f"{name}: has targets of shape {target.shape} but "
                f"{len(names)} parameters: {', '.join(names)}"
            )
        return target

    def _count(self, size: int) -> None:
        with self._counting:
            self.bytes_read += size


def check_values(values: Array, transform: Transform, where: str) -> None:
    """Refuse values that cannot be right before they reach the network as NaN.

    Raises:
        DataError: NaN or infinite; negative integers where the transform takes them for counts; a
            value at or below the transform's bound.
    """
    low, _ = check_finite(values, where)
    if not transform.signed and values.dtype.kind == "i" and low < 0:
        raise DataError(f"{where} holds negative counts, down to {low}")
    if low <= transform.above:
        raise DataError(f"{where} holds {low}, {transform.why}")


def os_bytes_read() -> int:
    """Bytes that this process has read by system calls so far [B], from any file (Linux).

    Against `Dataset.bytes_read` it shows what the file format read beyond the boxes asked for.
    """
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])
