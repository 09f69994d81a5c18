"""Between the one rank that holds a file's content and all ranks that hold its boxes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hyperslab.comm import Grid
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
    held = None if volume is None else torch.from_numpy(np.require(volume, requirements="W"))
    like = torch.from_numpy(np.empty(0, dtype))
    block = run_transfers(plan, held, like, grid, "the scatter of a volume from the main rank")
    assert block is not None
    return block.cpu().numpy()


def gather_to_main(x: Sharded) -> NDArray[Any] | None:
    """All of a cut tensor on the main rank, None on the others.

    Distribution scheme: 1. each rank sends its box to the main one, of ranks with equal copies
    only the first, 2. the main rank, which wants everything, puts them in their places.
    """
    whole = Box.whole(x.partition.shape)
    plan = plan_transfers(x.grid.rank, first_copies(x.partition, x.grid), {0: whole})
    block = x.local.detach().cpu()
    found = run_transfers(plan, block, block, x.grid, "the gather of a volume to the main rank")
    return None if found is None else found.numpy()


def first_copies(partition: Partition, grid: Grid) -> dict[int, Box]:
    """The boxes of the first ones among ranks with equal copies: they own each element once."""
    every = ((rank, grid.coords_of(rank)) for rank in range(grid.size))
    return {rank: partition.box(at) for rank, at in every if partition.is_first_copy(at)}


def run_transfers(
    plan: TransferPlan, held: torch.Tensor | None, like: torch.Tensor, grid: Grid, what: str
) -> torch.Tensor | None:
    """What the plan wants, of ``held``, which is its own box, and of what other ranks send.

    In new contiguous memory, of the type and on the device of ``like``. Message after message: who
    holds all of a volume has no room for it twice.

    Raises:
        CommError: another rank died or did not answer within the time limit.
    """
    for t in plan.sends:
        assert held is not None
        piece = _contiguous(held[t.box.slices(plan.own)]).to(grid.device)
        grid.halos.exchange([(t.rank, _bytes(piece))], [], what).wait()
    if plan.wanted is None:
        return None
    if held is not None and plan.kept == plan.wanted:
        part = held[plan.wanted.slices(plan.own)]
        return _contiguous(part).to(like.device, copy=True)
    found = like.new_empty(plan.wanted.shape)
    if held is not None and plan.kept is not None:
        found[plan.kept.slices(plan.wanted)] = held[plan.kept.slices(plan.own)].to(like.device)
    for t in plan.receives:
        piece = like.new_empty(t.box.shape, device=grid.device)
        grid.halos.exchange([], [(t.rank, _bytes(piece))], what).wait()
        found[t.box.slices(plan.wanted)] = piece.to(like.device)
    return found


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.resolve_conj().resolve_neg().contiguous()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: not every backend sends every type."""
    return x.reshape(-1).view(torch.uint8)
