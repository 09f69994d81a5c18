"""Distributes loss functions: torch's own on the block, then the global mean or sum.

Elementwise losses first; then those against labels, the class of every voxel or its
probabilities, cut like the volume.

Legend: N batch, C classes, S the spatial dims, of which there may be none; logits (N, C, *S).
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F

from hyperslab.comm import all_reduce_sum
from hyperslab.errors import LayoutError
from hyperslab.geometry import Partition
from hyperslab.kernels.memory_format import HALF
from hyperslab.kernels.registry import device_kind
from hyperslab.ops.elementwise import apply_pointwise
from hyperslab.ops.operands import common_partition, operand_block
from hyperslab.ops.overloads import Operator, register_each, run_composed
from hyperslab.ops.placement import with_whole
from hyperslab.ops.reductions import look_for_metrics, mean, sum_of
from hyperslab.tensor import Sharded, register
from hyperslab.util.torch_internals import EnableTorchFunction


def check_reduction(
    reduction: str,
    size_average: bool | None = None,
    reduce: bool | None = None,
    *,
    also: Sequence[str] = (),
) -> None:
    if size_average is not None or reduce is not None:
        raise LayoutError("size_average and reduce are long deprecated; use reduction=")
    if reduction not in ("none", "mean", "sum", *also):
        raise ValueError(f"{reduction} is not a valid value for reduction")


def _check_loss_shapes(
    name: str,
    tensors: Sequence[torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    *,
    same_shape: bool,
) -> None:
    """Requires one global shape of all tensors, and weights that broadcast to it or have it."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(set(shapes)) > 1:
        raise LayoutError(
            f"{name}: input {' and '.join(map(str, shapes[:-1]))} and target {shapes[-1]} differ "
            "in shape\n    reshape one of them; a loss that broadcasts is almost always a mistake"
        )
    for key, weight in weights.items():
        own = tuple(weight.shape)
        fits = len(own) <= len(shapes[0]) and all(
            a in (1, b) for a, b in zip(reversed(own), reversed(shapes[0]), strict=False)
        )
        if not fits or (same_shape and own != shapes[0]):
            raise LayoutError(
                f"{name}: {key} {own} must "
                f"{'have the shape' if same_shape else 'broadcast to the shape'} {shapes[0]} of "
                "the input"
            )


def reduce_losses(losses: Sharded, reduction: str) -> torch.Tensor:
    """Reduces a block of losses to the global mean or sum, or returns the losses themselves."""
    if reduction == "none":
        return losses
    if reduction == "mean":
        return mean(losses)
    total = sum_of(torch.sum, losses)
    return total / losses.shape[0] if reduction == "batchmean" else total


@dataclass(frozen=True, slots=True)
class LossTraits:
    """Describes how torch reads the arguments of an elementwise loss.

    ``tensors``: so many of the first arguments have one shape. ``reductions``: further ones that
    it knows. ``same_shape``: the weight is not broadcast. ``weighted_mean``: the mean is divided
    by the sum of the weight.
    """

    tensors: int = 2
    reductions: tuple[str, ...] = ()
    same_shape: bool = False
    weighted_mean: bool = False


_LOSS_TRAITS: Mapping[Operator, LossTraits] = {
    F.mse_loss: LossTraits(same_shape=True, weighted_mean=True),
    F.l1_loss: LossTraits(same_shape=True, weighted_mean=True),
    F.huber_loss: LossTraits(same_shape=True),
    F.smooth_l1_loss: LossTraits(),
    F.binary_cross_entropy: LossTraits(),
    F.binary_cross_entropy_with_logits: LossTraits(),
    F.kl_div: LossTraits(reductions=("batchmean",)),
    F.poisson_nll_loss: LossTraits(),
    F.soft_margin_loss: LossTraits(),
    F.hinge_embedding_loss: LossTraits(),
    F.margin_ranking_loss: LossTraits(tensors=3),
}


