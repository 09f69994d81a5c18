"""Places the ranks of a grid on nodes, so that few bytes of halos travel between nodes.

`places` chooses which positions share a node, `number_by_node` gives the ranks of a launcher the
numbers of these positions before they start, and `axes_in_nodes` says what was chosen.

Legend: *position* is a rank's number on the grid, the last axis fastest; *place* is its number if
nodes are filled one after the other.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.comm.launchers import AXES

SPATIAL_AXES = AXES[1:]
"""Lists the axes that cut volumes."""

CUBE = (1, 1, 1)
"""Stands for volumes of unknown depth, height and width: only their ratios count."""

Numbering = Callable[[Sequence[str]], Sequence[int]]
"""Gives each rank of a launcher another number, by the names of the machines of all."""


def places(
    extents: Mapping[str, int], per_node: int, volume: Sequence[int] = CUBE
) -> NDArray[np.int64]:
    """Return the place of each position of a grid with ``per_node`` ranks on every node.

    A node has a box of positions, of all such boxes the one with the fewest bytes of halos between
    nodes, for a ``volume`` of depth, height and width. The order of the positions stays if none has
    fewer bytes, and if the ranks do not fill whole nodes.

    >>> places({"depth": 2, "height": 4}, 4, (64, 64, 64)).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    >>> places({"depth": 4, "height": 2}, 4, (512, 64, 64)).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    >>> places({"depth": 4, "height": 2}, 4, (64, 512, 64)).tolist()
    [0, 4, 1, 5, 2, 6, 3, 7]
    """
    return _places(shape_of(extents), per_node, tuple(volume))


@functools.cache
def _places(shape: tuple[int, ...], per_node: int, volume: tuple[int, ...]) -> NDArray[np.int64]:
    in_order = np.arange(math.prod(shape))
    if len(in_order) % per_node:
        return in_order
    possible = [in_order, *(_box_by_box(shape, box) for box in _boxes(shape, per_node))]
    return min(possible, key=lambda found: _crossing(shape, found // per_node, volume))


def _boxes(shape: Sequence[int], ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield the boxes of so many positions by which the grid can be tiled, the widest first."""
    if not shape:
        if ranks == 1:
            yield ()
        return
    *outer, last = shape
    for part in range(min(last, ranks), 0, -1):
        if last % part == 0 and ranks % part == 0:
            yield from ((*others, part) for others in _boxes(outer, ranks // part))


def _box_by_box(shape: Sequence[int], box: Sequence[int]) -> NDArray[np.int64]:
    """Return the place of each position if the grid is filled box by box."""
    split = [n for whole, part in zip(shape, box, strict=True) for n in (whole // part, part)]
    positions = np.arange(math.prod(shape)).reshape(split)
    return np.argsort(np.moveaxis(positions, range(0, 8, 2), range(4)).ravel())


def share_between_nodes(
    extents: Mapping[str, int], nodes: Sequence[object], volume: Sequence[int] = CUBE
) -> float:
    """Return the share of the halos' bytes that travels between nodes, given each position's.

    >>> share_between_nodes({"depth": 4, "height": 2}, [0, 0, 0, 0, 1, 1, 1, 1], (64, 512, 64))
    0.32
    """
    shape, apart = shape_of(extents), range(len(nodes))
    everything = _crossing(shape, np.array(apart), volume)
    return _crossing(shape, np.asarray(nodes), volume) / everything if everything else 0.0


def _crossing(shape: Sequence[int], nodes: NDArray[Any], volume: Sequence[int]) -> int:
    """Add up the faces between blocks on different nodes, each as often as a sample has blocks."""
    total = 0
    for axis, extent in enumerate(volume, start=1):
        along = np.moveaxis(nodes.reshape(shape), axis, 0)
        pairs = int(np.count_nonzero(along[1:] != along[:-1]))
        total += pairs * shape[axis] * (math.prod(volume) // extent)
    return total


def number_by_node(
    hosts: Sequence[str], extents: Mapping[str, int] | None = None, volume: Sequence[int] = CUBE
) -> list[int]:
    """Return the number of each of a launcher's ranks, given their machines; the first stays so.

    The ranks of a machine follow each other; on a grid of these ``extents`` they have the `places`
    of its positions, if each machine has as many.

    >>> number_by_node(["n1", "n2", "n1", "n2"])
    [0, 2, 1, 3]
    >>> number_by_node(["n1"] * 4 + ["n2"] * 4, {"depth": 4, "height": 2}, (64, 512, 64))
    [0, 2, 4, 6, 1, 3, 5, 7]
    """
    counts = Counter(hosts)  # in the order of each one's first rank
    order = {host: at for at, host in enumerate(counts)}
    by_place = sorted(range(len(hosts)), key=lambda rank: order[hosts[rank]])
    position_at = np.arange(len(hosts))
    if extents and math.prod(extents.values()) == len(hosts) and len({*counts.values()}) == 1:
        position_at = np.argsort(places(extents, counts[hosts[0]], volume))
    numbers = np.empty_like(position_at)
    numbers[by_place] = position_at
    return [int(number) for number in numbers]


def axes_in_nodes(extents: Mapping[str, int], mates: Sequence[int]) -> str:
    """Say which axes lie inside a node, given the positions that the first node has.

    >>> axes_in_nodes({"data": 64, "depth": 2, "height": 4, "width": 4}, range(4))
    'width inside; depth, height and data across'
    >>> axes_in_nodes({"depth": 8, "height": 2}, range(4))
    'height and 2 of depth=8 inside; depth across'
    """
    shape = shape_of(extents)
    inside: list[str] = []
    across: list[str] = []
    for axis, extent, at in zip(AXES, shape, np.unravel_index(mates, shape), strict=True):
        here = len({*at.tolist()})
        if here > 1:
            inside.insert(0, axis if here == extent else f"{here} of {axis}={extent}")
        if here < extent:
            across.append(axis)
    across.sort(key=lambda axis: axis == "data")
    return f"{listed(inside) or 'no axis'} inside; {listed(across) or 'none'} across"


def listed(words: list[str]) -> str:
    """Join words as in a sentence.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def shape_of(extents: Mapping[str, int]) -> tuple[int, ...]:
    """Return the extents of all axes, in their order."""
    return tuple(extents.get(axis, 1) for axis in AXES)
