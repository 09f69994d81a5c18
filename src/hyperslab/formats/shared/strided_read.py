"""A box of an array that lies in a file in one piece, by as few reads as make sense.

By ordinary reads: a mapping would end the process if the file were cut short in the meantime.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.geometry import Box

GAP = 4096
"""Less than this between two pieces is read over [B]: the system reads whole pages anyway."""

MOST = 4 << 20
"""A piece with gaps in it does not become larger than this [B]: it is copied from a buffer."""


def plan(stored: Sequence[int], itemsize: int, box: Box) -> tuple[int, int]:
    """How many dims are stepped through, and the bytes of the one piece that each step reads.

    >>> plan((8, 8, 8), 1, Box((2, 0, 0), (4, 8, 8)))  # whole planes are one piece
    (0, 128)
    >>> plan((8, 8, 8192), 1, Box((0, 2, 0), (8, 4, 8192)))  # of each plane two rows
    (1, 16384)
    >>> plan((8, 8, 8), 1, Box((0, 0, 2), (8, 8, 4)))  # the short gaps are read as well
    (0, 506)
    """
    strides = _strides(stored, itemsize)
    outer = len(stored)
    span = itemsize
    for dim in reversed(range(len(stored))):
        count = box.shape[dim]
        gap = strides[dim] - span
        grown = strides[dim] * (count - 1) + span
        if count > 1 and gap > 0 and (gap >= GAP or grown > MOST):
            break
        outer = dim
        span = grown
    return outer, span


def read_box(
    file: int, start: int, stored: Sequence[int], dtype: np.dtype[Any], box: Box
) -> NDArray[Any]:
    """The values of a box of the array ``stored``, whose first byte is the file's at ``start``.

    ``file`` is its number, open for reading.

    Raises:
        EOFError: the file ends too early.
    """
    strides = _strides(stored, dtype.itemsize)
    outer, span = plan(stored, dtype.itemsize, box)
    places = np.array([start + sum(np.multiply(box.lo, strides).tolist())])
    for count, stride in zip(box.shape[:outer], strides, strict=False):
        places = (places[:, None] + np.arange(count) * stride).ravel()
    values = np.empty((len(places), *box.shape[outer:]), dtype)
    if span * len(places) == values.nbytes:
        _fill(values.reshape(len(places), -1).view(np.uint8), file, places)
        return values.reshape(box.shape)
    many = max(1, MOST // span)
    buffer = np.empty((min(many, len(places)), span), np.uint8)
    for done in range(0, len(places), many):
        part = values[done : done + many]
        _fill(buffer, file, places[done : done + many])
        part[...] = np.ndarray(part.shape, dtype, buffer, strides=(span, *strides[outer:]))
    return values.reshape(box.shape)


def _strides(stored: Sequence[int], itemsize: int) -> list[int]:
    return [math.prod(stored[dim + 1 :]) * itemsize for dim in range(len(stored))]


def _fill(rows: NDArray[np.uint8], file: int, places: NDArray[np.int64]) -> None:
    """Read each row from its place in the file."""
    size = rows.shape[1]
    view = rows.data.cast("B")
    for index, place in enumerate(places.tolist()):
        row = view[index * size : (index + 1) * size]
        while row:  # the system may give less than it is asked for
            got = os.preadv(file, [row], place)
            if not got:
                raise EOFError(f"it ends at byte {place} but needs {place + len(row)}")
            row = row[got:]
            place = place + got