@register_each(*_LOSS_TRAITS)
def elementwise_loss(function: Operator, *args: object, **kwargs: object) -> torch.Tensor:
    """Runs elementwise; mean and sum are global, one ordinary number equal on all ranks."""
    traits = _LOSS_TRAITS[function]
    names = _argument_names(function)
    options: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    if function is F.l1_loss:
        options.setdefault("weight", _weight_of_l1_loss())
    reduction = options.pop("reduction", "mean")
    size_average = options.pop("size_average", None)
    reduce = options.pop("reduce", None)
    check_reduction(reduction, size_average, reduce, also=traits.reductions)
    operands = [options.pop(name) for name in names[: traits.tensors]]
    weights = {k: v for k, v in options.items() if isinstance(v, torch.Tensor)}
    _check_loss_shapes(function.__name__, operands, weights, same_shape=traits.same_shape)
    if reduction != "none" and _is_whole((*operands, *weights.values())):
        others = {key: value for key, value in options.items() if key not in weights}
        return _of_whole(function, operands, weights, {**others, "reduction": reduction})
    losses = apply_pointwise(function, operands, {**options, "reduction": "none"})
    weight = options.get("weight")
    if traits.weighted_mean and reduction == "mean" and weight is not None:
        with EnableTorchFunction():  # or torch would ask for no rule inside of one
            return losses.sum() / weight.sum()
    return reduce_losses(losses, reduction)


@functools.cache
def _argument_names(function: Operator) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _is_whole(operands: Iterable[torch.Tensor]) -> bool:
    """Tells whether no operand is cut: torch's own loss of the blocks is the global one.

    Not of half precision, which is summed as float32.
    """
    return not any(
        (isinstance(t, Sharded) and t.partition.axes) or t.dtype in HALF for t in operands
    )


