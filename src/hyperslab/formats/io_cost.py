"""What reading a sample costs on a grid that need not be there: bytes and requests, box by box.

A model of what each format's library does, for `hyperslab inspect`; the tests compare it with what
the operating system counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hyperslab.comm import AXES
from hyperslab.errors import LayoutError
from hyperslab.formats.shared.storage_order import StorageOrder
from hyperslab.formats.shared.strided_read import plan
from hyperslab.geometry import Box, Cut, Interval

SIEVE = 65536
"""What HDF5 reads at least where a piece begins [B]."""

BUFFER = 4096
"""What Python's files do [B]."""


@dataclass(frozen=True, slots=True)
class Storage:
    """How the volume of a sample lies in its file.

    ``shape``: of the stored array, whose dims have an ``order``. ``chunk``: none where it is one
    piece. ``size``: of all of it as stored [B]. ``buffer``: what is read at least where a piece
    begins [B]. ``bridged``: read by ourselves, short gaps too, see `strided_read`. ``packed``: one
    stream, of which all before the end of a box is read, or (``whole``) all.
    """

    order: StorageOrder
    shape: tuple[int, ...]
    itemsize: int
    size: int
    chunk: tuple[int, ...] | None = None
    compression: str = ""
    buffer: int = 1
    bridged: bool = False
    packed: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """What reading one box takes: bytes from the file, and pieces of it that are asked for."""

    box: int  # bytes of the box itself
    read: int
    requests: int


def boxes(shape: Sequence[int], extents: Mapping[str, int]) -> list[Box]:
    """The box (C, d, h, w) of every rank of a replica.

    Raises:
        LayoutError: an axis has more ranks than the volume has voxels along it.
    """
    intervals: list[tuple[Interval, ...]] = [((0, shape[0]),)]
    for axis, extent in zip(AXES[1:], shape[1:], strict=True):
        cut = Cut.balanced(axis, extent, extents.get(axis, 1))
        if cut.thin:
            raise LayoutError(f"cannot cut {axis} {extent} into {cut.parts}; use {axis}<={extent}")
        intervals.append(cut.intervals)
    return [Box.of(place) for place in itertools.product(*intervals)]


def cost(storage: Storage, box: Box) -> Cost:
    """What reading ``box`` (C, d, h, w) takes."""
    stored = storage.order.to_file(box, storage.shape)
    own = box.size * storage.itemsize
    if storage.packed:
        ends = [hi - 1 for hi in stored.hi]
        last = 0
        for end, extent in zip(ends, storage.shape, strict=True):
            last = last * extent + end
        share = 1.0 if storage.whole else (last + 1) / math.prod(storage.shape)
        return Cost(own, round(storage.size * share), 1)
    if storage.chunk is not None:
        grids = zip(storage.shape, storage.chunk, strict=True)
        each = storage.size / max(1, math.prod(-(-n // c) for n, c in grids))
        places = zip(stored.lo, stored.hi, storage.chunk, strict=True)
        count = math.prod(-(-hi // c) - lo // c for lo, hi, c in places)
        return Cost(own, round(each * count), count)
    if storage.bridged:
        outer, span = plan(storage.shape, storage.itemsize, stored)
        count = math.prod(stored.shape[:outer])
        return Cost(own, count * span, count)
    return Cost(own, *_pieces(storage, stored))


def _pieces(storage: Storage, box: Box) -> tuple[int, int]:
    """Bytes and requests for a box of what is stored in one piece, from its lowest byte on."""
    starts = np.zeros(1, np.int64)
    run = stride = storage.itemsize
    for dim in range(box.ndim - 1, -1, -1):
        lo, hi = box.interval(dim)
        if starts.size == 1 and run == stride:  # what lies within is contiguous
            starts = starts + lo * stride
            run = (hi - lo) * stride
        else:
            starts = (np.arange(lo, hi)[:, None] * stride + starts).ravel()
        stride *= storage.shape[dim]
    read = requests = have = 0
    for start in starts.tolist():
        end = start + run
        if end <= have:  # it is in the buffer
            continue
        if run < storage.buffer:
            end = min(start + storage.buffer, storage.size)
        read = read + end - start
        requests = requests + 1
        have = end
    return read, requests


def advice(storage: Storage, costs: Sequence[Cost], extents: Mapping[str, int]) -> str:
    """What to change where much more is read than wanted; empty where nothing is to be gained."""
    read = sum(c.read for c in costs)
    wanted = storage.size
    if read <= 1.1 * wanted:
        return ""
    cut = " and ".join(axis for axis in AXES[1:] if extents.get(axis, 1) > 1)
    parts = ",".join(str(extents.get(axis, 1)) for axis in AXES[1:])
    command = f"hyperslab convert SRC OUT --cut {parts}"
    if storage.packed:
        return (
            "gzip has no random access: every rank unpacks the sample for its box; unpack the "
            f"files or convert them to HDF5: {command}"
        )
    if storage.chunk is not None:
        return (
            f"cuts along {cut} go through chunks, which are then read by several ranks; write "
            f"chunks whose sides divide the shards: {command}"
        )
    outer = {"D": "depth", "H": "height", "W": "width"}[storage.order.dims.replace("C", "")[0]]
    return (
        f"cutting {cut} reads whole rows of files without chunks; cut along {outer}, which is "
        f"outermost in the file, or write chunks whose sides divide the shards: {command}"
    )
