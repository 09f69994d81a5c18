"""Sums over a block for each channel on a CUDA device.

Every program adds up several tiles, in single precision within one and in double precision from one
to the next, and writes its sums; they are added up after it, always in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hyperslab.ops.kernels.fused.gpu.backward import through_activation, through_pooling
from hyperslab.ops.kernels.fused.gpu.tiles import (
    Argument,
    Tiles,
    activation,
    before_pooling,
    dense_block,
    dense_like,
    hands_on,
    normalised,
    number_of,
    numbers_of,
    offset,
    per_sample,
)
from hyperslab.ops.kernels.fused.layout import check_norm, format_of, winner_bytes

PROGRAMS = 2048  # at most: several for each multiprocessor of any device


def triton_channel_sums(x: torch.Tensor, groups: int) -> torch.Tensor:
    """The operator of this name."""
    x = dense_block(x)
    tiles = Tiles.of(x.shape, (), format_of(x))
    parts, shares = _room_for_sums(x, tiles, 3)
    if x.numel():
        _channel_sums[(shares * tiles.samples * tiles.channel_blocks,)](
            x, parts, shares, **_unpooled(tiles)
        )
    sums = parts.sum(0)  # (3, N, C)
    if groups == 0:
        return sums.sum(1)
    return sums.unflatten(2, (groups, -1)).sum(3).flatten(1)


def triton_chain_backward_sums(
    g: torch.Tensor,
    marks: torch.Tensor,
    x: torch.Tensor,
    norm: torch.Tensor,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
) -> torch.Tensor:
    """The operator of this name."""
    check_norm(x.shape, norm.shape)
    x = dense_block(x)
    memory_format = format_of(x)
    tiles = Tiles.of(x.shape, pool, memory_format)
    parts, shares = _room_for_sums(x, tiles, 2)
    winners = winner_bytes(x.shape, pool, maximum)
    if x.numel():
        _backward_sums[(shares * tiles.samples * tiles.channel_blocks,)](
            dense_like(g, memory_format),
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
    """(shares, count, N, C) for the programs' sums, and how many share a channel's tiles."""
    most = max(1, PROGRAMS // max(1, tiles.samples * tiles.channel_blocks))
    shares = min(tiles.voxel_blocks, most)
    make = x.new_empty if x.numel() else x.new_zeros
    return make((shares, count, tiles.samples, tiles.all_channels), dtype=torch.float64), shares


def _unpooled(tiles: Tiles) -> dict[str, Argument]:
    """What a kernel is told that needs no more than the number of voxels."""
    names = ("D", "H", "W", "PD", "PH", "PW")
    given = {name: value for name, value in tiles.arguments.items() if name not in names}
    return {**given, "V": tiles.voxels}


@triton.jit
def _part_of(shares, C, count: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Share, sample and channels (1, K) of this program; where its ``count`` sums go."""
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
