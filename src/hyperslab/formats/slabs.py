"""A sample in slabs along depth, and its checksum as they pass.

[Note: checksum] The CRC32C of a sample's values in the order (D, H, W, C), little-endian, whatever
the file's own order is; of its labels, that of (D, H, W) as uint8. Slabs of any thickness give the
same, and of a public CosmoFlow file it is the checksum of ``full`` as it is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import google_crc32c
import numpy as np

from hyperslab.formats.shared.checks import as_stored, check_finite, check_shape, reading
from hyperslab.formats.shared.labels import check_classes
from hyperslab.formats.source import Array, Source
from hyperslab.geometry import Box

SLAB = 64 * 1024 * 1024
"""A slab has at most so many bytes, unless one chunk is thicker [B]."""

Slabs = Iterator[tuple[int, Array]]

Read = Callable[[Box], Array]


class Tally:
    """The checksum of what has passed."""

    def __init__(self) -> None:
        self._sum = 0

    def add(self, values: Array) -> None:
        """Take values (d, H, W, C) or (d, H, W) into account."""
        little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
        self._sum = google_crc32c.extend(self._sum, little.reshape(-1).view(np.uint8))

    def __str__(self) -> str:
        return f"{self._sum:08x}"


def thickness(shape: tuple[int, ...], itemsize: int, side: int = 1) -> int:
    """How many planes a slab of (C, D, H, W) has: a multiple of a chunk's ``side``."""
    plane = math.prod(shape) // shape[1] * itemsize
    return max(1, SLAB // (plane * side)) * side


def values(source: Source, sample: int, step: int, tally: Tally, read: Read | None = None) -> Slabs:
    """Where each slab begins, and its values (C, d, H, W).

    ``read`` gives the values of a box in another way than ``source.read``.

    Raises:
        DataError: they cannot be read, or are NaN or infinite.
    """
    channels, depth, height, width = source.shape_of(sample)
    for lo in range(0, depth, step):
        box = Box((0, lo, 0, 0), (channels, min(lo + step, depth), height, width))
        slab = read(box) if read else _values(source, sample, box)
        check_finite(slab, f"{source.where(sample)}: {box}")
        tally.add(np.moveaxis(slab, 0, -1))
        yield lo, slab


def labels(source: Source, sample: int, step: int, tally: Tally, read: Read | None = None) -> Slabs:
    """Where each slab begins, and its labels (d, H, W).

    Raises:
        DataError: they cannot be read, or are no classes.
    """
    _, depth, height, width = source.shape_of(sample)
    for lo in range(0, depth, step):
        box = Box((lo, 0, 0), (min(lo + step, depth), height, width))
        slab = read(box) if read else _labels(source, sample, box)
        check_classes(slab, source.classes, f"{source.where(sample)}: {box}")
        tally.add(slab)
        yield lo, slab


def _values(source: Source, sample: int, box: Box) -> Array:
    """The values of a box as the source gives them, checked.

    An error of the system is one of the sample here, not of the disk that is written to.
    """
    with reading(source.where(sample)):
        values = np.asarray(source.read(sample, box))
    where = f"{source.where(sample)}: {box}"
    check_shape(values, box.shape, where)
    return as_stored(values, np.dtype(source.dtype), where)


def _labels(source: Source, sample: int, box: Box) -> Array:
    """As `_values`, the labels."""
    with reading(source.where(sample)):
        labels = np.asarray(source.labels(sample, box))
    check_shape(labels, box.shape, f"{source.where(sample)}: {box}")
    return labels


def pass_by(slabs: Slabs) -> None:
    """Let them be read, for the checksum."""
    for _ in slabs:
        pass
