"""How large the chunks of a file are, so that a box of the intended grid is whole chunks.

[Note: size of a chunk] HDF5 and Zarr read, and unpack, whole chunks. One that lies in two shards is
read by the ranks of both; so its sides divide the bounds of the shards. Small ones cost a seek and
an entry of the index each: below 64 KiB these take longer than the bytes. Large ones are read whole
for thin boxes; HDF5 keeps up to 1 MiB for those that ask again, and parallel file systems give out
stripes of 1 MiB. Hence sides as equal as can be, of at most 1 MiB together. All channels of a voxel
are in one chunk: no cut separates them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hyperslab.comm.grid import SPATIAL_AXES
from hyperslab.errors import LayoutError
from hyperslab.geometry import Cut

LEAST_CHUNK = 64 * 1024
"""A sensible chunk has no fewer bytes [B]."""

MOST_CHUNK = 1024 * 1024
"""Nor more [B]."""

HANDFUL = 64
"""So many chunks may be smaller: their cost is not felt."""

Sides = tuple[int, ...]


def sides(extents: Sequence[int], cut: Sequence[int], voxel: int) -> tuple[Sides, str]:
    """The sides (d, h, w) of a chunk, and a word where none that respects the cut is sensible.

    ``extents`` (D, H, W) are divided into ``cut`` parts each, as `Cut.balanced` does it; a
    ``voxel`` with all of its channels has so many bytes. The last chunk along a dim may be cut off.

    >>> sides((512, 512, 512), (2, 2, 2), 8)
    ((32, 64, 64), '')
    >>> sides((100, 100, 100), (3, 1, 1), 8)  # shards begin at 0, 34 and 67
    ((1, 100, 100), '')

    Raises:
        LayoutError: there are fewer voxels than parts along an axis.
    """
    cuts = [Cut.balanced(*one) for one in zip(SPATIAL_AXES, extents, cut, strict=True)]
    if any(one.thin for one in cuts):
        raise LayoutError(f"cannot cut {_words(extents)} voxels into {_words(cut)} parts")
    inner = [math.gcd(*one.bounds[1:-1]) for one in cuts]  # 0 where nothing is cut
    whole = [_divisors(extent) | _powers(extent) for extent in extents]
    aligned = _grown(
        [_divisors(n) if n else free for n, free in zip(inner, whole, strict=True)], voxel
    )
    count = math.prod(-(-n // side) for n, side in zip(extents, aligned, strict=True))
    if math.prod(aligned) * voxel >= LEAST_CHUNK or count <= HANDFUL:
        return aligned, ""
    found = _grown(whole, voxel)
    return found, (
        f"no chunks of {LEAST_CHUNK // 1024} KiB or more divide the shards of {_words(extents)} "
        f"voxels cut into {_words(cut)} parts; those written, of {_words(found)} voxels, lie in "
        "several shards and are read by several ranks. Take numbers of parts that divide the "
        "extents"
    )


def chunk_side(extent: int) -> int:
    """A power of two that is at most a quarter of the extent and at most 32.

    For files that are written before a grid is known.

    >>> [chunk_side(extent) for extent in (1, 6, 32, 100, 512)]
    [1, 1, 8, 16, 32]
    """
    return 1 << (max(1, min(extent // 4, 32)).bit_length() - 1)


def _grown(choices: Sequence[set[int]], voxel: int) -> Sides:
    """Of each dim's sides one, the chunk as equal-sided and as large as it may be.

    Where they cannot all be equal the outermost is the smallest, so that a slab is thin.
    """
    ladders = [sorted(choice) for choice in choices]
    place = [0] * len(ladders)
    growing = set(range(len(ladders)))
    while growing:
        dim = min(growing, key=lambda d: (ladders[d][place[d]], -d))
        place[dim] += 1
        fits = place[dim] < len(ladders[dim])
        if not fits or math.prod(_at(ladders, place)) * voxel > MOST_CHUNK:
            place[dim] -= 1
            growing.remove(dim)
    return _at(ladders, place)


def _at(ladders: Sequence[Sequence[int]], place: Sequence[int]) -> Sides:
    return tuple(ladder[i] for ladder, i in zip(ladders, place, strict=True))


def _divisors(number: int) -> set[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return {*small, *(number // n for n in small)}


def _powers(extent: int) -> set[int]:
    return {1 << n for n in range(extent.bit_length()) if 1 << n < extent}


def _words(numbers: Sequence[int]) -> str:
    return " x ".join(map(str, numbers))
