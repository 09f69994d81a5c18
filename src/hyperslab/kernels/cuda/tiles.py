"""Cuts a block (N, C, ...space) into tiles, and does what all Triton kernels do with a tile.

Legend: n a sample, v voxels of a sample, c channels; R voxels by K channels are a tile. D, H, W
are the extents after pooling, over tiles of PD, PH, PW. u is what the activation is applied to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hyperslab.kernels.memory_format import as_dense, memory_format_by_strides

TILE = 2048  # elements that one program works on at a time
MOST_CHANNELS = 128  # of a tile
NARROW = 2**31 - 2**24  # elements of a sample that 32 bits number, with those of the last tile

OPTIONS = {"enable_fp_fusion": False}  # of every launch: what is to be one operation says so

Argument = int | bool | str


@dataclass(frozen=True, slots=True)
class Tiles:
    """Describes the tiles of a block; of one that is pooled, those of its result.

    ``extents`` are D, H, W and ``pool`` is PD, PH, PW; ``rows`` by ``channels`` are a tile.
    """

    samples: int
    all_channels: int
    extents: tuple[int, ...]
    pool: tuple[int, ...]
    channels_last: bool
    rows: int
    channels: int

    @staticmethod
    def of(shape: Sequence[int], pool: Sequence[int], memory_format: torch.memory_format) -> Tiles:
        """Cuts a block into tiles; ``shape`` is the block's, before pooling."""
        space = shape[2:] if pool else [math.prod(shape[2:])]
        tile = (1, 1, *(pool or [1]))[-3:]
        extents = tuple(e // p for e, p in zip((1, 1, *space)[-3:], tile, strict=True))
        last = memory_format != torch.contiguous_format
        channels = min(triton.next_power_of_2(shape[1]), MOST_CHANNELS) if last else 1
        rows = min(TILE // channels, max(8, triton.next_power_of_2(math.prod(extents))))
        return Tiles(shape[0], shape[1], extents, tile, last, rows, channels)

    @property
    def voxels(self) -> int:
        """Counts the voxels of a sample after pooling."""
        return math.prod(self.extents)

    @property
    def channel_blocks(self) -> int:
        return triton.cdiv(self.all_channels, self.channels)

    @property
    def voxel_blocks(self) -> int:
        return triton.cdiv(self.voxels, self.rows)

    @property
    def programs(self) -> int:
        """Counts the programs, one for each tile."""
        return self.samples * self.channel_blocks * self.voxel_blocks

    @property
    def bits_side_by_side(self) -> str:
        """Names the part of a tile that has its bits in the same bytes, and nobody else's."""
        if self.channels_last and self.all_channels % 8 == 0:
            return "channels"
        run = self.voxels * (self.all_channels if self.channels_last else 1)
        gapless = self.channels in (1, self.all_channels) and math.prod(self.pool) == 1
        return "tile" if gapless and run % 8 == 0 else "nowhere"

    @property
    def arguments(self) -> dict[str, Argument]:
        """Lists the arguments that every kernel takes of the tiles."""
        names = ("D", "H", "W", "PD", "PH", "PW")
        return {
            "C": self.all_channels,
            **dict(zip(names, (*self.extents, *self.pool), strict=True)),
            "LAST": self.channels_last,
            "R": self.rows,
            "K": self.channels,
            **OPTIONS,
            "WIDE": self.all_channels * self.voxels * math.prod(self.pool) > NARROW,
        }


def activation(slope: float) -> str:
    """Returns the kernels' word for an activation of this slope below zero."""
    return "none" if slope == 1 else "relu" if slope == 0 else "leaky"


def per_sample(norm: torch.Tensor | None) -> bool:
    """Says if there are numbers for every sample."""
    return norm is not None and norm.shape[1] > 1


def numbers_of(parts: torch.Tensor | None, count: int, other: torch.Tensor) -> list[torch.Tensor]:
    """Lists ``count`` parts for a kernel, which takes them used or not."""
    return [other] * count if parts is None else list(parts.contiguous().unbind())


def pointer(given: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """Returns a tensor for a kernel, which takes one, used or not."""
    return other if given is None else given


def dense_block(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` without gaps in memory, in the format that its operator takes it for."""
    return as_dense(x, memory_format_by_strides(x))


@triton.jit
def first_of(tile, C, V, LAST: tl.constexpr, R: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Finds sample, first voxel and first channel by a tile's number."""
    blocks_c = tl.cdiv(C, K)
    blocks_v = tl.cdiv(V, R)
    if LAST:  # what lies side by side in memory is worked on at the same time
        c = tile % blocks_c
        v = (tile // blocks_c) % blocks_v
    else:
        v = tile % blocks_v
        c = (tile // blocks_v) % blocks_c
    n = (tile // (blocks_c * blocks_v)).to(tl.int64)
    if WIDE:
        v = v.to(tl.int64)
        c = c.to(tl.int64)
    return n, v * R, c * K


@triton.jit
def offset(v, c, C, V, LAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Counts the elements from the beginning of a sample."""
    if LAST:
        return v * C + c
    else:
        return c * V + v


@triton.jit
def before_pooling(v, i, j, k, H, W, PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Finds the voxel at (i, j, k) of the tile that is pooled into voxel v."""
    if PD * PH * PW == 1:
        return v
    else:
        w = v % W
        h = (v // W) % H
        d = v // (W * H)
        return ((d * PD + i) * (H * PH) + h * PH + j) * (W * PW) + w * PW + k


@triton.jit
def number_of(part, n, c, C, GIVEN: tl.constexpr, PER_SAMPLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads a tile's part (1, K) of a number for every channel; zeros where there is none."""
    if not GIVEN:
        return tl.zeros(c.shape, tl.float32)
    elif PER_SAMPLE:
        return tl.load(part + n * C + c, mask=c < C, other=0.0)
    else:
        return tl.load(part + c, mask=c < C, other=0.0)


@triton.jit
def normalised(x, mean, scale, shift, NORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Computes ``u`` of a tile (R, K) in float32; the same bits in every kernel."""
    if NORM:
        centred = x - mean
        return tl.fma(centred, tl.broadcast_to(scale, x.shape), tl.broadcast_to(shift, x.shape))
    else:
        return x


@triton.jit
def hands_on(u, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Says if the activation hands the gradient on unscaled; NaN as in torch."""
    if ACTIVATION == "relu":
        return (u <= 0) == 0
    else:
        return u > 0
