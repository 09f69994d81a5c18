"""Which ranks of a grid stand for all: one for each kind of position."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from hyperslab.comm.grid import AXES, SPATIAL_AXES

PLACES = ("first", "inside", "last")


def positions(extents: Mapping[str, int]) -> dict[str, int]:
    """One rank for each kind of position in space, by a name such as "depth first, width inside".

    A rank has no neighbour on one side (first, last) or has both (inside), along each axis that
    cuts; those with equal words do the same work but for shards that are one element smaller: the
    first ranks of an axis have the larger ones. All are of the first replica.

    >>> positions({"depth": 3, "width": 2})
    {'depth first, width first': 0, 'depth first, width last': 1, 'depth inside, width first': 2,\
 'depth inside, width last': 3, 'depth last, width first': 4, 'depth last, width last': 5}
    """
    cut = [axis for axis in SPATIAL_AXES if extents.get(axis, 1) > 1]
    found = {}
    for at in itertools.product(*(_places(extents[axis]) for axis in cut)):
        words = ", ".join(f"{axis} {place}" for axis, (place, _) in zip(cut, at, strict=True))
        coords = {axis: index for axis, (_, index) in zip(cut, at, strict=True)}
        found[words or "alone"] = _rank(extents, coords)
    return found


def busiest(extents: Mapping[str, int]) -> int:
    """A rank with as many neighbours as any, and of those with the largest shards the first."""
    inside = {axis: 1 for axis in SPATIAL_AXES if extents.get(axis, 1) > 2}
    return _rank(extents, inside)


def _places(extent: int) -> list[tuple[str, int]]:
    if extent == 2:
        return [("first", 0), ("last", 1)]
    return list(zip(PLACES, (0, 1, extent - 1), strict=True))


def _rank(extents: Mapping[str, int], coords: Mapping[str, int]) -> int:
    rank = 0
    for axis in AXES:
        rank = rank * extents.get(axis, 1) + coords.get(axis, 0)
    return rank
