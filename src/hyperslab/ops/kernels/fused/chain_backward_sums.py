"""Sums of the gradient of u and of its product with x - mean: gradients of shift and scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.ops.kernels.fused.chain_backward import gradient_of_u
from hyperslab.ops.kernels.fused.chain_forward import normalized
from hyperslab.ops.kernels.fused.layout import check_norm, computed_in, format_of, per_channel
from hyperslab.ops.kernels.fused.marks import passes


def reference(
    g: torch.Tensor,
    marks: torch.Tensor,
    x: torch.Tensor,
    norm: torch.Tensor,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
) -> torch.Tensor:
    """(2, 1 or N, C) as ``norm`` in float64: see the schema."""
    check_norm(x.shape, norm.shape)
    passing = None if slope == 1 else passes(normalized(x, norm), slope)
    du = gradient_of_u(g, marks, passing, format_of(x), slope, pool, maximum, x.shape).double()
    products = torch.stack([du, du * (x.to(computed_in(x)) - per_channel(norm, x)[0])])
    sums = products.flatten(3).sum(3) if x.dim() > 2 else products
    return sums if norm.shape[1] == len(x) else sums.sum(1, keepdim=True)
