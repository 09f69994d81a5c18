"""Sums of the gradient of u and of its product with x: gradients of shift and scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.ops.kernels.fused.chain_backward import gradient_of_u
from hyperslab.ops.kernels.fused.chain_forward import normalized
from hyperslab.ops.kernels.fused.layout import check_scales, extents_of, format_of
from hyperslab.ops.kernels.fused.marks import passes


def reference(
    g: torch.Tensor,
    marks: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
) -> torch.Tensor:
    """(2, 1 or N, C) as ``scale`` in float64: see the schema."""
    check_scales(x.shape, [extents_of(scale), extents_of(shift)])
    passing = None if slope == 1 else passes(normalized(x, scale, shift), slope)
    du = gradient_of_u(g, marks, passing, format_of(x), slope, pool, maximum, x.shape).double()
    products = torch.stack([du, du * x])
    sums = products.flatten(3).sum(3) if x.dim() > 2 else products
    return sums if len(scale) == len(x) else sums.sum(1, keepdim=True)
