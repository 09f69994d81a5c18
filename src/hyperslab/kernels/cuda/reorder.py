"""Copies a block from contiguous memory to channels last and back on a CUDA device."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from hyperslab.kernels.cuda.tiles import NARROW, OPTIONS, dense_block, first_of, offset
from hyperslab.kernels.memory_format import memory_format_by_strides
from hyperslab.kernels.registry import Operands
from hyperslab.kernels.reorder import wanted_format

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
