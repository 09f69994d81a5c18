"""Sums by channel, forward and backward, by the compiled kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from hyperslab.ops.kernels.fused import chain_backward_sums, channel_sums
from hyperslab.ops.kernels.fused.compiled.library import Library, call, library, parts_for
from hyperslab.ops.kernels.fused.compiled.plans import (
    NUMBERS,
    PLANS_KEPT,
    POINTERS,
    TYPE_CODES,
    Sizes,
    chain_plan,
)
from hyperslab.ops.kernels.fused.compiled.tensors import address, ready, ready_numbers
from hyperslab.ops.kernels.fused.layout import format_of


def compiled_channel_sums(x: torch.Tensor, groups: int) -> torch.Tensor:
    """See the schema."""
    functions = library()
    if functions is None or x.dtype not in TYPE_CODES or not x.numel():
        return channel_sums.reference(x, groups)
    memory_format = format_of(x)
    x = ready(x, memory_format)
    last = memory_format != torch.contiguous_format
    slices, numbers = _moments_plan(x.shape, x.dtype, groups, last)
    sums = _sums(functions, (3, slices), x.numel(), numbers, (x.data_ptr(), 0, 0, 0, 0, 0, 0))
    if last and groups:
        sums = sums.view(3, x.shape[0] * groups, -1).sum(2)
    return sums


@functools.lru_cache(PLANS_KEPT)
def _moments_plan(shape: Sizes, dtype: torch.dtype, groups: int, last: bool) -> tuple[int, bytes]:
    """How many sums, and what the C code is told. In channels last groups are of channels' sums."""
    samples, channels = shape[:2]
    if last:
        rows = samples if groups else 1
        blocks = samples
        width = channels
    else:
        blocks = samples * (groups or channels)
        rows = blocks if groups else channels
        width = 1
    line = math.prod(shape) // blocks // width
    numbers = (TYPE_CODES[dtype], 0, 0, blocks, 1, 1, line, width, rows, 1, 1, 1, 0, 0, 1.0)
    return rows * width, NUMBERS.pack(*numbers)


def compiled_backward_sums(
    g: torch.Tensor,
    marks: torch.Tensor,
    x: torch.Tensor,
    norm: torch.Tensor,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
) -> torch.Tensor:
    """See the schema."""
    functions = library()
    plan = chain_plan(
        x.shape,
        (x.shape, x.stride()),
        (x.dtype, g.dtype, None),
        tuple(pool),
        maximum,
        slope,
        norm.shape,
    )
    if functions is None or plan is None:
        return chain_backward_sums.reference(g, marks, x, norm, slope, pool, maximum)
    plan.check(g, marks)
    g = ready(g, plan.memory_format)
    x = ready(x, plan.memory_format)
    numbers = ready_numbers(norm)
    pointers = (
        x.data_ptr(),
        g.data_ptr(),
        0,
        0,
        marks.data_ptr(),
        address(numbers),
        0,
    )
    return _sums(functions, (2, *norm.shape[1:]), plan.size, plan.numbers, pointers)


def _sums(
    functions: Library, shape: Sizes, size: int, numbers: bytes, pointers: tuple[int, ...]
) -> torch.Tensor:
    """Of this shape in float64; each part of the work has sums of its own."""
    parts = parts_for(size)
    sums = torch.zeros((parts, *shape), dtype=torch.float64)
    call(functions.sums, POINTERS.pack(*pointers, sums.data_ptr()) + numbers, size)
    return sums[0] if parts == 1 else sums.sum(0)
