"""Losses: elementwise on the block, then the global mean or sum."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.errors import LayoutError
from hyperslab.nn.pointwise import apply_pointwise
from hyperslab.nn.reduce import mean, sum
from hyperslab.tensor import Sharded, register


def _register_loss(function: Callable[..., torch.Tensor], *names: str) -> None:
    """``names``: the loss's own arguments after the reduction, in their order."""

    def rule(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Elementwise losses; mean and sum are global, one ordinary number on all ranks."""
        order = (*_LEADING, *names)
        options = {**dict(zip(order, args, strict=False)), **kwargs}
        if function is F.l1_loss:
            options.setdefault("weight", _weight_of_l1_loss())
        reduction = _reduction(options)
        if tuple(input.shape) != tuple(target.shape):
            raise LayoutError(
                f"{function.__name__}: input {tuple(input.shape)} and target "
                f"{tuple(target.shape)} differ in shape\n    reshape one of them; a loss that "
                "broadcasts is almost always a mistake"
            )
        losses = apply_pointwise(function, (input, target), {**options, "reduction": "none"})
        if reduction == "none":
            return losses
        weight = options.get("weight")
        if reduction == "mean" and weight is not None:
            return sum(losses) / (sum(weight) if isinstance(weight, Sharded) else weight.sum())
        return mean(losses) if reduction == "mean" else sum(losses)

    register(function, family="loss")(rule)


def _weight_of_l1_loss() -> Any:
    """The weight of the call under way, which torch (up to 2.13) does not hand to our rule."""
    frame = sys._getframe()
    while frame.f_code is not F.l1_loss.__code__:
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return frame.f_locals["weight"]


_LEADING = ("size_average", "reduce", "reduction")


def _reduction(options: dict[str, Any]) -> str:
    if options.pop("size_average", None) is not None or options.pop("reduce", None) is not None:
        raise LayoutError("size_average and reduce are long deprecated; use reduction=")
    reduction = str(options.pop("reduction", "mean"))
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return reduction


_register_loss(F.mse_loss, "weight")
_register_loss(F.l1_loss, "weight")
_register_loss(F.smooth_l1_loss, "beta")
