"""Differentiates linear maps by their adjoints, and refuses second derivatives of other maps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hyperslab.errors import UnsupportedOp
from hyperslab.util.torch_internals import BlockFunction

Backward = Callable[..., tuple[torch.Tensor | None, ...]]


def differentiable_once(operator: str) -> Callable[[Backward], Backward]:
    """Decorates the backward pass of an operator whose gradients cannot be differentiated again.

    With ``create_graph`` the gradients are right and look differentiable; differentiating them
    raises an `UnsupportedOp` that names the operator. Torch's own `once_differentiable` lets a
    gradient that it thinks constant pass, which leaves a term out without a word.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def run(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            graph = torch.is_grad_enabled()
            with torch.no_grad():
                found = backward(ctx, *gradients)
            if not graph:
                return found
            mark = torch.zeros((), requires_grad=True)
            return tuple(g if g is None else _Refused.apply(g, mark, operator) for g in found)

        return run

    return decorate


class _Refused(torch.autograd.Function):
    """Passes a gradient on, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, mark: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise UnsupportedOp(
            f"the gradient of {ctx.name} cannot be differentiated again\n"
            f"    omit create_graph=True, or keep results of {ctx.name} out of the penalty"
        )


TensorMap = Callable[[torch.Tensor], torch.Tensor]


class LinearMap(BlockFunction):
    """Applies a map to a tensor, and its adjoint to the gradient; saves nothing.

    ``linear`` is the map without its constant, if it has one. Of a cut tensor the map gets the
    block, whose alias is no node of the graph in here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        run: TensorMap,
        adjoint: TensorMap,
        linear: TensorMap | None = None,
    ) -> torch.Tensor:
        ctx.both = (linear or run, adjoint)
        return run(x if type(x) is torch.Tensor else torch.Tensor.as_subclass(x, torch.Tensor))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        linear, adjoint = ctx.both
        if not torch.is_grad_enabled():
            return adjoint(gradient), None, None, None
        return LinearMap.apply(gradient, adjoint, linear), None, None, None
