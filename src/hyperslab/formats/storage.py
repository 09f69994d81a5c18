"""Models how a volume lies in its file, in one piece or in chunks, and what reading a box takes.

A box of an array in one piece is read by as few reads as make sense, and by ordinary ones: a
mapping would end the process if the file were cut short in the meantime.

[Note: size of a chunk] HDF5 and Zarr read, and unpack, whole chunks. One that lies in two shards
is read by the ranks of both; so its sides divide the bounds of the shards. Small ones cost a
seek and an entry of the index each: below 64 KiB these take longer than the bytes. Large ones
are read whole for thin boxes; HDF5 keeps up to 1 MiB for those that ask again, and parallel file
systems give out stripes of 1 MiB. Hence sides as equal as can be, of at most 1 MiB together. All
channels of a voxel are in one chunk: no cut separates them.

`read_cost` counts the bytes and requests of a box on a grid that need not be there, for
`hyperslab inspect`; the tests compare it with what the operating system counts.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.comm.launchers import AXES
from hyperslab.comm.placement import SPATIAL_AXES
from hyperslab.errors import LayoutError
from hyperslab.formats.storage_order import StorageOrder
from hyperslab.geometry import Box, Cut, Interval

LARGEST_GAP = 4096
"""Less than this between two pieces is read over [B]: the system reads whole pages anyway."""

LARGEST_READ = 4 << 20
"""A piece with gaps in it does not become larger than this [B]: it is copied from a buffer."""


def plan_strided_read(stored: Sequence[int], itemsize: int, box: Box) -> tuple[int, int]:
    """Plans the dims that are stepped through, and the bytes of the piece that each step reads.

    >>> plan_strided_read((8, 8, 8), 1, Box((2, 0, 0), (4, 8, 8)))  # whole planes are one piece
    (0, 128)
    >>> plan_strided_read((8, 8, 8192), 1, Box((0, 2, 0), (8, 4, 8192)))  # of each plane two rows
    (1, 16384)
    >>> plan_strided_read((8, 8, 8), 1, Box((0, 0, 2), (8, 8, 4)))  # short gaps are read, too
    (0, 506)
    """
    strides = _strides(stored, itemsize)
    outer = len(stored)
    span = itemsize
    for dim in reversed(range(len(stored))):
        count = box.shape[dim]
        gap = strides[dim] - span
        grown = strides[dim] * (count - 1) + span
        if count > 1 and gap > 0 and (gap >= LARGEST_GAP or grown > LARGEST_READ):
            break
        outer = dim
        span = grown
    return outer, span


def read_strided(
    file: int, start: int, stored: Sequence[int], dtype: np.dtype[Any], box: Box
) -> NDArray[Any]:
    """Reads a box of the array ``stored``, whose first byte is the file's at ``start``.

    ``file`` is its number, open for reading. Python's objects, whose bytes would be taken for
    addresses, are a ValueError.
    """
    if dtype.hasobject:
        raise ValueError("it holds Python's objects, not numbers")
    strides = _strides(stored, dtype.itemsize)
    outer, span = plan_strided_read(stored, dtype.itemsize, box)
    places = np.array([start + sum(np.multiply(box.lo, strides).tolist())])
    for count, stride in zip(box.shape[:outer], strides, strict=False):
        places = (places[:, None] + np.arange(count) * stride).ravel()
    values = np.empty((len(places), *box.shape[outer:]), dtype)
    if span * len(places) == values.nbytes:
        _read_rows(values.reshape(len(places), -1).view(np.uint8), file, places)
        return values.reshape(box.shape)
    many = max(1, LARGEST_READ // span)
    buffer = np.empty((min(many, len(places)), span), np.uint8)
    for done in range(0, len(places), many):
        part = values[done : done + many]
        _read_rows(buffer, file, places[done : done + many])
        part[...] = np.ndarray(part.shape, dtype, buffer, strides=(span, *strides[outer:]))
    return values.reshape(box.shape)


def _strides(stored: Sequence[int], itemsize: int) -> list[int]:
    return [math.prod(stored[dim + 1 :]) * itemsize for dim in range(len(stored))]


def _read_rows(rows: NDArray[np.uint8], file: int, places: NDArray[np.int64]) -> None:
    """Reads each row from its place in the file."""
    size = rows.shape[1]
    view = rows.data.cast("B")
    for index, place in enumerate(places.tolist()):
        read_whole(file, view[index * size : (index + 1) * size], place)


def read_whole(file: int, memory: memoryview, place: int) -> None:
    """Fills the memory from a place in the file; an EOFError if that ends too early."""
    while memory:  # the system may give less than it is asked for
        got = os.preadv(file, [memory], place)
        if not got:
            size = os.fstat(file).st_size
            raise EOFError(f"it ends at byte {size} but needs {place + len(memory)}")
        memory = memory[got:]
        place = place + got


LEAST_CHUNK = 64 * 1024
"""A sensible chunk has no fewer bytes [B]."""

MOST_CHUNK = 1024 * 1024
"""Nor more [B]."""

HANDFUL = 64
"""The number of chunks that may be smaller: their cost is not felt."""

ChunkSides = tuple[int, ...]


def chunk_sides(extents: Sequence[int], cut: Sequence[int], voxel: int) -> tuple[ChunkSides, str]:
    """Chooses the sides (d, h, w) of a chunk; says so where none that respects the cut is sensible.

    ``extents`` (D, H, W) are divided into ``cut`` parts each, as `Cut.balanced` does it; a
    ``voxel`` with all of its channels has so many bytes. The last chunk along a dim may be cut off.

    >>> chunk_sides((512, 512, 512), (2, 2, 2), 8)
    ((32, 64, 64), '')
    >>> chunk_sides((100, 100, 100), (3, 1, 1), 8)  # shards begin at 0, 34 and 67
    ((1, 100, 100), '')

    Raises:
        LayoutError: there are fewer voxels than parts along an axis.
    """
    if any(parts > extent for parts, extent in zip(cut, extents, strict=True)):
        raise LayoutError(
            f"cannot cut {_chunk_words(extents)} voxels into {_chunk_words(cut)} parts"
        )
    cuts = [Cut.balanced(*one) for one in zip(SPATIAL_AXES, extents, cut, strict=True)]
    inner = [math.gcd(*one.bounds[1:-1]) for one in cuts]  # 0 where nothing is cut
    powers = [{1 << n for n in range(extent.bit_length()) if 1 << n < extent} for extent in extents]
    whole = [divisors(extent) | smaller for extent, smaller in zip(extents, powers, strict=True)]
    aligned = _grown(
        [divisors(n) if n else free for n, free in zip(inner, whole, strict=True)], voxel
    )
    count = math.prod(-(-n // side) for n, side in zip(extents, aligned, strict=True))
    if math.prod(aligned) * voxel >= LEAST_CHUNK or count <= HANDFUL:
        return aligned, ""
    found = _grown(whole, voxel)
    return found, (
        f"no chunks of {LEAST_CHUNK // 1024} KiB or more divide the shards of "
        f"{_chunk_words(extents)} voxels cut into {_chunk_words(cut)} parts; those written, of "
        f"{_chunk_words(found)} voxels, lie in several shards and are read by several ranks. Take "
        "numbers of parts that divide the extents"
    )


def default_chunk_side(extent: int) -> int:
    """Takes a power of two that is at most a quarter of the extent and at most 32.

    For files that are written before a grid is known.

    >>> [default_chunk_side(extent) for extent in (1, 6, 32, 100, 512)]
    [1, 1, 8, 16, 32]
    """
    return 1 << (max(1, min(extent // 4, 32)).bit_length() - 1)


def _grown(choices: Sequence[set[int]], voxel: int) -> ChunkSides:
    """Chooses a side for each dim, so that the chunk is as equal-sided and large as it may be.

    Where they cannot all be equal the outermost is the smallest, so that a slab is thin.
    """
    ladders = [sorted(choice) for choice in choices]
    place = [0] * len(ladders)
    growing = set(range(len(ladders)))
    while growing:
        dim = min(growing, key=lambda d: (ladders[d][place[d]], -d))
        place[dim] += 1
        fits = place[dim] < len(ladders[dim])
        if not fits or math.prod(_sides_at(ladders, place)) * voxel > MOST_CHUNK:
            place[dim] -= 1
            growing.remove(dim)
    return _sides_at(ladders, place)


def _sides_at(ladders: Sequence[Sequence[int]], place: Sequence[int]) -> ChunkSides:
    return tuple(ladder[i] for ladder, i in zip(ladders, place, strict=True))


def divisors(number: int) -> set[int]:
    """Finds the whole numbers that divide another one."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return {*small, *(number // n for n in small)}


