"""Which rank of a grid decides how long its steps take, as ranks are placed on a machine."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from hyperslab.comm.grid import AXES
from hyperslab.machine import Machine
from hyperslab.plan.job import VolumeShape

_Numbers = NDArray[np.int64]

_FARTHER = 10
"""A neighbour on another node counts as so many on another socket."""


def slowest_rank(extents: Mapping[str, int], inputs: VolumeShape, machine: Machine) -> int:
    """Of the ranks with most neighbours, and blocks as the first of these has, the worst placed.

    ``inputs`` is (N, C, D, H, W). All others wait for that rank, for neighbours exchange halos.

    A line of eight ranks, four on a node: ranks 3 and 4 talk over the network.

    >>> from hyperslab.machine import load_machine
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


def _farness(ranks: _Numbers, peers: _Numbers, machine: Machine) -> _Numbers:
    sockets = ranks // machine.ranks_per_socket != peers // machine.ranks_per_socket
    nodes = ranks // machine.ranks_per_node != peers // machine.ranks_per_node
    return sockets.astype(np.int64) + _FARTHER * nodes


def _as_the_first(parts: int, extent: int, *, inside: bool) -> NDArray[np.bool_]:
    """Along an axis, the places with two neighbours (if any) and shards as the first of them."""
    at = np.arange(parts)
    larger = at < extent % parts
    if not inside or parts < 3:
        return larger == larger[0]
    return (at > 0) & (at < parts - 1) & (larger == larger[1])
