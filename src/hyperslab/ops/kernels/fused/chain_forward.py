"""Normalise, activate and pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.ops.kernels.fused.layout import (
    bit_bytes,
    check_norm,
    computed_in,
    extents_of,
    format_of,
    per_channel,
    winner_bytes,
)
from hyperslab.ops.kernels.fused.marks import bits_of, in_memory_order, passes
from hyperslab.ops.kernels.fused.tiles import maximum_of_tiles, mean_of_tiles


def reference(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    mark: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, differentiable, and the marks: see the schema."""
    check_norm(x.shape, extents_of(norm))
    winner_bytes(x.shape, pool, maximum)
    memory_format = format_of(x)
    u = normalized(x, norm)
    y = activated(u, slope)
    kept = []
    if mark and bit_bytes(x.shape, slope, norm is not None):
        kept.append(bits_of(in_memory_order(passes(u, slope), memory_format)))
    if pool and maximum:
        y, winner = maximum_of_tiles(y, pool)
        if mark:
            kept.append(in_memory_order(winner, memory_format))
    elif pool:
        y = mean_of_tiles(y, pool)
    y = torch.empty_like(y, dtype=dtype, memory_format=memory_format).copy_(y)
    return y, torch.cat(kept) if kept else x.new_empty(0, dtype=torch.uint8)


def forward_into(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    mark: bool,
    y: torch.Tensor,
) -> torch.Tensor:
    """The marks; the result is written into ``y``."""
    result, marks = torch.ops.hyperslab.chain_forward(x, norm, slope, pool, maximum, mark, y.dtype)
    y.copy_(result)
    return marks


def normalized(x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
    """``u`` of the chain, in the type in which it is computed."""
    u = x.to(computed_in(x))
    if norm is None:
        return u
    mean, scale, shift = per_channel(norm, x)
    return (u - mean) * scale + shift


def activated(u: torch.Tensor, slope: float) -> torch.Tensor:
    """``a`` of the chain."""
    if slope == 1:
        return u
    return torch.relu(u) if slope == 0 else torch.where(u > 0, u, u * slope)
