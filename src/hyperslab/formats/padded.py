"""Volumes with a rim that is added where they are read, so that their extents are multiples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hyperslab.errors import DataError
from hyperslab.formats.source import Array, Source, SourceView
from hyperslab.geometry import Box


class Padded(SourceView):
    """The samples of ``source``, their extents rounded up to multiples of ``multiple``.

    A network that halves its input several times, and joins what it was with what it becomes, needs
    such extents. The added voxels come after the last ones along D, H and W; they hold ``fill`` and
    are of the first class, the background.

    Raises:
        DataError: ``multiple`` is less than 1.
    """

    def __init__(self, source: Source, multiple: int, fill: float = 0) -> None:
        if multiple < 1:
            raise DataError(f"{multiple=}: needs to be >= 1")
        self.source = source
        self.multiple = multiple
        self.take_after(source)
        self.fill = fill_as(fill, source.dtype)
        shapes = [rounded_up(shape, multiple) for shape in source.shapes or (source.shape,)]
        self.shape = max(shapes, key=math.prod)
        self.shapes = tuple(shapes) if len(set(shapes)) > 1 else ()
        self.names = source.names
        self.summed_whole = source.summed_whole
        self.splits = source.splits

    def origin(self, sample: int) -> tuple[Source, int]:
        return self.source, sample

    def read(self, sample: int, box: Box) -> Array:
        inner = Box.whole(self.source.shape_of(sample))
        return read_filled(lambda b: self.source.read(sample, b), inner, box, self.fill, self.dtype)

    def labels(self, sample: int, box: Box) -> Array:
        inner = Box.whole(self.unpadded(sample))
        of = self.source
        return read_filled(lambda b: of.labels(sample, b), inner, box, 0, np.dtype(np.uint8))

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.source.whole_shape

    def close(self) -> None:
        self.source.close()


def padded(source: Source, multiple: int | None, fill: float = 0) -> Source:
    """The source itself where nothing is to be added, else a `Padded` of it; raises as that."""
    return source if multiple is None else Padded(source, multiple, fill)


def rounded_up(shape: Sequence[int], multiple: int) -> tuple[int, ...]:
    """(C, D, H, W) with D, H and W rounded up to multiples.

    >>> rounded_up((1, 9, 8, 10), 4)
    (1, 12, 8, 12)
    """
    channels, *extents = shape
    return (channels, *(-(-extent // multiple) * multiple for extent in extents))


def read_filled(
    read: Callable[[Box], Array], inner: Box, box: Box, fill: float, dtype: np.dtype[Any]
) -> Array:
    """The values of ``box``, which may reach beyond ``inner``: ``fill`` where it does."""
    inside = box.intersect(inner)
    if inside == box:
        return read(box)
    values = np.full(box.shape, fill, dtype)
    if not inside.empty:
        values[inside.slices(box)] = read(inside)
    return values


def take_filled(whole: Array, box: Box, fill: float) -> Array:
    """The values of ``box``, which may reach beyond ``whole``: ``fill`` where it does."""
    inner = Box.whole(whole.shape)
    return read_filled(lambda inside: whole[inside.slices()], inner, box, fill, whole.dtype)


def fill_as(fill: float, dtype: np.dtype[Any]) -> float:
    """As near as the storage type has it, and not above: what is clipped at ``fill`` becomes it."""
    if dtype.kind not in "iu":
        return fill
    limits = np.iinfo(dtype)
    return int(min(max(math.floor(fill), limits.min), limits.max))
