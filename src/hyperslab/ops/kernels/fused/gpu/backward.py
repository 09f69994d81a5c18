"""Gradients of a chain on a CUDA device: of its input, and the sums that normalisation needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hyperslab.ops.kernels.fused.gpu.tiles import (
    Tiles,
    activation,
    before_pooling,
    dense_like,
    first_of,
    hands_on,
    normalised,
    number_of,
    numbers_of,
    offset,
    per_sample,
    pointer,
)
from hyperslab.ops.kernels.fused.layout import check_norm, extents_of, format_of, winner_bytes


def triton_chain_backward(
    g: torch.Tensor,
    marks: torch.Tensor,
    x: torch.Tensor | None,
    norm: torch.Tensor | None,
    through: torch.Tensor | None,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The operator of this name."""
    check_norm(shape, extents_of(norm), extents_of(through))
    memory_format = format_of(g if x is None else x)
    dx = torch.empty(list(shape), dtype=dtype, device=g.device, memory_format=memory_format)
    if dx.numel() == 0:
        return dx
    g = dense_like(g, memory_format)
    x = x if x is None else dense_like(x, memory_format)
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
    """What pooling hands on to one element of its tile."""
    if WINNERS:
        return tl.where(winner == tap, g, 0.0)
    elif TAPS > 1:
        return g / TAPS
    else:
        return g


@triton.jit
def through_activation(da, passing, slope, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the activation hands on."""
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
    """Whether the bit of each element (R, K) of a sample that begins there is set."""
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
