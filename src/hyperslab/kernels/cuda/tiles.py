"""Cuts a block (N, C, ...space) into tiles, and works on them: epilogues, formats, dropout.

In reading order: what all kernels do with a tile; normalisation, activation and pooling in one
pass, forward and backward, and sums by channel; copies from contiguous memory to channels last and
back; dropout, in one pass over memory, whose mask is never stored.

For sums every program adds up several tiles, in single precision within one and in double precision
from one to the next, and writes its sums; they are added up after it, always in the same order.

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

from hyperslab.kernels.memory_format import (
    as_dense,
    bit_bytes,
    check_norm,
    memory_format_by_strides,
    pooled_shape,
    shape_or_none,
    winner_bytes,
)
from hyperslab.kernels.random_bits import drop_elements, least_kept, scale_of
from hyperslab.kernels.registry import Operands
from hyperslab.kernels.reorder import wanted_format

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
        return math.prod(self.extents)

    @property
    def channel_blocks(self) -> int:
        return triton.cdiv(self.all_channels, self.channels)

    @property
    def voxel_blocks(self) -> int:
        return triton.cdiv(self.voxels, self.rows)

    @property
    def programs(self) -> int:
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


PACKED = 4096  # elements whose bits one program packs


def triton_chain_forward(given: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the operator in Triton. Bits that no tile has side by side take another pass over x."""
    x, norm, slope, pool, maximum, mark, dtype = given
    check_norm(x.shape, shape_or_none(norm))
    memory_format = memory_format_by_strides(x)
    x = dense_block(x)
    shape = pooled_shape(x.shape, pool)
    y = torch.empty(shape, dtype=dtype, device=x.device, memory_format=memory_format)
    bits = bit_bytes(x.shape, slope, norm is not None) if mark else 0
    winners = winner_bytes(x.shape, pool, maximum) if mark else 0
    marks = x.new_empty(bits + winners, dtype=torch.uint8)
    if x.numel() == 0:
        return y, marks
    tiles = Tiles.of(x.shape, pool, memory_format)
    beside = tiles.bits_side_by_side if bits else "nowhere"
    _forward[(tiles.programs,)](
        x,
        *numbers_of(norm, 3, x),
        y,
        marks,
        marks[bits:],
        slope,
        MAXIMUM=maximum,
        WINNERS=winners > 0,
        BITS=beside,
        NORM=norm is not None,
        PER_SAMPLE=per_sample(norm),
        ACTIVATION=activation(slope),
        **tiles.arguments,
    )
    if bits and beside == "nowhere":
        _pack[(triton.cdiv(x.numel(), PACKED),)](
            x, marks, x.numel(), SIZE=PACKED, ACTIVATION=activation(slope), **OPTIONS
        )
    return y, marks


