"""Between the one rank that holds a file's content and all ranks that hold its boxes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hyperslab.comm import Grid
from hyperslab.comm.host import as_bytes
from hyperslab.geometry import Box, Partition, TransferPlan, plan_transfers
from hyperslab.tensor.sharded import Sharded


def scatter_from_main(
    volume: NDArray[Any] | None, partition: Partition, dtype: np.dtype[Any], grid: Grid
) -> NDArray[Any]:
    """This rank's box of a volume that only the main rank has; `gather_to_main` is the way back.

    Distribution scheme: 1. the main rank owns everything and sends every other one its box, 2. each
    receives its own.
    """
    owned = {0: Box.whole(partition.shape)}
    wanted = {rank: partition.box(grid.coords_of(rank)) for rank in range(grid.size)}
    plan = plan_transfers(grid.rank, owned, wanted)
    block = _run(plan, volume, dtype, grid, "the scatter of a volume from the main rank")
    assert block is not None
    return block


def gather_to_main(x: Sharded) -> NDArray[Any] | None:
    """All of a cut tensor on the main rank, None on the others.

    Distribution scheme: 1. each rank sends its box to the main one, of ranks with equal copies
    only the first, 2. the main rank, which wants everything, puts them in their places.
    """
    grid = x.grid
    partition = x.partition
    every = ((rank, grid.coords_of(rank)) for rank in range(grid.size))
    owned = {rank: partition.box(at) for rank, at in every if partition.is_first_copy(at)}
    plan = plan_transfers(grid.rank, owned, {0: Box.whole(partition.shape)})
    block = x.local.cpu().numpy()
    return _run(plan, block, block.dtype, grid, "the gather of a volume to the main rank")


def _run(
    plan: TransferPlan, held: NDArray[Any] | None, dtype: np.dtype[Any], grid: Grid, what: str
) -> NDArray[Any] | None:
    """What the plan wants, of ``held``, which is its own box, and of what other ranks send.

    Message after message: the main rank has no room for all of a volume twice.
    """
    for t in plan.sends:
        assert held is not None
        piece = np.ascontiguousarray(held[t.box.slices(plan.own)])
        grid.halos.exchange([(t.rank, as_bytes(piece).to(grid.device))], [], what).wait()
    if plan.wanted is None:
        return None
    if held is not None and plan.kept == plan.wanted:
        return np.ascontiguousarray(held[plan.wanted.slices(plan.own)])
    found = np.empty(plan.wanted.shape, dtype)
    if held is not None and plan.kept is not None:
        found[plan.kept.slices(plan.wanted)] = held[plan.kept.slices(plan.own)]
    for t in plan.receives:
        piece = np.empty(t.box.shape, dtype)
        content = torch.empty(piece.nbytes, dtype=torch.uint8, device=grid.device)
        grid.halos.exchange([], [(t.rank, content)], what).wait()
        as_bytes(piece).copy_(content)
        found[t.box.slices(plan.wanted)] = piece
    return found
