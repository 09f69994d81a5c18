"""Marks, packed and unpacked by torch: the reference of the compiled kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hyperslab.ops.kernels.fused.layout import bit_bytes, pooled_shape, winner_bytes


def passes(u: torch.Tensor, slope: float) -> torch.Tensor:
    """Where the activation hands a gradient on unscaled, as torch's relu and leaky relu do."""
    if slope == 1:
        return torch.ones_like(u, dtype=torch.bool)
    return ~(u <= 0) if slope == 0 else u > 0


def in_memory_order(x: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """The elements in the order in which they lie in a tensor of this format."""
    if memory_format == torch.contiguous_format:
        return x.reshape(-1)
    return x.movedim(1, -1).reshape(-1)


def in_place(
    elements: torch.Tensor, shape: Sequence[int], memory_format: torch.memory_format
) -> torch.Tensor:
    """The adjoint of `in_memory_order`: a tensor of this shape and format."""
    if memory_format == torch.contiguous_format:
        return elements.view(*shape)
    return elements.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def bits_of(flags: torch.Tensor) -> torch.Tensor:
    """Booleans, eight to a byte, the first one lowest."""
    padded = flags.new_zeros(-(-len(flags) // 8) * 8)
    padded[: len(flags)] = flags
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=flags.device)
    return (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def flags_of(bits: torch.Tensor, count: int) -> torch.Tensor:
    """The adjoint of `bits_of`: ``count`` booleans."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits[:, None] >> places & 1).view(-1)[:count].bool()


def bits_in(
    marks: torch.Tensor, shape: Sequence[int], memory_format: torch.memory_format
) -> torch.Tensor:
    """Whether each element passes the gradient, from marks that begin with bits."""
    count = math.prod(shape)
    bits = marks[: bit_bytes(shape, 0, has_norm=False)]
    return in_place(flags_of(bits, count), shape, memory_format)


def winners_in(
    marks: torch.Tensor,
    shape: Sequence[int],
    pool: Sequence[int],
    memory_format: torch.memory_format,
) -> torch.Tensor:
    """The winner of every tile of a block of this shape, from marks that end with winners."""
    begin = len(marks) - winner_bytes(shape, pool, maximum=True)
    return in_place(marks[begin:], pooled_shape(shape, pool), memory_format)