@triton.jit
def _store_bits(  # type: ignore[no-untyped-def]
    bits,
    flags,
    base,
    v,
    v0,
    c0,
    C,
    V,
    LAST: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
):
    """Stores ``flags`` (R, K) of voxels v (R, 1) of a sample that begins at element ``base``."""
    powers = tl.arange(0, 8)
    if BITS == "channels":
        bytes_ = tl.sum(tl.reshape(flags.to(tl.int32), (R, K // 8, 8)) << powers[None, None, :], 2)
        c = c0 + 8 * tl.arange(0, K // 8)[None, :]
        at = (base + offset(v, c, C, V, LAST)) // 8
        tl.store(bits + at, bytes_.to(tl.uint8), mask=(v < V) & (c < C))
    else:
        bytes_ = tl.sum(tl.reshape(flags.to(tl.int32), (R * K // 8, 8)) << powers[None, :], 1)
        e = 8 * tl.arange(0, R * K // 8)
        at = (base + offset(v0, c0, C, V, LAST) + e) // 8
        tl.store(bits + at, bytes_.to(tl.uint8), mask=v0 + e // K < V)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x,
    mean,
    scale,
    shift,
    y,
    bits,
    winners,
    slope,
    C,
    D,
    H,
    W,
    PD: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    LAST: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    NORM: tl.constexpr,
    PER_SAMPLE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MAXIMUM: tl.constexpr,
    WINNERS: tl.constexpr,
    BITS: tl.constexpr,
):
    V = D * H * W
    TAPS: tl.constexpr = PD * PH * PW
    n, v0, c0 = first_of(tl.program_id(0), C, V, LAST, R, K, WIDE)
    v = v0 + tl.arange(0, R)[:, None]
    c = c0 + tl.arange(0, K)[None, :]
    exist = (v < V) & (c < C)
    begin = n * C * V * TAPS
    centre = number_of(mean, n, c, C, NORM, PER_SAMPLE)
    factor = number_of(scale, n, c, C, NORM, PER_SAMPLE)
    summand = number_of(shift, n, c, C, NORM, PER_SAMPLE)
    result = tl.zeros((R, K), tl.float32)
    winner = tl.zeros((R, K), tl.int32)
    if MAXIMUM and TAPS > 1:
        result = tl.full((R, K), float("-inf"), tl.float32)
    for i in tl.static_range(PD):
        for j in tl.static_range(PH):
            for k in tl.static_range(PW):
                whole = before_pooling(v, i, j, k, H, W, PD, PH, PW)
                at = begin + offset(whole, c, C, V * TAPS, LAST)
                value = tl.load(x + at, mask=exist, other=0.0).to(tl.float32)
                u = normalised(value, centre, factor, summand, NORM)
                a = u
                if ACTIVATION == "relu":
                    a = tl.where(u <= 0, 0.0, u)
                elif ACTIVATION == "leaky":
                    a = tl.where(u > 0, u, u * slope)
                if BITS != "nowhere":
                    flags = hands_on(u, ACTIVATION)
                    _store_bits(bits, flags, begin, whole, v0, c0, C, V * TAPS, LAST, R, K, BITS)
                if MAXIMUM and TAPS > 1:
                    wins = (a > result) | (a != a)  # of several NaN the last, as in torch
                    result = tl.where(wins, a, result)
                    winner = tl.where(wins, (i * PH + j) * PW + k, winner)
                else:
                    result += a
    if not MAXIMUM and TAPS > 1:
        result = result / TAPS
    at = n * C * V + offset(v, c, C, V, LAST)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=exist)
    if WINNERS:
        tl.store(winners + at, winner.to(tl.uint8), mask=exist)


@triton.jit
def _pack(x, bits, count, SIZE: tl.constexpr, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Packs the bits of any block, eight elements a byte in the order in which they lie."""
    bytes_ = tl.program_id(0).to(tl.int64) * (SIZE // 8) + tl.arange(0, SIZE // 8)
    e = bytes_[:, None] * 8 + tl.arange(0, 8)[None, :]
    u = tl.load(x + e, mask=e < count, other=0.0).to(tl.float32)
    flags = (hands_on(u, ACTIVATION) & (e < count)).to(tl.int32)
    packed = tl.sum(flags << tl.arange(0, 8)[None, :], 1).to(tl.uint8)
    tl.store(bits + bytes_, packed, mask=bytes_ * 8 < count)


def triton_chain_backward(given: Operands) -> torch.Tensor:
    g, marks, x, norm, through, slope, pool, maximum, shape, dtype = given
    check_norm(shape, shape_or_none(norm), shape_or_none(through))
    memory_format = memory_format_by_strides(g if x is None else x)
    dx = torch.empty(list(shape), dtype=dtype, device=g.device, memory_format=memory_format)
    if dx.numel() == 0:
        return dx
    g = as_dense(g, memory_format)
    x = x if x is None else as_dense(x, memory_format)
    tiles = Tiles.of(shape, pool, memory_format)
    winners = winner_bytes(shape, pool, maximum)
    _backward[(tiles.programs,)](
        g,
        marks,
        marks[len(marks) - winners :],
        pointer(x, g),
        *numbers_of(norm, 3, g),
        *numbers_of(through, 2, g),
        dx,
        slope,
        NORM=norm is not None,
        THROUGH=through is not None,
        PER_SAMPLE=per_sample(norm),
        ACTIVATION=activation(slope),
        WINNERS=winners > 0,
        BITS=tiles.bits_side_by_side,
        **tiles.arguments,
    )
    return dx


@triton.jit
def through_pooling(g, winner, tap, TAPS: tl.constexpr, WINNERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns what pooling hands on to one element of its tile."""
    if WINNERS:
        return tl.where(winner == tap, g, 0.0)
    elif TAPS > 1:
        return g / TAPS
    else:
        return g


@triton.jit
def through_activation(da, passing, slope, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns what the activation hands on."""
    if ACTIVATION == "relu":
        return tl.where(passing, da, 0.0)
    else:
        return tl.where(passing, da, da * slope)


@triton.jit
def _load_bits(  # type: ignore[no-untyped-def]
    bits,
    begin,
    v,
    c0,
    C,
    V,
    LAST: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
):
    """Loads the bit of each element (R, K) of a sample that begins there."""
    if BITS == "channels":  # one load for eight of them
        c = c0 + 8 * tl.arange(0, K // 8)[None, :]
        at = (begin + offset(v, c, C, V, LAST)) // 8
        bytes_ = tl.load(bits + at, mask=(v < V) & (c < C), other=0).to(tl.int32)
        each = (bytes_[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
        return tl.reshape(each, (R, K)) != 0
    else:
        c = c0 + tl.arange(0, K)[None, :]
        at = begin + offset(v, c, C, V, LAST)
        bytes_ = tl.load(bits + at // 8, mask=(v < V) & (c < C), other=0).to(tl.int32)
        return ((bytes_ >> (at % 8).to(tl.int32)) & 1) != 0


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    g,
    bits,
    winners,
    x,
    mean,
    scale,
    shift,
    b,
    summand,
    dx,
    slope,
    C,
    D,
    H,
    W,
    PD: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    LAST: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    NORM: tl.constexpr,
    THROUGH: tl.constexpr,
    PER_SAMPLE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WINNERS: tl.constexpr,
    BITS: tl.constexpr,
):
    V = D * H * W
    TAPS: tl.constexpr = PD * PH * PW
    n, v0, c0 = first_of(tl.program_id(0), C, V, LAST, R, K, WIDE)
    v = v0 + tl.arange(0, R)[:, None]
    c = c0 + tl.arange(0, K)[None, :]
    exist = (v < V) & (c < C)
    pooled = n * C * V + offset(v, c, C, V, LAST)
    dy = tl.load(g + pooled, mask=exist, other=0.0).to(tl.float32)
    centre = number_of(mean, n, c, C, NORM, PER_SAMPLE)
    factor = number_of(scale, n, c, C, NORM, PER_SAMPLE)
    addend = number_of(shift, n, c, C, NORM, PER_SAMPLE)
    slope_of_x = number_of(b, n, c, C, THROUGH, PER_SAMPLE)
    constant = number_of(summand, n, c, C, THROUGH, PER_SAMPLE)
    winner = tl.zeros((R, K), tl.int32)
    if WINNERS:
        winner = tl.load(winners + pooled, mask=exist, other=0).to(tl.int32)
    for i in tl.static_range(PD):
        for j in tl.static_range(PH):
            for k in tl.static_range(PW):
                whole = before_pooling(v, i, j, k, H, W, PD, PH, PW)
                at = n * C * V * TAPS + offset(whole, c, C, V * TAPS, LAST)
                du = through_pooling(dy, winner, (i * PH + j) * PW + k, TAPS, WINNERS)
                value = du
                if THROUGH or (NORM and ACTIVATION != "none"):
                    value = tl.load(x + at, mask=exist, other=0.0).to(tl.float32)
                if ACTIVATION != "none":
                    if NORM:
                        u = normalised(value, centre, factor, addend, NORM)
                        passing = hands_on(u, ACTIVATION)
                    else:
                        begin = n * C * V * TAPS
                        passing = _load_bits(bits, begin, whole, c0, C, V * TAPS, LAST, R, K, BITS)
                    du = through_activation(du, passing, slope, ACTIVATION)
                if NORM:
                    du *= factor
                if THROUGH:
                    du += (value - centre) * slope_of_x + constant
                tl.store(dx + at, du.to(dx.dtype.element_ty), mask=exist)


PROGRAMS = 2048  # at most: several for each multiprocessor of any device


def triton_channel_sums(given: Operands) -> torch.Tensor:
    x = dense_block(given.x)
    groups = given.groups
    tiles = Tiles.of(x.shape, (), memory_format_by_strides(x))
    parts, shares = _room_for_sums(x, tiles, 3)
    if x.numel():
        _channel_sums[(shares * tiles.samples * tiles.channel_blocks,)](
            x, parts, shares, **_unpooled(tiles)
        )
    sums = parts.sum(0)  # (3, N, C)
    if groups == 0:
        return sums.sum(1)
    return sums.unflatten(2, (groups, -1)).sum(3).flatten(1)


def triton_chain_backward_sums(given: Operands) -> torch.Tensor:
    g, marks, x, norm, slope, pool, maximum = given
    check_norm(x.shape, norm.shape)
    x = dense_block(x)
    memory_format = memory_format_by_strides(x)
    tiles = Tiles.of(x.shape, pool, memory_format)
    parts, shares = _room_for_sums(x, tiles, 2)
    winners = winner_bytes(x.shape, pool, maximum)
    if x.numel():
        _backward_sums[(shares * tiles.samples * tiles.channel_blocks,)](
            as_dense(g, memory_format),
            marks[len(marks) - winners :],
            x,
            *numbers_of(norm, 3, x),
            parts,
            slope,
            shares,
            PER_SAMPLE=per_sample(norm),
            ACTIVATION=activation(slope),
            WINNERS=winners > 0,
            **tiles.arguments,
        )
    sums = parts.sum(0)
    return sums if norm.shape[1] == len(x) else sums.sum(1, keepdim=True)


def _room_for_sums(x: torch.Tensor, tiles: Tiles, count: int) -> tuple[torch.Tensor, int]:
    """Makes (shares, count, N, C) for the programs' sums, and counts those of a channel."""
    most = max(1, PROGRAMS // max(1, tiles.samples * tiles.channel_blocks))
    shares = min(tiles.voxel_blocks, most)
    make = x.new_empty if x.numel() else x.new_zeros
    return make((shares, count, tiles.samples, tiles.all_channels), dtype=torch.float64), shares


def _unpooled(tiles: Tiles) -> dict[str, Argument]:
    """Lists the arguments of a kernel that needs no more than the number of voxels."""
    names = ("D", "H", "W", "PD", "PH", "PW")
    given = {name: value for name, value in tiles.arguments.items() if name not in names}
    return {**given, "V": tiles.voxels}


@triton.jit
def _part_of(shares, C, count: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Finds share, sample, channels (1, K) of this program, and the place of its ``count`` sums."""
    share = tl.program_id(0) % shares
    blocks_c = tl.cdiv(C, K)
    block = tl.program_id(0) // shares
    samples = tl.num_programs(0) // (shares * blocks_c)
    n = (block // blocks_c).to(tl.int64)
    c = (block % blocks_c).to(tl.int64) * K + tl.arange(0, K)[None, :]
    return share, n, c, share * count * samples * C + n * C + c, samples * C


@triton.jit
def _channel_sums(  # type: ignore[no-untyped-def]
    x,
    parts,
    shares,
    C,
    V,
    LAST: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    WIDE: tl.constexpr,
):
    share, n, c, to, next_one = _part_of(shares, C, 3, K)
    # Around a value of the sample: of squares far from zero single precision keeps nothing.
    first_value = tl.load(x + n * C * V + offset(0, c, C, V, LAST), mask=c < C, other=0.0)
    pivot = first_value.to(tl.float32)
    pivot = tl.where(tl.abs(pivot) < float("inf"), pivot, 0.0)
    total = tl.zeros((R, K), tl.float64)
    squares = tl.zeros((R, K), tl.float64)
    for first in range(share, tl.cdiv(V, R), shares * 4):
        few = tl.zeros((R, K), tl.float32)
        few_squares = tl.zeros((R, K), tl.float32)
        for j in tl.static_range(4):
            block = first + j * shares
            number = tl.cast(block, tl.int64) if WIDE else block
            v = number * R + tl.arange(0, R)[:, None]
            at = n * C * V + offset(v, c, C, V, LAST)
            exist = (v < V) & (c < C)
            value = tl.load(x + at, mask=exist, other=0.0).to(tl.float32)
            value = tl.where(exist, value - pivot, 0.0)
            few += value
            few_squares += value * value
        total += few.to(tl.float64)
        squares += few_squares.to(tl.float64)
    blocks = tl.cdiv(V, R)
    count = tl.cdiv(blocks - share, shares).to(tl.int64) * R
    if (blocks - 1) % shares == share:  # the last one may end before it is full
        count += V - tl.cast(blocks, tl.int64) * R
    count = count.to(tl.float64)
    beside = tl.sum(total, 0)[None, :]
    whole = beside + count * pivot.to(tl.float64)
    around = tl.sum(squares, 0)[None, :] - beside * beside / count
    tl.store(parts + to, whole, mask=c < C)
    tl.store(parts + to + next_one, whole * whole / count, mask=c < C)
    tl.store(parts + to + 2 * next_one, around, mask=c < C)


@triton.jit
def _backward_sums(  # type: ignore[no-untyped-def]
    g,
    winners,
    x,
    mean,
    scale,
    shift,
    parts,
    slope,
    shares,
    C,
    D,
    H,
    W,
    PD: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    LAST: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    PER_SAMPLE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WINNERS: tl.constexpr,
):
    V = D * H * W
    TAPS: tl.constexpr = PD * PH * PW
    share, n, c, to, second = _part_of(shares, C, 2, K)
    centre = number_of(mean, n, c, C, True, PER_SAMPLE)
    factor = number_of(scale, n, c, C, True, PER_SAMPLE)
    summand = number_of(shift, n, c, C, True, PER_SAMPLE)
    total = tl.zeros((R, K), tl.float64)
    products = tl.zeros((R, K), tl.float64)
    for block in range(share, tl.cdiv(V, R), shares):
        number = tl.cast(block, tl.int64) if WIDE else block
        v = number * R + tl.arange(0, R)[:, None]
        exist = (v < V) & (c < C)
        pooled = n * C * V + offset(v, c, C, V, LAST)
        dy = tl.load(g + pooled, mask=exist, other=0.0).to(tl.float32)
        winner = tl.zeros((R, K), tl.int32)
        if WINNERS:
            winner = tl.load(winners + pooled, mask=exist, other=0).to(tl.int32)
        few = tl.zeros((R, K), tl.float32)
        few_products = tl.zeros((R, K), tl.float32)
        for i in tl.static_range(PD):
            for j in tl.static_range(PH):
                for k in tl.static_range(PW):
                    whole = before_pooling(v, i, j, k, H, W, PD, PH, PW)
                    at = n * C * V * TAPS + offset(whole, c, C, V * TAPS, LAST)
                    value = tl.load(x + at, mask=exist, other=0.0).to(tl.float32)
                    du = through_pooling(dy, winner, (i * PH + j) * PW + k, TAPS, WINNERS)
                    if ACTIVATION != "none":
                        u = normalised(value, centre, factor, summand, True)
                        du = through_activation(du, hands_on(u, ACTIVATION), slope, ACTIVATION)
                    few += du
                    few_products += du * (value - centre)
        total += few.to(tl.float64)
        products += few_products.to(tl.float64)
    tl.store(parts + to, tl.sum(total, 0)[None, :], mask=c < C)
    tl.store(parts + to + second, tl.sum(products, 0)[None, :], mask=c < C)


SIDE = 64  # of a tile that is transposed; of fewer channels more voxels


def triton_reorder(given: Operands) -> torch.Tensor:
    x, channels_last, dtype = given
    wanted = wanted_format(x, channels_last)
    y = torch.empty(x.shape, dtype=dtype, device=x.device, memory_format=wanted)
    if x.is_contiguous(memory_format=wanted):
        return y.copy_(x)  # nothing to transpose
    x = dense_block(x)
    if memory_format_by_strides(x) == wanted or x.numel() == 0:
        return y.copy_(x)
    channels = min(SIDE, triton.next_power_of_2(x.shape[1]))
    voxels = math.prod(x.shape[2:])
    rows = SIDE * SIDE // channels
    programs = len(x) * triton.cdiv(voxels, rows) * triton.cdiv(x.shape[1], channels)
    _reorder[(programs,)](
        x,
        y,
        C=x.shape[1],
        V=voxels,
        TO_LAST=channels_last,
        R=rows,
        K=channels,
        WIDE=voxels * x.shape[1] > NARROW,
        **OPTIONS,
    )
    return y


@triton.jit
def _reorder(  # type: ignore[no-untyped-def]
    x, y, C, V, TO_LAST: tl.constexpr, R: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr
):
    """Reads along one dim and writes along the other; Triton turns the tile between them."""
    n, v0, c0 = first_of(tl.program_id(0), C, V, True, R, K, WIDE)
    v = v0 + tl.arange(0, R)[:, None]
    c = c0 + tl.arange(0, K)[None, :]
    exist = (v < V) & (c < C)
    value = tl.load(x + n * C * V + offset(v, c, C, V, not TO_LAST), mask=exist)
    to = y + n * C * V + offset(v, c, C, V, TO_LAST)
    tl.store(to, value.to(y.dtype.element_ty), mask=exist)


MOST_DIMS = 5
BLOCK = 1024  # elements of a program
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FIRST_64 = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND_64 = tl.constexpr(0x94D049BB133111EB)
FIRST_32 = tl.constexpr(0x7FEB352D)
SECOND_32 = tl.constexpr(0x846CA68B)


def triton_drop_elements(given: Operands) -> torch.Tensor:
    """Runs the operator in Triton; see `hyperslab.kernels.random_bits`.

    An element has an index in the outer dims of the whole volume, all but the last two, and one in
    these.
    """
    x, shape, first, seed, p = given
    if x.dim() > MOST_DIMS or x.numel() == 0:
        return drop_elements(*given)
    split = max(0, len(shape) - 2)
    if math.prod(shape[split:]) >= 2**31:
        return drop_elements(*given)  # which refuses it
    x = dense_block(x)
    y = torch.empty_like(x)
    # The dims as they lie in memory, the innermost last; those that are missing have one element.
    strides: tuple[int, ...] = x.stride()
    order = sorted(range(x.dim()), key=lambda dim: (-strides[dim], dim))
    extents, outer, inner = [1] * MOST_DIMS, [0] * MOST_DIMS, [0] * MOST_DIMS
    for place, dim in enumerate(order, start=MOST_DIMS - x.dim()):
        extents[place] = x.shape[dim]
        if dim < split:
            outer[place] = math.prod(shape[dim + 1 : split])
        else:
            inner[place] = math.prod(shape[dim + 1 :])
    begin = [sum(a * math.prod(shape[d + 1 : split]) for d, a in enumerate(first[:split]))]
    begin.append(sum(a * math.prod(shape[split + d + 1 :]) for d, a in enumerate(first[split:])))
    scale = scale_of(p)
    _drop[(triton.cdiv(x.numel(), BLOCK),)](
        x,
        y,
        x.numel(),
        seed,
        least_kept(p),
        scale,
        *extents[1:],
        *outer,
        *inner,
        *begin,
        SCALED=scale != 1.0,
        BLOCK=BLOCK,
        WIDE=x.numel() > NARROW,
        **OPTIONS,
    )
    return y


@triton.jit
def mixed(bits):  # type: ignore[no-untyped-def]
    """Hashes 32 bits (Wellons 2018, "lowbias32")."""
    bits = (bits ^ (bits >> 16)) * FIRST_32
    bits = (bits ^ (bits >> 15)) * SECOND_32
    return bits ^ (bits >> 16)


@triton.jit
def _drop(  # type: ignore[no-untyped-def]
    x,
    y,
    count,
    seed,
    least,
    scale,
    E1,
    E2,
    E3,
    E4,
    O0,
    O1,
    O2,
    O3,
    O4,
    I0,
    I1,
    I2,
    I3,
    I4,
    begin_outer,
    begin_inner,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """E, O, I: extents of the dims in memory, and what a step along each adds to both indices."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    exist = at < count
    rest = at // E4
    a4 = at - rest * E4
    above = rest // E3
    a3 = rest - above * E3
    rest = above // E2
    a2 = above - rest * E2
    a0 = rest // E1
    a1 = rest - a0 * E1
    inner = (a0 * I0 + a1 * I1 + a2 * I2 + a3 * I3 + a4 * I4 + begin_inner).to(tl.uint32)
    outer = a0.to(tl.int64) * O0 + a1.to(tl.int64) * O1 + a2.to(tl.int64) * O2
    outer += a3.to(tl.int64) * O3 + a4.to(tl.int64) * O4 + begin_outer

    key = outer.to(tl.uint64) * GOLDEN + tl.load(seed).to(tl.uint64)
    key = (key ^ (key >> 30)) * FIRST_64  # Steele et al. 2014, SplitMix64
    key = (key ^ (key >> 27)) * SECOND_64
    key = key ^ (key >> 31)
    bits = mixed(inner ^ key.to(tl.uint32))
    bits = mixed(bits + (key >> 32).to(tl.uint32)) & 0x7FFFFFFF
    keep = (bits.to(tl.int64) >= least).to(tl.float32)

    # As torch rounds: first the product with the mask, which is exact, then that with the factor.
    value = tl.load(x + at, mask=exist).to(tl.float32) * keep
    if SCALED:
        value = value * scale
    tl.store(y + at, value.to(y.dtype.element_ty), mask=exist)
