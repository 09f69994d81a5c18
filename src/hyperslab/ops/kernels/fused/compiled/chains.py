"""Chains, forward and backward, by the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.ops.kernels.fused import chain_backward as backward
from hyperslab.ops.kernels.fused import chain_forward as forward
from hyperslab.ops.kernels.fused.compiled.blocks import (
    CHAIN,
    STREAMED,
    TYPES,
    address,
    check_gradient,
    geometry,
    ready,
    ready_scale,
    suits,
)
from hyperslab.ops.kernels.fused.compiled.library import call, library, parts_for
from hyperslab.ops.kernels.fused.layout import (
    bit_bytes,
    check_scales,
    format_of,
    pooled_shape,
    winner_bytes,
)


def compiled_chain_forward(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    mark: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the schema."""
    functions = library()
    both = (scale is None) == (shift is None)
    if functions is None or dtype not in TYPES or not suits(x) or not both:
        return forward.reference(x, scale, shift, slope, pool, maximum, mark, dtype)
    shape = x.shape
    check_scales(shape, [scale, shift])
    scale = ready_scale(scale)
    shift = ready_scale(shift)
    memory_format = format_of(x)
    x = ready(x, memory_format)
    y = torch.empty(pooled_shape(shape, pool), dtype=dtype, memory_format=memory_format)
    bits = bit_bytes(shape, slope, scale is not None) if mark else 0
    winners = winner_bytes(shape, pool, maximum) if mark else 0
    marks = torch.zeros(bits + winners, dtype=torch.uint8)  # rows add bits to bytes that they share
    values = (
        x.data_ptr(),
        0,
        y.data_ptr(),
        address(marks) if bits else 0,
        address(marks) + bits if winners else 0,
        address(scale),
        address(shift),
        0,
        0,
        0,
        TYPES[x.dtype],
        0,
        TYPES[dtype],
        *geometry(shape, memory_format != torch.contiguous_format, scale, pool, maximum),
        y.nbytes >= STREAMED,
        slope,
    )
    call(functions.forward, CHAIN, values, parts_for(x))
    return y, marks


def compiled_chain_backward(
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
    """See the schema."""
    functions = library()
    plain = scale is None and b is None and c is None
    scaled = scale is not None and (slope == 1 or (x is not None and shift is not None))
    scaled = scaled and (b is None) == (c is None) and (b is None or x is not None)
    if functions is None or dtype not in TYPES or not suits(g, x) or not (plain or scaled):
        return backward.reference(
            g, marks, x, scale, shift, b, c, slope, pool, maximum, shape, dtype
        )
    check_scales(shape, [scale, shift, b, c])
    scale, shift, b, c = map(ready_scale, (scale, shift, b, c))
    memory_format = format_of(g if x is None else x)
    g = ready(g, memory_format)
    needs_x = x is not None and (b is not None or (scaled and slope != 1))
    x = ready(x, memory_format) if needs_x and x is not None else None
    check_gradient(g, marks, shape, slope, pool, maximum, scale is not None)
    bits = bit_bytes(shape, slope, scale is not None)
    dx = torch.empty(list(shape), dtype=dtype, memory_format=memory_format)
    values = (
        address(x),
        g.data_ptr(),
        dx.data_ptr(),
        marks.data_ptr() if bits else 0,
        marks.data_ptr() + bits,
        address(scale),
        address(shift),
        address(b),
        address(c),
        0,
        0 if x is None else TYPES[x.dtype],
        TYPES[g.dtype],
        TYPES[dtype],
        *geometry(shape, memory_format != torch.contiguous_format, scale, pool, maximum),
        dx.nbytes >= STREAMED,
        slope,
    )
    call(functions.backward, CHAIN, values, parts_for(dx))
    return dx
