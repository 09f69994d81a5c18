"""Into the cut and out of it: shard and gather."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.comm import Grid, all_reduce_sum
from hyperslab.errors import LayoutError
from hyperslab.geometry import Partition
from hyperslab.tensor.sharded import Sharded


def gather(x: Sharded, axes: Sequence[str] | str) -> Sharded:
    """The same tensor, no longer cut along ``axes`` (names of the grid); differentiable.

    The ranks along those axes then hold equal copies and repeat each other's work: the
    documented way to run an operator that needs the whole extent.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    unknown = [name for name in names if name not in x.grid.extents]
    if unknown:
        raise LayoutError(f"no axis {unknown} in {x.grid}; axes are {', '.join(x.grid.extents)}")
    return x.redistribute(x.partition.without(names), f"gather along {', '.join(names)}")


class _Shard(torch.autograd.Function):
    """Cut out this rank's box of a tensor that all ranks hold.

    Backward: the gradient of the one global tensor, equal on all ranks: the average over ranks of
    the boxes' gradients put in their places, which is the serial gradient.
    """

    @staticmethod
    def forward(ctx, tensor, partition: Partition, grid: Grid):  # type: ignore[no-untyped-def]
        ctx.partition = partition
        ctx.grid = grid
        ctx.shape = tensor.shape
        box = partition.box(grid.coords)
        block = tensor[box.slices()]
        # Not view_as, which gives a batch of one other strides: torch asks for them.
        return block.clone() if grid.size > 1 else torch.ops.aten.alias(block)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        grid = ctx.grid
        if grid.size == 1:
            return gradient, None, None
        whole = gradient.new_zeros(ctx.shape)
        whole[ctx.partition.box(grid.coords).slices()] = gradient
        group = grid.group(tuple(grid.extents))
        return all_reduce_sum(whole, group, "the adjoint of shard") / grid.size, None, None


def shard(tensor: torch.Tensor, grid: Grid, *, channels: bool = True) -> Sharded:
    """Cut a full tensor, batch included, that every rank holds; differentiable.

    For tests and small data: a data set from `hyperslab.open` never holds a whole sample. The
    batch (dim 0) is cut by data, the dims after batch and channel by depth, height, width. Say
    ``channels=False`` where there is no channel dim, such as for labels (batch, D, H, W).

    Raises:
        LayoutError: an extent has fewer elements than its axis has ranks.
    """
    if isinstance(tensor, Sharded):
        raise LayoutError("the tensor is already cut; use redistribute or gather")
    partition = grid.partition(tensor.shape, channels=channels)
    return Sharded.from_local(_Shard.apply(tensor, partition, grid), partition, grid)
