"""Into the cut and out of it: shard and gather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyperslab.comm import Grid, all_reduce_sum
from hyperslab.errors import LayoutError
from hyperslab.tensor.inputs.handed_in import Batch, Form, check_form, part_held, partition_of
from hyperslab.tensor.inputs.same_sample import check_same_sample
from hyperslab.tensor.sharded import Sharded

_Part = tuple[slice, ...]
_Axes = tuple[str, ...]


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
    """Cut out this rank's box of a tensor that all ranks of ``group`` hold.

    Backward: the gradient of the one tensor, equal on all of them: the average over the grid's
    ranks of the boxes' gradients put in their places, which is the serial gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, part: _Part, grid: Grid, axes: _Axes
    ) -> torch.Tensor:
        ctx.part = part
        ctx.grid = grid
        ctx.axes = axes
        ctx.shape = tensor.shape
        block = tensor[part]
        # Not view_as, which gives a batch of one other strides: torch asks for them.
        return block.clone() if grid.size > 1 else torch.ops.aten.alias(block)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grid = ctx.grid
        if grid.size == 1:
            return gradient, None, None, None
        whole = gradient.new_zeros(ctx.shape)
        whole[ctx.part] = gradient
        group = grid.group(ctx.axes)
        whole = all_reduce_sum(whole, group, "the adjoint of shard") / grid.size
        return whole, None, None, None


def shard(
    tensor: torch.Tensor,
    grid: Grid,
    *,
    channels: bool = True,
    batch: Batch = "global",
    check: bool = True,
) -> Sharded:
    """Cut a full tensor, batch included, that every rank holds; differentiable. All ranks call it.

    For tests and small data: a data set from `hyperslab.open` never holds a whole sample. The
    batch (dim 0) is cut by data, the dims after batch and channel by depth, height, width. Say
    ``channels=False`` where there is no channel dim, such as for labels (batch, D, H, W).

    Ranks that share a sample each cut their own copy of it. That these are equal, bit by bit, the
    ranks find out by a checksum in one small message, in the time of reading the tensor once. On
    a CUDA device nobody waits for that message but at the first tensor of a shape and type; of
    later ones the outcome is looked at when the next ones are cut.

    Args:
        tensor: the mini-batch.
        grid: the ranks.
        channels: whether dim 1 is one of channels.
        batch: ``"global"``: the tensor is the whole mini-batch, of which each replica computes its
            part. ``"replica"``: it is the part of this rank's replica, as a sampler gives it that
            was told ``num_replicas=grid.data, rank=grid.coords["data"]``; every part has as many
            samples, and the result is `grid.data` times as long. ``"none"``: it is one volume
            without a batch dim, (channel, D, H, W), which torch's layers take as they do serially;
            the grid has ``data=1``.
        check: False sends no message and compares nothing.

    Raises:
        LayoutError: an extent has fewer elements than its axis has ranks, the ranks hand in
            tensors of different shapes or types, or ranks that share a sample different ones.
    """
    form = Form.of(tensor, channels=channels, batch=batch)
    if check:
        check_same_sample(tensor, form, grid)
    check_form(form)
    partition = partition_of(form, grid)
    held = part_held(form, grid.coords["data"])
    part = partition.box(grid.coords).slices(held)
    axes = tuple(a for a in grid.extents if not form.of_replica or a != "data")
    return Sharded.from_local(_Shard.apply(tensor, part, grid, axes), partition, grid)
