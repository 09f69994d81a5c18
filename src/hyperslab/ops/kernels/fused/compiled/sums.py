"""Sums by channel, forward and backward, by the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.ops.kernels.fused import chain_backward_sums, channel_sums
from hyperslab.ops.kernels.fused.compiled.blocks import (
    CHAIN,
    TYPES,
    Geometry,
    address,
    check_gradient,
    geometry,
    ready,
    ready_scale,
    suits,
)
from hyperslab.ops.kernels.fused.compiled.library import Library, call, library, parts_for
from hyperslab.ops.kernels.fused.layout import check_scales, format_of


def compiled_channel_sums(x: torch.Tensor, groups: int) -> torch.Tensor:
    """See the schema."""
    functions = library()
    if functions is None or not suits(x):
        return channel_sums.reference(x, groups)
    memory_format = format_of(x)
    x = ready(x, memory_format)
    samples, channels = x.shape[:2]
    last = memory_format != torch.contiguous_format
    if last:
        rows = samples if groups else 1
        blocks = (samples, 1, 1, x[0, 0].numel(), channels, rows, 1, 1, 1, 0)
        slices = rows * channels
    else:
        slices = samples * groups or channels
        count = slices if groups else samples * channels
        blocks = (count, 1, 1, x.numel() // max(1, count), 1, slices, 1, 1, 1, 0)
    sums = _sums(functions, blocks, slices, x=x)
    if last and groups:
        sums = sums.view(2, samples, groups, channels // groups).sum(3)
    return sums.view(2, -1)


def compiled_backward_sums(
    g: torch.Tensor,
    marks: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
) -> torch.Tensor:
    """See the schema."""
    functions = library()
    if functions is None or not suits(g, x):
        return chain_backward_sums.reference(g, marks, x, scale, shift, slope, pool, maximum)
    check_scales(x.shape, [scale, shift])
    check_gradient(g, marks, x.shape, slope, pool, maximum, True)
    memory_format = format_of(x)
    last = memory_format != torch.contiguous_format
    sums = _sums(
        functions,
        geometry(x.shape, last, scale, pool, maximum),
        scale.numel(),
        x=ready(x, memory_format),
        g=ready(g, memory_format),
        winners=marks,
        scale=ready_scale(scale),
        shift=ready_scale(shift),
        slope=slope,
    )
    return sums.view(2, *scale.shape)


def _sums(
    functions: Library,
    blocks: Geometry,
    slices: int,
    *,
    x: torch.Tensor,
    g: torch.Tensor | None = None,
    winners: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    slope: float = 1.0,
) -> torch.Tensor:
    """Each part of the work has sums of its own."""
    parts = parts_for(x)
    sums = torch.zeros(parts, 2, slices, dtype=torch.float64)
    values = (
        x.data_ptr(),
        address(g),
        0,
        0,
        address(winners),
        address(scale),
        address(shift),
        0,
        0,
        sums.data_ptr(),
        TYPES[x.dtype],
        0 if g is None else TYPES[g.dtype],
        0,
        *blocks,
        0,
        slope,
    )
    call(functions.sums, CHAIN, values, parts)
    return sums[0] if parts == 1 else sums.sum(0)
