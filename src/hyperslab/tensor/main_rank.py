"""Between the one rank that holds a file's content and all ranks that hold its boxes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hyperslab.comm import Grid
from hyperslab.geometry import Box, Partition
from hyperslab.tensor import Sharded

Array = NDArray[Any]


def deal(volume: Array | None, partition: Partition, dtype: np.dtype[Any], grid: Grid) -> Array:
    """This rank's box of a volume that only the main rank has; `collect` is the way back.

    Distribution scheme: 1. the main rank sends every other one its box, 2. each receives its own.
    """
    mine = partition.box(grid.coords)
    if not grid.is_main:
        return _receive(mine.shape, dtype, 0, grid)
    assert volume is not None
    for rank in range(1, grid.size):
        _send(volume[_box(partition, rank, grid).slices()], rank, grid)
    return np.ascontiguousarray(volume[mine.slices()])


def collect(x: Sharded) -> Array | None:
    """All of a cut tensor on the main rank, None on the others.

    Distribution scheme: 1. each rank sends its box to the main one, of ranks with equal copies
    only the first, 2. the main rank puts them in their places.
    """
    grid, partition = x.grid, x.partition
    block = x.local.cpu().numpy()
    if not grid.is_main:
        if partition.is_first_copy(grid.coords):
            _send(block, 0, grid)
        return None
    whole = np.empty(partition.shape, block.dtype)
    whole[x.box.slices()] = block
    for rank in range(1, grid.size):
        if partition.is_first_copy(grid.coords_of(rank)):
            box = _box(partition, rank, grid)
            whole[box.slices()] = _receive(box.shape, block.dtype, rank, grid)
    return whole


def _box(partition: Partition, rank: int, grid: Grid) -> Box:
    return partition.box(grid.coords_of(rank))


def _send(values: Array, rank: int, grid: Grid) -> None:
    """As bytes: not every backend sends every type."""
    content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    dist.send(torch.from_numpy(content).to(grid.device), rank)


def _receive(shape: tuple[int, ...], dtype: np.dtype[Any], rank: int, grid: Grid) -> Array:
    values = np.empty(shape, dtype)
    content = torch.empty(values.nbytes, dtype=torch.uint8, device=grid.device)
    dist.recv(content, rank)
    values.reshape(-1).view(np.uint8)[:] = content.cpu().numpy()
    return values
