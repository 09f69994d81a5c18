"""Normalise, activate and pool on a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hyperslab.ops.kernels.fused.gpu.tiles import (
    OPTIONS,
    Tiles,
    activation,
    before_pooling,
    dense_block,
    first_of,
    hands_on,
    normalised,
    number_of,
    numbers_of,
    offset,
    per_sample,
)
from hyperslab.ops.kernels.fused.layout import (
    bit_bytes,
    check_norm,
    extents_of,
    format_of,
    pooled_shape,
    winner_bytes,
)

PACKED = 4096  # elements whose bits one program packs


def triton_chain_forward(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    mark: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator of this name. Bits that no tile has side by side take another pass over x."""
    check_norm(x.shape, extents_of(norm))
    memory_format = format_of(x)
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
    """``flags`` (R, K) of the voxels v (R, 1) of a sample that begins at element ``base``."""
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
    """The bits of any block, eight elements a byte in the order in which they lie."""
    bytes_ = tl.program_id(0).to(tl.int64) * (SIZE // 8) + tl.arange(0, SIZE // 8)
    e = bytes_[:, None] * 8 + tl.arange(0, 8)[None, :]
    u = tl.load(x + e, mask=e < count, other=0.0).to(tl.float32)
    flags = (hands_on(u, ACTIVATION) & (e < count)).to(tl.int32)
    packed = tl.sum(flags << tl.arange(0, 8)[None, :], 1).to(tl.uint8)
    tl.store(bits + bytes_, packed, mask=bytes_ * 8 < count)
