"""The gradient of a chain's input."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.ops.kernels.fused.chain_forward import normalized
from hyperslab.ops.kernels.fused.layout import (
    check_scales,
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
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    b: torch.Tensor | None,
    c: torch.Tensor | None,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """``scale * du + b * x + c``: see the schema."""
    check_scales(shape, [extents_of(t) for t in (scale, shift, b, c)])
    memory_format = format_of(g if x is None else x)
    if slope == 1:
        passing = None
    elif scale is None:
        passing = bits_in(marks, shape, memory_format)
    else:
        assert x is not None, "the bits of a chain with a scale come from x"
        passing = passes(normalized(x, scale, shift), slope)
    dx = gradient_of_u(g, marks, passing, memory_format, slope, pool, maximum, shape)
    if scale is not None:
        dx = dx * per_channel(scale, dx)
    if b is not None:
        assert x is not None, "b is a factor of x"
        dx = dx + x.to(dx.dtype) * per_channel(b, dx)
    if c is not None:
        dx = dx + per_channel(c, dx)
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