def _chunk_words(numbers: Sequence[int]) -> str:
    return " x ".join(map(str, numbers))


HDF5_SIEVE = 65536
"""The least that HDF5 reads where a piece begins [B]."""

FILE_BUFFER = 4096
"""The least that Python's files read where a piece begins [B]."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Describes how the volume of a sample lies in its file.

    ``shape``: the shape of the stored array, whose dims have an ``order``. ``chunk``: None if it is
    in one piece. ``size``: the stored bytes of all of it. ``buffer``: the bytes that are read at
    least where a piece begins. ``bridged``: hyperslab reads it itself, short gaps too, see
    `read_strided`. ``packed``: it is one stream, which is read up to the end of a box, or
    (``whole``) completely.
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
class ReadCost:
    """Counts what reading one box takes: bytes from the file, and pieces that are asked for."""

    box: int  # bytes of the box itself
    read: int
    requests: int


MOST_BOXES = 1 << 20
"""Limits the ranks of a replica whose boxes are listed."""


def replica_boxes(shape: Sequence[int], extents: Mapping[str, int]) -> list[Box]:
    """Lists the boxes (C, d, h, w) of the ranks of a replica.

    Raises:
        LayoutError: an axis has more ranks than the volume has voxels along it; or there are more
            than `MOST_BOXES`.
    """
    intervals: list[tuple[Interval, ...]] = [((0, shape[0]),)]
    for axis, extent in zip(AXES[1:], shape[1:], strict=True):
        parts = extents.get(axis, 1)
        if parts > extent:
            raise LayoutError(f"cannot cut {axis} {extent} into {parts}; use {axis}<={extent}")
        intervals.append(Cut.balanced(axis, extent, parts).intervals)
    if (ranks := math.prod(map(len, intervals))) > MOST_BOXES:
        raise LayoutError(f"a replica of {ranks} ranks is too large; use {MOST_BOXES} at most")
    return [Box.of(place) for place in itertools.product(*intervals)]


def read_cost(storage: Storage, box: Box) -> ReadCost:
    """Computes what reading ``box`` (C, d, h, w) takes."""
    stored = storage.order.to_file(box, storage.shape)
    own = box.size * storage.itemsize
    if storage.packed:
        ends = [hi - 1 for hi in stored.hi]
        last = 0
        for end, extent in zip(ends, storage.shape, strict=True):
            last = last * extent + end
        share = 1.0 if storage.whole else (last + 1) / math.prod(storage.shape)
        return ReadCost(own, round(storage.size * share), 1)
    if storage.chunk is not None:
        grids = zip(storage.shape, storage.chunk, strict=True)
        each = storage.size / max(1, math.prod(-(-n // c) for n, c in grids))
        places = zip(stored.lo, stored.hi, storage.chunk, strict=True)
        count = math.prod(-(-hi // c) - lo // c for lo, hi, c in places)
        return ReadCost(own, round(each * count), count)
    if storage.bridged:
        outer, span = plan_strided_read(storage.shape, storage.itemsize, stored)
        count = math.prod(stored.shape[:outer])
        return ReadCost(own, count * span, count)
    return ReadCost(own, *_pieces(storage, stored))


def _pieces(storage: Storage, box: Box) -> tuple[int, int]:
    """Counts bytes and requests for a box of what is stored in one piece, from its lowest byte."""
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


def storage_advice(storage: Storage, costs: Sequence[ReadCost], extents: Mapping[str, int]) -> str:
    """Advises what to change where much more is read than wanted; empty if nothing is gained."""
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
