"""Transposed convolution of a block: the same passes in another order, see the package."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.ops.kernels.convolution.block import sum_over_space
from hyperslab.ops.kernels.convolution.chosen import chosen
from hyperslab.ops.kernels.convolution.layout import (
    as_wanted,
    computes_last,
    in_channels_last,
    no_view,
)
from hyperslab.ops.kernels.convolution.options import ConvOptions, Kernels, Problem, problem_for
from hyperslab.ops.kernels.convolution.torchs_own import (
    Gradients,
    own_transposed,
    own_transposed_backward,
)


def transposed_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
    padding: Sequence[int],
    extra: Sequence[int],
    kernels: Kernels = "fixed",
) -> torch.Tensor:
    """The transposed convolution of a block, without a graph; ``extra`` is its output padding."""
    problem = _problem(x, weight, bias, options, padding, extra, kernels)
    if problem is None:
        x = as_wanted(x, weight, kernels)
        return own_transposed(x, weight, bias, options, padding, extra)
    return no_view(chosen(problem, kernels, in_channels_last(x), weight, bias))


def transposed_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    options: ConvOptions,
    padding: Sequence[int],
    extra: Sequence[int],
    needs: Sequence[bool],
    kernels: Kernels = "fixed",
) -> Gradients:
    """Gradients of input, weight and bias; None where ``needs`` is false.

    Where a graph is recorded they are torch's own, which can be differentiated again.
    """
    problem = _problem(x, weight, None, options, padding, extra, kernels)
    if problem is None or torch.is_grad_enabled():
        gradient = as_wanted(gradient, weight, kernels)
        x = as_wanted(x, weight, kernels)
        return own_transposed_backward(gradient, x, weight, options, padding, extra, needs)
    g = in_channels_last(gradient)
    dx = chosen(problem.of("forward"), kernels, g, weight, None) if needs[0] else None
    dw = None
    if needs[1]:
        coarse = in_channels_last(x)
        dw, _ = chosen(problem.of("weight"), kernels, g, coarse, weight, False)
    return dx, dw, sum_over_space(g) if needs[2] else None


def _problem(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
    padding: Sequence[int],
    extra: Sequence[int],
    kernels: Kernels,
) -> Problem | None:
    """What is to be computed in channels last; None: leave it, or the error in it, to torch."""
    fits = (
        computes_last(x, weight, kernels)
        and x.dim() == weight.dim() == len(padding) + 2
        and 0 not in x.shape
        and 0 not in weight.shape
        and x.shape[1] == weight.shape[0]
        and weight.shape[0] % options.groups == 0
        and (
            bias is None
            or (bias.dtype == x.dtype and len(bias) == weight.shape[1] * options.groups)
        )
    )
    if not fits:
        return None
    steps = zip(
        x.shape[2:], weight.shape[2:], options.stride, padding, options.dilation, extra, strict=True
    )
    extents = [(e - 1) * s - 2 * p + d * (k - 1) + 1 + more for e, k, s, p, d, more in steps]
    made = torch.Size([len(x), weight.shape[1] * options.groups, *extents])
    if min(extents) < 1:
        return None
    problem = problem_for("input", made, weight.shape, x.dtype, options, tuple(padding))
    return problem if problem.y == x.shape else None  # more output padding than stride
