"""The operators as torch knows them: schemas, references, forms on the meta device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.memory_format import CHANNELS_LAST
from hyperslab.ops.kernels.direct import compiled, reference
from hyperslab.ops.kernels.fused.operators import FusedOperator, registered


def _form(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: Sequence[int],
    adjoint: bool,
) -> torch.Tensor:
    steps = zip(x.shape[2:], weight.shape[2:], padding, strict=True)
    extents = (e + 2 * p - k + 1 for e, k, p in steps)
    shape = (x.shape[0], weight.shape[1 if adjoint else 0], *extents)
    return x.new_empty(shape).contiguous(memory_format=CHANNELS_LAST[x.dim()])


def _gradient_form(
    x: torch.Tensor,
    g: torch.Tensor,
    kernel: Sequence[int],
    padding: Sequence[int],
    with_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    dw = x.new_empty((g.shape[1], x.shape[1], *kernel))
    return dw, g.new_empty(g.shape[1] if with_bias else 0)


DIRECT_OPERATORS = (
    FusedOperator(
        # y, channels last, in x's dtype; summed in float32. Windows go in steps of one and begin
        # at -padding. weight (out, C, *kernel); adjoint: (C, out, *kernel), turned round, which
        # with a padding of kernel - 1 - p is the gradient of the input of a convolution with p.
        "direct_convolution(Tensor x, Tensor weight, Tensor? bias, int[] padding, bool adjoint) "
        "-> Tensor",
        reference.direct_convolution,
        _form,
        compiled.compiled_convolution,
    ),
    FusedOperator(
        # The gradients of weight (out, C, *kernel), contiguous, and of the bias (empty without
        # `with_bias`). g: gradient of y.
        "direct_convolution_gradient(Tensor x, Tensor g, int[] kernel, int[] padding, "
        "bool with_bias) -> (Tensor, Tensor)",
        reference.direct_convolution_gradient,
        _gradient_form,
        compiled.compiled_gradient,
    ),
)


DIRECT_LIBRARY = registered(DIRECT_OPERATORS)
"""Keeps the registration alive."""
