"""What the C code is told of a chain, worked out once for equal calls.

A tensor of a few voxels passes in less time than Python takes to look at its shape, so all that
follows from shapes, strides and types is kept, packed as C wants it.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hyperslab.ops.kernels.fused.layout import (
    bit_bytes,
    check_norm,
    format_of,
    pooled_shape,
    winner_bytes,
)

TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""As ``rows.h`` numbers them."""

POINTERS = struct.Struct("@8q")
"""The tensors of ``chain`` in ``chain.h``."""

NUMBERS = struct.Struct("@14qd")
"""What follows them, but for the number of the part and that of all parts."""

STREAMED = 16 << 20
"""[B] Results from this size on do not stay in the caches until they are read."""

PLANS_KEPT = 4096
"""Plans: a network has a few for each of its layers."""

Sizes = tuple[int, ...]
Geometry = tuple[int, ...]
"""blocks, depth, height, width, channels, scale_rows, tiles of three extents, maximum."""


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """Of chains on blocks of one shape and memory order."""

    memory_format: torch.memory_format
    strides: Sizes  # of the block in this format
    result: Sizes
    result_strides: Sizes
    bits: int  # bytes of marks
    winners: int
    size: int  # elements of the block
    numbers: bytes

    def check(self, g: torch.Tensor, marks: torch.Tensor) -> None:
        """The C code reads as many gradients and marks as the block has.

        Raises:
            ValueError: these are not so many.
        """
        count = self.bits + self.winners
        if g.shape != self.result or marks.numel() < count or not marks.is_contiguous():
            raise ValueError(
                f"a gradient of shape {list(g.shape)} and {marks.numel()} bytes of marks for a "
                f"chain whose result has shape {list(self.result)} and which keeps {count} bytes"
            )


@functools.lru_cache(PLANS_KEPT)
def chain_plan(
    shape: Sizes,
    told: tuple[Sizes, Sizes],
    types: tuple[torch.dtype | None, ...],
    pool: Sizes,
    maximum: bool,
    slope: float,
    norm: Sizes | None,
    through: Sizes | None = None,
) -> ChainPlan | None:
    """The plan; None where the C code does not know the types or the number of dims.

    Args:
        shape: of the block.
        told: shape and strides of a tensor in the block's memory format.
        types: of x, the result's gradient, and what is written: the result, or dx where there is
            a gradient.
        norm, through: shapes of the numbers of channels.

    Raises:
        ValueError: tiles or numbers do not fit the block.
    """
    check_norm(shape, norm, through)
    result = pooled_shape(shape, pool)
    known = all(dtype is None or dtype in TYPE_CODES for dtype in types)
    if not known or not 2 <= len(shape) <= 5 or not math.prod(shape):
        return None
    memory_format = format_of(torch.empty_strided(*told, device="meta"))
    _, of_gradient, of_written = types
    written = result if of_gradient is None else shape
    size = math.prod(written) * (of_written.itemsize if of_written else 0)
    last = memory_format != torch.contiguous_format
    return ChainPlan(
        memory_format=memory_format,
        strides=dense_strides(shape, memory_format),
        result=tuple(result),
        result_strides=dense_strides(result, memory_format),
        bits=bit_bytes(shape, slope, norm is not None),
        winners=winner_bytes(shape, pool, maximum),
        size=math.prod(shape),
        numbers=NUMBERS.pack(
            *(0 if dtype is None else TYPE_CODES[dtype] for dtype in types),
            *_geometry(shape, last, 0 if norm is None else norm[1], pool, maximum),
            size >= STREAMED,
            slope,
        ),
    )


def dense_strides(shape: Sequence[int], memory_format: torch.memory_format) -> Sizes:
    """Those of a new tensor: torch takes three times as long where it works them out."""
    return torch.empty(tuple(shape), memory_format=memory_format, device="meta").stride()


def _geometry(shape: Sizes, channels_last: bool, rows: int, pool: Sizes, maximum: bool) -> Geometry:
    """Of a chain on a block of this shape; without pooling a block is one line.

    ``rows``: of the normalisation's numbers, 0 without one.
    """
    samples, channels, *extents = shape
    if not pool:
        voxels = math.prod(extents)
        if rows == 0:
            return (1, 1, 1, samples * channels * voxels, 1, 1, 1, 1, 1, 0)
        extents = [1, 1, voxels]
        pool = (1, 1, 1)
        maximum = False
    rows = max(1, rows)
    missing = (1,) * (3 - len(extents))
    tiles = (*missing, *pool, int(maximum))
    if channels_last:
        return (samples, *missing, *extents, channels, rows, *tiles)
    return (samples * channels, *missing, *extents, 1, rows * channels, *tiles)