def _of_whole(
    function: Operator,
    operands: Sequence[torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Runs torch's own loss, for one number, on operands and weights that are not cut."""
    like = next(t for t in (*operands, *weights.values()) if isinstance(t, Sharded))
    look_for_metrics(like)
    blocks = [t.block if isinstance(t, Sharded) else t for t in (*operands, *weights.values())]
    named = dict(zip(weights, blocks[len(operands) :], strict=True))
    loss: torch.Tensor = function(*blocks[: len(operands)], **options, **named)
    return loss


def _weight_of_l1_loss() -> torch.Tensor | None:
    """Finds the weight of the current call, which torch (up to 2.13) does not pass to our rule.

    ``F.l1_loss`` passes on all of its arguments but this one. Only the local variables of torch's
    own frame still have it; without them a weighted loss would silently be computed without its
    weight, and refusing every call in case there is one would refuse the plain loss, too.
    """
    frame = sys._getframe()
    while frame.f_code is not F.l1_loss.__code__:
        if frame.f_back is None:
            return None
        frame = frame.f_back
    weight: torch.Tensor | None = frame.f_locals["weight"]
    return weight


@register(F.multilabel_soft_margin_loss)
def multilabel_soft_margin_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Averages over the last dim, as torch does, and over the rest globally."""
    check_reduction(reduction, size_average, reduce)
    weights = {} if weight is None else {"weight": weight}
    _check_loss_shapes("multilabel_soft_margin_loss", [input, target], weights, same_shape=False)
    run = F.multilabel_soft_margin_loss
    return cast(torch.Tensor, run_composed(run, input, target, weight, reduction=reduction))


@register(F.triplet_margin_loss)
def triplet_margin_loss(
    anchor: torch.Tensor,
    positive: torch.Tensor,
    negative: torch.Tensor,
    margin: float = 1.0,
    p: float = 2,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Takes distances over the last dim, cut or not; mean and sum are global."""
    check_reduction(reduction, size_average, reduce)
    return triplet_margin_with_distance_loss(
        anchor,
        positive,
        negative,
        distance_function=functools.partial(F.pairwise_distance, p=p, eps=eps),
        margin=margin,
        swap=swap,
        reduction=reduction,
    )


@register(F.triplet_margin_with_distance_loss)
def triplet_margin_with_distance_loss(
    anchor: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Calls the function with cut tensors; mean and sum are global."""
    if not anchor.dim() == positive.dim() == negative.dim():
        raise LayoutError(
            "the anchor, positive and negative examples of a triplet loss must have as many dims, "
            f"not {anchor.dim()}, {positive.dim()} and {negative.dim()}"
        )
    run = F.triplet_margin_with_distance_loss
    return cast(torch.Tensor, run_composed(run, anchor, positive, negative, **options))


@register(F.gaussian_nll_loss)
def gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """Runs elementwise; the variance is a number or a tensor, cut or not; mean, sum are global."""
    check_reduction(reduction)
    if isinstance(var, torch.Tensor):
        var = _variance(input, var)
    _check_loss_shapes("gaussian_nll_loss", [input, target], {}, same_shape=True)
    options = {"full": full, "eps": eps, "reduction": "none"}
    losses = apply_pointwise(F.gaussian_nll_loss, (input, target, var), options)
    return reduce_losses(losses, reduction)


def _variance(input: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    """Gives the variance the input's dims; torch lets one be missing or have extent 1."""
    if tuple(var.shape) == tuple(input.shape[:-1]):
        with EnableTorchFunction():
            var = var.unsqueeze(-1)
    other = [b for a, b in zip(input.shape, var.shape, strict=False) if a != b]
    if var.dim() != input.dim() or other not in ([], [1]):
        raise LayoutError(
            f"gaussian_nll_loss: var {tuple(var.shape)} must have the shape {tuple(input.shape)} "
            "of the input; the last dim may be missing, or one dim have extent 1"
        )
    return var


@register_each(
    {
        "cross_entropy": "Takes classes or probabilities cut like the volume; "
        "averages over all counted voxels.",
        "nll_loss": "Takes classes cut like the volume; averages over all counted voxels.",
    }
)
def label_loss(
    function: Operator,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    **more: float,
) -> torch.Tensor:
    """Computes a loss of logits and labels, of which at least one is cut, by ``function``.

    Distribution scheme: 1. redistribute a `Sharded` that is cut otherwise, and take this rank's
    part of an ordinary tensor (equal on all ranks), 2. run torch's own loss on the block, for its
    sum and for the sum of the weights of the labels that count, 3. all-reduce both in one message.

    Raises:
        IndexError: on the CPU, on all ranks: some rank holds a label that is no class.
    """
    check_reduction(reduction, size_average, reduce)
    options = {"ignore_index": ignore_index, **more}
    if isinstance(weight, Sharded):
        raise LayoutError(f"{function.__name__}: the weight of the classes is an ordinary tensor")
    classes = _are_classes(function, input, target)
    if reduction != "none" and _is_whole((input, target)):
        with suppress(IndexError):  # below it says which labels there are
            call = {"weight": weight, "reduction": reduction, **options}
            return _of_whole(function, (input, target), {}, call)
    like, partition, block, labels = _blocks(function, input, target, classes)
    if reduction == "none":
        losses = function(block, labels, weight, reduction="none", **options)
        return like.like(losses, partition.without_dim(1))
    try:
        # Half precision is summed in float32.
        half = block.dtype in HALF
        loss = function(block, labels, weight, reduction="none" if half else "sum", **options)
        dtype = loss.dtype
        loss = loss.sum(dtype=torch.float32) if half else loss
        counted = _divisor_of_mean(block, labels, weight, ignore_index)
    except IndexError:  # this rank must not leave the others waiting for its part
        loss = block.new_zeros(())
        dtype = block.dtype
        counted = block.new_full((), -math.inf)
    group = like.grid.group(partition.axes)
    both = torch.stack([loss.double(), counted.double()])
    whole, count = all_reduce_sum(both, group, f"the mean of {function.__name__}")
    readable = like.grid.has_values and device_kind(count) == "cpu"
    if readable and count == -math.inf:
        kept = labels[labels.long() != ignore_index]
        found = f"has labels {kept.min()} to {kept.max()}" if kept.numel() else "has no labels"
        raise IndexError(
            f"{function.__name__}: a label is out of range: neither ignore_index "
            f"({ignore_index}) nor one of the {input.shape[1]} classes of the input "
            f"{tuple(input.shape)}\n    this rank {found}"
        )
    return (whole if reduction == "sum" else whole / count).to(dtype)


def _are_classes(function: Operator, input: torch.Tensor, target: torch.Tensor) -> bool:
    """Tells whether labels are classes or probabilities."""
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
    return classes


def _blocks(
    function: Operator, input: torch.Tensor, target: torch.Tensor, classes: bool
) -> tuple[Sharded, Partition, torch.Tensor, torch.Tensor]:
    """Returns a cut operand, the partition of the logits, and this rank's logits and labels."""
    with EnableTorchFunction():
        wide = target.unsqueeze(1) if classes else target
    operands = [
        with_whole(value, (1,), function.__name__) if isinstance(value, Sharded) else value
        for value in (input, wide)
    ]
    partition = common_partition(operands, function)
    like = next(value for value in operands if isinstance(value, Sharded))
    block, labels = (operand_block(value, target=partition, like=like) for value in operands)
    return like, partition, block, labels.squeeze(1) if classes else labels


def _divisor_of_mean(
    block: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | None, ignore_index: int
) -> torch.Tensor:
    """Computes the divisor of torch's mean: the weights of the labels that are not ignored."""
    if labels.dim() == block.dim():
        return block.new_full((), labels.numel() / labels.shape[1], dtype=torch.float64)
    labels = labels.long()
    count = labels != ignore_index
    if weight is None:
        return count.sum()
    return weight.detach()[labels.where(count, 0)].where(count, 0).sum(dtype=torch.float64)
