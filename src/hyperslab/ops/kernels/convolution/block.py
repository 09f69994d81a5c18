"""The three passes over a block, without a graph, by the variant that is chosen for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.ops.kernels.convolution.chosen import chosen
from hyperslab.ops.kernels.convolution.layout import (
    as_wanted,
    computes_last,
    in_channels_last,
    in_rows,
    no_view,
)
from hyperslab.ops.kernels.convolution.options import (
    ConvOptions,
    Kernels,
    Problem,
    Task,
    problem_for,
)
from hyperslab.ops.kernels.convolution.torchs_own import (
    Gradients,
    own_backward,
    own_forward,
)


def conv_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
    padding: Sequence[int],
    kernels: Kernels = "fixed",
) -> torch.Tensor:
    """The convolution of a block, without a graph."""
    problem = problem_of("forward", x, weight, bias, options, padding, kernels)
    if problem is None:
        return own_forward(as_wanted(x, weight, kernels), weight, bias, options, padding)
    return no_view(chosen(problem, kernels, in_channels_last(x), weight, bias))


def conv_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    options: ConvOptions,
    padding: Sequence[int],
    needs: Sequence[bool],
    kernels: Kernels = "fixed",
) -> Gradients:
    """Gradients of input, weight and bias of `conv_forward`; None where ``needs`` is false.

    Where a graph is recorded they are torch's own, which can be differentiated again.
    """
    problem = problem_of("weight", x, weight, None, options, padding, kernels)
    if problem is None or torch.is_grad_enabled():
        gradient = as_wanted(gradient, weight, kernels)
        x = as_wanted(x, weight, kernels)
        return own_backward(gradient, x, weight, options, padding, needs)
    g = in_channels_last(gradient)
    dx = None
    dw = None
    db = None
    if needs[0]:
        dx = chosen(problem.of("input"), kernels, g, weight, None)
    if needs[1]:
        dw, db = chosen(problem, kernels, in_channels_last(x), g, weight, needs[2])
        if weight.is_leaf and weight.is_contiguous():
            dw = in_rows(dw)  # or autograd would copy it so
    elif needs[2]:
        db = sum_over_space(g)
    return dx, dw, db


def sum_over_space(g: torch.Tensor) -> torch.Tensor:
    """The gradient of a bias; added up in float64."""
    return torch.ops.hyperslab.channel_sums(g, 0)[0].to(g.dtype)


def problem_of(
    task: Task,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
    padding: Sequence[int],
    kernels: Kernels,
) -> Problem | None:
    """What is to be computed in channels last; None: leave it, or the error in it, to torch."""
    fits = (
        computes_last(x, weight, kernels)
        and x.dim() == weight.dim() == len(padding) + 2
        and 0 not in x.shape
        and 0 not in weight.shape
        and x.shape[1] == weight.shape[1] * options.groups
        and weight.shape[0] % options.groups == 0
        and (bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1]))
    )
    if not fits:
        return None
    problem = problem_for(task, x.shape, weight.shape, x.dtype, options, tuple(padding))
    return problem if min(problem.y[2:]) > 0 else None
