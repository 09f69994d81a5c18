"""Elementwise losses: torch's own on the block, then the global mean or sum."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.errors import LayoutError
from hyperslab.ops.elementwise.pointwise import apply_pointwise
from hyperslab.ops.reductions.sums import mean, sum
from hyperslab.ops.views.reshape import unsqueeze
from hyperslab.tensor import Sharded, register


def reduction_of(options: dict[str, Any], *more: str) -> str:
    """Take the reduction out of a loss's options.

    Raises:
        LayoutError: the deprecated options are used.
        ValueError: it is none of "none", "mean", "sum" and ``more``.
    """
    if options.pop("size_average", None) is not None or options.pop("reduce", None) is not None:
        raise LayoutError("size_average and reduce are long deprecated; use reduction=")
    reduction = str(options.pop("reduction", "mean"))
    if reduction not in ("none", "mean", "sum", *more):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return reduction


def _check_shapes(
    name: str, tensors: list[Any], weights: dict[str, Any], *, same_shape: bool
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


def reduce_losses(losses: Any, reduction: str) -> Any:
    """The global mean or sum of a block of losses, or the losses themselves."""
    if reduction == "none":
        return losses
    if reduction == "batchmean":
        return sum(losses) / losses.shape[0]
    return mean(losses) if reduction == "mean" else sum(losses)


def _register_loss(
    function: Callable[..., torch.Tensor],
    *,
    tensors: int = 2,
    reductions: tuple[str, ...] = (),
    same_shape: bool = False,
    weighted_mean: bool = False,
) -> None:
    """Register an elementwise loss whose first ``tensors`` arguments have one shape.

    ``reductions``: further ones that torch knows. ``same_shape``: torch does not broadcast the
    weight. ``weighted_mean``: torch divides the mean by the sum of the weight.
    """
    signature = inspect.signature(function)

    def rule(*args: Any, **kwargs: Any) -> Any:
        """Elementwise; mean and sum are global, one ordinary number equal on all ranks."""
        options = dict(signature.bind(*args, **kwargs).arguments)
        if function is F.l1_loss:
            options.setdefault("weight", _weight_of_l1_loss())
        reduction = reduction_of(options, *reductions)
        operands = [options.pop(name) for name in list(signature.parameters)[:tensors]]
        weights = {k: v for k, v in options.items() if isinstance(v, torch.Tensor)}
        _check_shapes(function.__name__, operands, weights, same_shape=same_shape)
        losses = apply_pointwise(function, operands, {**options, "reduction": "none"})
        weight = options.get("weight")
        if weighted_mean and reduction == "mean" and weight is not None:
            return sum(losses) / (sum(weight) if isinstance(weight, Sharded) else weight.sum())
        return reduce_losses(losses, reduction)

    register(function, family="loss")(rule)


def _weight_of_l1_loss() -> Any:
    """The weight of the call under way, which torch (up to 2.13) does not hand to our rule."""
    frame = sys._getframe()
    while frame.f_code is not F.l1_loss.__code__:
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return frame.f_locals["weight"]


_register_loss(F.mse_loss, same_shape=True, weighted_mean=True)
_register_loss(F.l1_loss, same_shape=True, weighted_mean=True)
_register_loss(F.huber_loss, same_shape=True)
_register_loss(F.smooth_l1_loss)
_register_loss(F.binary_cross_entropy)
_register_loss(F.binary_cross_entropy_with_logits)
_register_loss(F.kl_div, reductions=("batchmean",))
_register_loss(F.poisson_nll_loss)
_register_loss(F.soft_margin_loss)
_register_loss(F.hinge_embedding_loss)
_register_loss(F.margin_ranking_loss, tensors=3)


@register(F.multilabel_soft_margin_loss, family="loss")
def multilabel_soft_margin_loss(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """Averaged over the last dim, as torch does, and over the rest globally."""
    given = {"size_average": size_average, "reduce": reduce, "reduction": reduction}
    kind, name = reduction_of(given), "multilabel_soft_margin_loss"
    _check_shapes(
        name, [input, target], {} if weight is None else {"weight": weight}, same_shape=False
    )

    def losses(x: Any, y: Any, weight: Any) -> torch.Tensor:
        found = -(y * F.logsigmoid(x) + (1 - y) * F.logsigmoid(-x))
        return found if weight is None else found * weight

    each = apply_pointwise(losses, (input, target, weight), {})
    return reduce_losses(mean(each, -1), kind)


@register(F.gaussian_nll_loss, family="loss")
def gaussian_nll_loss(
    input: Any,
    target: Any,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:
    """Elementwise; the variance is a number or a tensor, cut or not; mean and sum are global."""
    kind = reduction_of({"reduction": reduction})
    if isinstance(var, torch.Tensor):
        var = _variance(input, var)
    _check_shapes("gaussian_nll_loss", [input, target], {}, same_shape=True)
    options = {"full": full, "eps": eps, "reduction": "none"}
    return reduce_losses(apply_pointwise(F.gaussian_nll_loss, (input, target, var), options), kind)


def _variance(input: Any, var: Any) -> Any:
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


def add_dim(x: Any, dim: int) -> Any:
    """``unsqueeze``, of a cut tensor by its rule: inside a rule torch asks no other."""
    return unsqueeze(x, dim) if isinstance(x, Sharded) else x.unsqueeze(dim)
