"""Losses against labels: the class of every voxel, or its probabilities, cut like the volume.

Legend: N batch, C classes, S the spatial dims, of which there may be none; logits (N, C, *S).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from hyperslab.comm import all_reduce_sum
from hyperslab.errors import LayoutError
from hyperslab.geometry import Partition
from hyperslab.ops.common.half_precision import HALF
from hyperslab.ops.common.operands import common_partition, operand_block
from hyperslab.ops.common.placement import check_channels
from hyperslab.ops.kernels.choose import device_kind
from hyperslab.ops.losses.elementwise import add_dim, check_reduction
from hyperslab.tensor import Sharded, register

_LossFunction = Callable[..., torch.Tensor]
_Options = Mapping[str, float]


@register(F.cross_entropy, family="losses")
def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Classes or probabilities cut like the volume; the mean is over the counted voxels of all."""
    check_reduction(reduction, size_average, reduce)
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return label_loss(F.cross_entropy, input, target, weight, reduction, options)


@register(F.nll_loss, family="losses")
def nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Classes cut like the volume; the mean is over the counted voxels of all ranks."""
    check_reduction(reduction, size_average, reduce)
    options = {"ignore_index": ignore_index}
    return label_loss(F.nll_loss, input, target, weight, reduction, options)


def label_loss(
    function: _LossFunction,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: str,
    options: _Options,
) -> torch.Tensor:
    """``function`` over logits and labels, of which at least one is cut.

    Distribution scheme: 1. a `Sharded` that is cut otherwise is redistributed, of an ordinary
    tensor (equal on all ranks) this rank's part is taken, 2. torch's own loss on the block: its
    sum, and the sum of the weights of the labels that count, 3. one all-reduce of the two.

    Raises:
        IndexError: on the CPU, on all ranks: some rank holds a label that is no class.
    """
    like, partition, block, labels = _blocks(function, input, target)
    if isinstance(weight, Sharded):
        raise LayoutError(f"{function.__name__}: the weight of the classes is an ordinary tensor")
    if reduction == "none":
        losses = function(block, labels, weight, reduction="none", **options)
        return like.like(losses, partition.without_dim(1))
    ignore_index = int(options["ignore_index"])
    try:
        loss, dtype = _sum(function, block, labels, weight, options)
        counted = _counted(block, labels, weight, ignore_index)
    except IndexError:  # this rank must not leave the others waiting for its part
        loss = block.new_zeros(())
        dtype = block.dtype
        counted = block.new_full((), -math.inf)
    group = like.grid.group(partition.axes)
    both = torch.stack([loss.double(), counted.double()])
    whole, count = all_reduce_sum(both, group, f"the mean of {function.__name__}")
    readable = like.grid.has_values and device_kind(count) == "cpu"
    if readable and count == -math.inf:
        raise IndexError(
            f"{function.__name__}: a label is out of range: neither ignore_index "
            f"({ignore_index}) nor one of the {input.shape[1]} classes of the input "
            f"{tuple(input.shape)}\n    this rank {_range_of(labels, ignore_index)}"
        )
    return (whole if reduction == "sum" else whole / count).to(dtype)


def _blocks(
    function: _LossFunction, input: torch.Tensor, target: torch.Tensor
) -> tuple[Sharded, Partition, torch.Tensor, torch.Tensor]:
    """This rank's logits and labels, the partition of the logits, and a tensor of the grid."""
    shape = tuple(input.shape)
    own = tuple(target.shape)
    classes = len(shape) > 1 and own == (shape[0], *shape[2:])
    if not classes and not (len(shape) > 1 and own == shape and function is F.cross_entropy):
        raise LayoutError(
            f"{function.__name__}: target {own} does not fit the input {shape}: an input "
            "(N, C, ...) goes with classes (N, ...)"
            + (" or probabilities (N, C, ...)" if function is F.cross_entropy else "")
            + "\n    a dim of extent 1 for the channels: target.squeeze(1)"
        )
    operands = [input, add_dim(target, 1) if classes else target]
    for value in operands:
        if isinstance(value, Sharded):
            check_channels(value, function.__name__)
    partition = common_partition(operands, function)
    like = next(value for value in operands if isinstance(value, Sharded))
    block, labels = (operand_block(value, target=partition, like=like) for value in operands)
    return like, partition, block, labels.squeeze(1) if classes else labels


def _sum(
    function: _LossFunction,
    block: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor | None,
    options: _Options,
) -> tuple[torch.Tensor, torch.dtype]:
    """The sum over the block, and torch's dtype for it; of half precision in float32."""
    if block.dtype in HALF:
        losses = function(block, labels, weight, reduction="none", **options)
        return losses.sum(dtype=torch.float32), losses.dtype
    loss = function(block, labels, weight, reduction="sum", **options)
    return loss, loss.dtype


def _counted(
    block: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | None, ignore_index: int
) -> torch.Tensor:
    """By what torch divides the mean: the weights of the labels that are not ignored, or all."""
    if labels.dim() == block.dim():
        return block.new_full((), labels.numel() / labels.shape[1], dtype=torch.float64)
    labels = labels.long()
    count = labels != ignore_index
    if weight is None:
        return count.sum()
    return weight.detach()[labels.where(count, 0)].where(count, 0).sum(dtype=torch.float64)


def _range_of(labels: torch.Tensor, ignore_index: int) -> str:
    kept = labels[labels.long() != ignore_index]
    return f"has labels {kept.min()} to {kept.max()}" if kept.numel() else "has no labels"
