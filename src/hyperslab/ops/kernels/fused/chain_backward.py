"""The gradient of a chain's input."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.ops.kernels.fused.chain_forward import normalized
from hyperslab.ops.kernels.fused.layout import (
    check_norm,
    computed_in,
    extents_of,
    format_of,
    per_channel,
    pooled_shape,
)
from hyperslab.ops.kernels.fused.marks import bits_in, passes, winners_in
from hyperslab.ops.kernels.fused.tiles import spread_maximum, spread_mean


def reference(
    g: torch.Tensor,
    marks: torch.Tensor,
    x: torch.Tensor | None,
    norm: torch.Tensor | None,
    through: torch.Tensor | None,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """``scale * du + b * (x - mean) + c``: see the schema."""
    check_norm(shape, extents_of(norm), extents_of(through))
    memory_format = format_of(g if x is None else x)
    if slope == 1:
        passing = None
    elif norm is None:
        passing = bits_in(marks, shape, memory_format)
    else:
        assert x is not None, "the bits of a chain with a normalisation come from x"
        passing = passes(normalized(x, norm), slope)
    dx = gradient_of_u(g, marks, passing, memory_format, slope, pool, maximum, shape)
    if norm is not None:
        mean, scale, _ = per_channel(norm, dx)
        dx = dx * scale
        if through is not None:
            assert x is not None, "b is a factor of x"
            b, c = per_channel(through, dx)
            dx = dx + (x.to(dx.dtype) - mean) * b + c
    return torch.empty_like(dx, dtype=dtype, memory_format=memory_format).copy_(dx)


def gradient_of_u(
    g: torch.Tensor,
    marks: torch.Tensor,
    passing: torch.Tensor | None,
    memory_format: torch.memory_format,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    shape: Sequence[int],
) -> torch.Tensor:
    """``du`` of the chain; ``passing``: where the activation hands it on, None: everywhere."""
    if list(g.shape) != pooled_shape(shape, pool):
        raise ValueError(
            f"a gradient of shape {list(g.shape)} for a result of {pooled_shape(shape, pool)}"
        )
    da = g.to(computed_in(g))
    if pool and maximum:
        da = spread_maximum(da, winners_in(marks, shape, pool, memory_format), pool)
    elif pool:
        da = spread_mean(da, pool)
    if passing is None:
        return da
    return torch.where(passing, da, 0 if slope == 0 else da * slope)
