"""Drops elements of a block on a CUDA device, in one pass over memory; its mask is never stored.

Legend: an element has an index in the outer dims of the whole volume, all but the last two, and
one in these; see `hyperslab.kernels.random_bits`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from hyperslab.kernels.cuda.tiles import NARROW, OPTIONS, dense_block
from hyperslab.kernels.dropout import drop_elements, least_kept, scale_of
from hyperslab.kernels.registry import Operands

MOST_DIMS = 5
BLOCK = 1024  # elements of a program
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FIRST_64 = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND_64 = tl.constexpr(0x94D049BB133111EB)
FIRST_32 = tl.constexpr(0x7FEB352D)
SECOND_32 = tl.constexpr(0x846CA68B)


def triton_drop_elements(given: Operands) -> torch.Tensor:
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
