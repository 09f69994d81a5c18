"""Elementwise losses: torch's own on the block, then the global mean or sum."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.errors import LayoutError
from hyperslab.ops.common.forms import Operator, register_each
from hyperslab.ops.elementwise.pointwise import apply_pointwise
from hyperslab.ops.reductions.sums import mean, sum
from hyperslab.ops.views.reshape import unsqueeze
from hyperslab.tensor import Sharded, register


def check_reduction(
    reduction: str,
    size_average: bool | None = None,
    reduce: bool | None = None,
    *,
    also: Sequence[str] = (),
) -> None:
    """Refuse what is no reduction of a loss.

    Raises:
        LayoutError: the deprecated options ``size_average`` or ``reduce`` are used.
        ValueError: it is none of "none", "mean", "sum" and ``also``.
    """
    if size_average is not None or reduce is not None:
        raise LayoutError("size_average and reduce are long deprecated; use reduction=")
    if reduction not in ("none", "mean", "sum", *also):
        raise ValueError(f"{reduction} is not a valid value for reduction")


def _check_shapes(
    name: str,
    tensors: Sequence[torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    *,
    same_shape: bool,
) -> None:
    """Tensors of one global shape; weights that broadcast to it, or have it as well."""
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
    """The global mean or sum of a block of losses, or the losses themselves."""
    if reduction == "none":
        return losses
    if reduction == "batchmean":
        return sum(losses) / losses.shape[0]
    return mean(losses) if reduction == "mean" else sum(losses)


@dataclass(frozen=True, slots=True)
class LossTraits:
    """How torch reads the arguments of an elementwise loss.

    ``tensors``: so many of the first arguments have one shape. ``reductions``: further ones that
    it knows. ``same_shape``: the weight is not broadcast. ``weighted_mean``: the mean is divided
    by the sum of the weight.
    """

    tensors: int = 2
    reductions: tuple[str, ...] = ()
    same_shape: bool = False
    weighted_mean: bool = False


_TRAITS: Mapping[Operator, LossTraits] = {
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


@register_each(*_TRAITS, family="losses")
def elementwise_loss(function: Operator, *args: object, **kwargs: object) -> torch.Tensor:
    """Elementwise; mean and sum are global, one ordinary number equal on all ranks."""
    traits = _TRAITS[function]
    signature = _signature(function)
    options: dict[str, Any] = dict(signature.bind(*args, **kwargs).arguments)
    if function is F.l1_loss:
        options.setdefault("weight", _weight_of_l1_loss())
    reduction = options.pop("reduction", "mean")
    size_average = options.pop("size_average", None)
    reduce = options.pop("reduce", None)
    check_reduction(reduction, size_average, reduce, also=traits.reductions)
    operands = [options.pop(name) for name in list(signature.parameters)[: traits.tensors]]
    weights = {k: v for k, v in options.items() if isinstance(v, torch.Tensor)}
    _check_shapes(function.__name__, operands, weights, same_shape=traits.same_shape)
    losses = apply_pointwise(function, operands, {**options, "reduction": "none"})
    weight = options.get("weight")
    if traits.weighted_mean and reduction == "mean" and weight is not None:
        return sum(losses) / (sum(weight) if isinstance(weight, Sharded) else weight.sum())
    return reduce_losses(losses, reduction)


@functools.cache
def _signature(function: Operator) -> inspect.Signature:
    return inspect.signature(function)


def _weight_of_l1_loss() -> torch.Tensor | None:
    """The weight of the call under way, which torch (up to 2.13) does not hand to our rule.

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


@register(F.multilabel_soft_margin_loss, family="losses")
def multilabel_soft_margin_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Averaged over the last dim, as torch does, and over the rest globally."""
    check_reduction(reduction, size_average, reduce)
    weights = {} if weight is None else {"weight": weight}
    _check_shapes("multilabel_soft_margin_loss", [input, target], weights, same_shape=False)

    def losses(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        found = -(y * F.logsigmoid(x) + (1 - y) * F.logsigmoid(-x))
        return found if weight is None else found * weight

    each = apply_pointwise(losses, (input, target, weight), {})
    each = mean(each, each.dim() - 1)
    return reduce_losses(each, reduction)


@register(F.gaussian_nll_loss, family="losses")
def gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """Elementwise; the variance is a number or a tensor, cut or not; mean and sum are global."""
    check_reduction(reduction)
    if isinstance(var, torch.Tensor):
        var = _variance(input, var)
    _check_shapes("gaussian_nll_loss", [input, target], {}, same_shape=True)
    options = {"full": full, "eps": eps, "reduction": "none"}
    losses = apply_pointwise(F.gaussian_nll_loss, (input, target, var), options)
    return reduce_losses(losses, reduction)


def _variance(input: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    """The variance with the input's dims; torch lets one of them be missing or have extent 1."""
    if tuple(var.shape) == tuple(input.shape[:-1]):
        var = add_dim(var, -1)
    other = [b for a, b in zip(input.shape, var.shape, strict=False) if a != b]
    if var.dim() != input.dim() or other not in ([], [1]):
        raise LayoutError(
            f"gaussian_nll_loss: var {tuple(var.shape)} must have the shape {tuple(input.shape)} "
            "of the input; the last dim may be missing, or one dim have extent 1"
        )
    return var


def add_dim(x: torch.Tensor, dim: int) -> torch.Tensor:
    """``unsqueeze``, of a cut tensor by its rule: inside a rule torch asks no other."""
    return unsqueeze(x, dim) if isinstance(x, Sharded) else x.unsqueeze(dim)
