"""Lists all grids of a number of ranks, says which are not for a job, and finds the slowest rank.

`refusal` gives the error that training would raise; `slowest_rank` says which rank decides how
long a step takes, as ranks are placed on a machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from hyperslab.comm.grid import AXES
from hyperslab.errors import LayoutError
from hyperslab.planner.job import GridJob, VolumeShape
from hyperslab.planner.machine import Machine
from hyperslab.planner.trace.virtual_grid import VirtualGrid
from hyperslab.recipe.schema import GridSection


def grids(ranks: int) -> Iterator[GridSection]:
    """Lists every grid of so many ranks, by data, depth, height and width, the largest first.

    >>> [tuple(grid.model_dump().values()) for grid in grids(2)]
    [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)]
    """
    divisors = [n for n in range(ranks, 0, -1) if ranks % n == 0]
    for data, depth, height in itertools.product(divisors, repeat=3):
        width, rest = divmod(ranks, data * depth * height)
        if rest == 0:
            yield GridSection(data=data, depth=depth, height=height, width=width)


def refusal(grid: GridSection, job: GridJob) -> str:
    """Returns the error that training on the grid would raise, in words; "" if it can be.

    A grid with more replicas than a mini-batch has samples would run, and repeat all work.
    """
    if grid.data > job.batch:
        return (
            f"a mini-batch of {job.batch} is not cut over {grid.data} replicas: they would repeat "
            "each other's work"
        )
    try:
        VirtualGrid(grid.model_dump()).partition(job.inputs)
    except LayoutError as error:
        return str(error)
    return ""


def words_of(grid: GridSection) -> str:
    """Writes a grid as in a recipe's overrides.

    >>> words_of(GridSection(data=2, height=4))
    'data=2 height=4'
    """
    cut = {axis: extent for axis, extent in grid.model_dump().items() if extent > 1}
    return " ".join(f"{axis}={extent}" for axis, extent in cut.items()) or "data=1"


_RankNumbers = NDArray[np.int64]

_NODE_FARNESS = 10
"""Weighs a neighbour on another node as so many on another socket."""


def slowest_rank(extents: Mapping[str, int], inputs: VolumeShape, machine: Machine) -> int:
    """Finds the worst placed of the ranks with most neighbours and the largest blocks.

    ``inputs`` is (N, C, D, H, W). All others wait for that rank, for neighbours exchange halos.

    A line of eight ranks, four on a node: ranks 3 and 4 talk over the network.

    >>> from hyperslab.planner.machine import load_machine
    >>> slowest_rank({"depth": 8}, (1, 4, 64, 64, 64), load_machine("lassen-v100"))
    3
    """
    shape = tuple(extents.get(axis, 1) for axis in AXES)
    ranks = np.arange(np.prod(shape)).reshape(shape)
    far = np.zeros(shape)
    alike = np.ones(shape, dtype=bool)
    cut = (inputs[0], *inputs[2:])
    for dim, (parts, extent) in enumerate(zip(shape, cut, strict=True)):
        # Views with the axis in front, through which the arrays are written.
        along = np.moveaxis(far, dim, 0)
        numbers = np.moveaxis(ranks, dim, 0)
        if dim > 0:
            links = _farness(numbers[:-1], numbers[1:], machine)
            along[:-1] += links
            along[1:] += links
        np.moveaxis(alike, dim, 0)[~_as_the_first(parts, extent, inside=dim > 0)] = False
    return int(ranks[alike][np.argmax(far[alike])])


def _farness(ranks: _RankNumbers, peers: _RankNumbers, machine: Machine) -> _RankNumbers:
    sockets = ranks // machine.ranks_per_socket != peers // machine.ranks_per_socket
    nodes = ranks // machine.ranks_per_node != peers // machine.ranks_per_node
    return sockets.astype(np.int64) + _NODE_FARNESS * nodes


def _as_the_first(parts: int, extent: int, *, inside: bool) -> NDArray[np.bool_]:
    """Marks the places with two neighbours (if any) and a shard as large as the first's."""
    at = np.arange(parts)
    larger = at < extent % parts
    if not inside or parts < 3:
        return larger == larger[0]
    return (at > 0) & (at < parts - 1) & (larger == larger[1])
