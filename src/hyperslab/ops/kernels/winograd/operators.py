"""The operator as torch knows it: schema, reference, form on the meta device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.ops.kernels.fused.operators import FusedOperator, registered
from hyperslab.ops.kernels.winograd import compiled, reference


def _form(
    x: torch.Tensor, g: torch.Tensor, padding: Sequence[int], with_bias: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dw = x.new_empty((g.shape[1], x.shape[1], *reference.KERNEL))
    return dw, g.new_empty(g.shape[1] if with_bias else 0)


WINOGRAD_OPERATORS = (
    FusedOperator(
        # The gradients of weight (out, C, 3, 3, 3), contiguous, and of the bias (empty without
        # `with_bias`), in x's dtype; summed in float32. Windows go in steps of one and begin at
        # -padding. g: gradient of the result.
        "winograd_gradient(Tensor x, Tensor g, int[] padding, bool with_bias) -> (Tensor, Tensor)",
        reference.winograd_gradient,
        _form,
        compiled.compiled_winograd_gradient,
    ),
)

WINOGRAD_LIBRARY = registered(WINOGRAD_OPERATORS)
"""Keeps the registration alive."""
