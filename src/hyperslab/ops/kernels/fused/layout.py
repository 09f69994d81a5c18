"""How blocks, numbers of channels, tiles and marks lie in memory, for all fused kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hyperslab.memory_format import CHANNELS_LAST

MOST_IN_TILE = 256  # a winner is one byte


def format_of(x: torch.Tensor) -> torch.memory_format:
    """Channels last if ``x`` is that and not contiguous; contiguous for all other strides.

    A tensor of one voxel a sample is both. Its strides then say which it is: as torch makes them,
    of ones in contiguous memory, of the number of channels in channels last.
    """
    last = CHANNELS_LAST.get(x.dim())
    if last is None or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    if x.is_contiguous() and x.stride(-1) != x.shape[1]:
        return torch.contiguous_format
    return last


def pooled_shape(shape: Sequence[int], pool: Sequence[int]) -> list[int]:
    """Of the result of a chain on a block of this shape.

    Raises:
        ValueError: tiles do not cover it.
    """
    if not pool:
        return list(shape)
    if len(pool) != len(shape) - 2 or any(e % p for e, p in zip(shape[2:], pool, strict=True)):
        raise ValueError(
            f"tiles {list(pool)} do not cover extents {list(shape[2:])}; pool with torch's own"
        )
    return [*shape[:2], *(e // p for e, p in zip(shape[2:], pool, strict=True))]


def bit_bytes(shape: Sequence[int], slope: float, has_norm: bool) -> int:
    """Bytes of the bits in the marks of a block of this shape; see the package."""
    return 0 if has_norm or slope == 1 else -(-math.prod(shape) // 8)


def winner_bytes(shape: Sequence[int], pool: Sequence[int], maximum: bool) -> int:
    """Bytes of the winners in the marks of a block of this shape.

    Raises:
        ValueError: tiles do not cover it, or have too many elements.
    """
    result = pooled_shape(shape, pool)
    if not (maximum and pool):
        return 0
    if math.prod(pool) > MOST_IN_TILE:
        raise ValueError(
            f"maximum over tiles {list(pool)} of more than {MOST_IN_TILE} elements: "
            "pool with torch's own"
        )
    return math.prod(result)


def check_norm(
    shape: Sequence[int], norm: Sequence[int] | None, through: Sequence[int] | None = None
) -> None:
    """The numbers of a normalisation, by their shapes, are those of the block's channels.

    Raises:
        ValueError: ``norm`` is not (3, 1 or N, C), or ``through`` not (2, ...) beside it.
    """
    rows = None if norm is None else norm[1]
    fits = norm is None or (list(norm) == [3, rows, shape[1]] and rows in (1, shape[0]))
    if not fits or (through is not None and list(through) != [2, rows, shape[1]]):
        raise ValueError(
            f"numbers of shapes {[list(t) for t in (norm, through) if t is not None]} for a block "
            f"of shape {list(shape)}: its norm must be [3, 1 or {shape[0]}, {shape[1]}]"
        )


def extents_of(parts: torch.Tensor | None) -> torch.Size | None:
    """Their shape, if there are any."""
    return None if parts is None else parts.shape


def per_channel(parts: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """(count, 1 or N, C) as (count, 1 or N, C, 1, ...) in the type in which ``x`` is computed."""
    return parts.to(computed_in(x)).view(*parts.shape, *[1] * (x.dim() - 2))


def computed_in(x: torch.Tensor) -> torch.dtype:
    """Float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
