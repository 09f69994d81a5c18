"""Lists all grids of a number of ranks, says which are not for a job, and finds the slowest rank.

`refusal` gives the error that training would raise; `slowest_rank` says which rank decides how
long a step takes, as ranks are placed on a machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from hyperslab.comm.grid import AXES, SPATIAL_AXES
from hyperslab.errors import LayoutError
from hyperslab.planner.job import GridJob, VolumeShape
from hyperslab.planner.machine import Machine
from hyperslab.planner.trace.recorder import Layers
from hyperslab.planner.trace.virtual_grid import MessageJournal, VirtualGrid
from hyperslab.recipe.schema import GridSection


def grids(ranks: int) -> Iterator[GridSection]:
    """Lists every grid of so many ranks, by data, depth, height and width, the largest first.

    >>> [tuple(grid.model_dump().values()) for grid in grids(2)]
    [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)]
    """
    for extents in _products(ranks, len(AXES)):
        data, depth, height, width = extents
        yield GridSection(data=data, depth=depth, height=height, width=width)


def _products(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    if factors == 1:
        yield (number,)
        return
    for first in reversed(_divisors(number)):
        for rest in _products(number // first, factors - 1):
            yield (first, *rest)


def _divisors(number: int) -> list[int]:
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})


def refusal(grid: GridSection, job: GridJob) -> str:
    """Returns the error that training on the grid would raise, in words; "" if it can be.

    A grid with more replicas than a mini-batch has samples would run, and repeat all work.
    """
    if grid.data > job.batch:
        return (
            f"a mini-batch of {job.batch} is not cut over {grid.data} replicas: they would repeat "
            "each other's work"
        )
    virtual = VirtualGrid(grid.model_dump(), 0, MessageJournal(Layers(), lambda: "forward"))
    try:
        virtual.partition(job.inputs)
    except LayoutError as error:
        return str(error)
    return ""


def box_extents(grid: GridSection, job: GridJob) -> tuple[int, ...]:
    """Returns D, H, W of the largest block that a rank has of a sample."""
    return tuple(
        -(-extent // getattr(grid, axis))
        for extent, axis in zip(job.about.shape[1:], SPATIAL_AXES, strict=True)
    )


def samples_each(grid: GridSection, job: GridJob) -> int:
    """Returns the most samples of a mini-batch that a replica has."""
    return -(-job.batch // grid.data)


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
