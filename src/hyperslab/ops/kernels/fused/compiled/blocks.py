"""Tensors in the words of the C code: types, blocks, scales, tiles."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from hyperslab.ops.kernels.fused.layout import bit_bytes, pooled_shape, winner_bytes

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""As ``rows.h`` numbers them."""

CHAIN = struct.Struct("@10q3q6q4q1q1d2q")
"""``chain`` of ``chain.h``."""

STREAMED = 16 << 20
"""[B] Results from this size on do not stay in the caches until they are read."""

Geometry = tuple[int, ...]
"""blocks, depth, height, width, channels, scale_rows, tiles of three extents, maximum."""


def address(x: torch.Tensor | None) -> int:
    """Of its first element; 0 for none."""
    return 0 if x is None else x.data_ptr()


def ready(x: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """``x`` dense in this format: itself where it is."""
    return (
        x
        if x.is_contiguous(memory_format=memory_format)
        else x.contiguous(memory_format=memory_format)
    )


def ready_scale(scale: torch.Tensor | None) -> torch.Tensor | None:
    """In float32 and contiguous: itself where it is."""
    return scale if scale is None else scale.float().contiguous()


def suits(*tensors: torch.Tensor | None) -> bool:
    """Whether the C code knows their types and numbers of dims; it does not do nothing."""
    return all(
        t is None or (t.dtype in TYPES and 2 <= t.dim() <= 5 and t.numel() > 0) for t in tensors
    )


def check_gradient(
    g: torch.Tensor,
    marks: torch.Tensor,
    shape: Sequence[int],
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    has_scale: bool,
) -> None:
    """The C code reads as many gradients and marks as a block of this shape has.

    Raises:
        ValueError: these are not so many.
    """
    result = pooled_shape(shape, pool)
    count = bit_bytes(shape, slope, has_scale) + winner_bytes(shape, pool, maximum)
    if list(g.shape) != result or marks.numel() < count or not marks.is_contiguous():
        raise ValueError(
            f"a gradient of shape {list(g.shape)} and {marks.numel()} bytes of marks for a chain "
            f"on {list(shape)}, whose result has shape {result} and which keeps {count} bytes"
        )


def geometry(
    shape: Sequence[int],
    channels_last: bool,
    scale: torch.Tensor | None,
    pool: Sequence[int],
    maximum: bool,
) -> Geometry:
    """Of a chain on a block of this shape; without pooling a block is one line."""
    samples, channels, *extents = shape
    rows = 1 if scale is None else len(scale)
    tiles: Geometry = (1, 1, 1, 0)
    if pool:
        depth, height, width = (1,) * (3 - len(extents)) + tuple(extents)
        tiles = (*(1,) * (3 - len(pool)), *pool, int(maximum))
    else:
        depth = height = width = 1
        for extent in extents:
            width *= extent
        if scale is None:
            return (1, 1, 1, samples * channels * width, 1, 1, *tiles)
    if channels_last:
        return (samples, depth, height, width, channels, rows, *tiles)
    return (samples * channels, depth, height, width, 1, rows * channels, *tiles)
