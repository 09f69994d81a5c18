"""Copies a block from contiguous memory to channels last and back, with a change of dtype.

The operators ``reorder`` and ``reorder_into``: plain references, then compiled versions.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from hyperslab.kernels.compile import (
    PLANS_KEPT,
    STREAMED,
    TYPE_CODES,
    Library,
    Sizes,
    call,
    integers,
)
from hyperslab.kernels.memory_format import CHANNELS_LAST, memory_format_by_strides, strides_in
from hyperslab.kernels.registry import Operands, declare


def reorder(x: torch.Tensor, channels_last: bool, dtype: torch.dtype) -> torch.Tensor:
    """Makes a new tensor of the same values in that format and type."""
    memory_format = wanted_format(x, channels_last)
    return torch.empty_like(x, dtype=dtype, memory_format=memory_format).copy_(x)


def reorder_into(x: torch.Tensor, y: torch.Tensor) -> None:
    """Copies the values of ``x`` to ``y``, in its format and type."""
    y.copy_(x)


def wanted_format(x: torch.Tensor, channels_last: bool) -> torch.memory_format:
    if not channels_last:
        return torch.contiguous_format
    if x.dim() not in CHANNELS_LAST:
        raise ValueError(
            f"channels last is for tensors of 4 or 5 dims, not {x.dim()}: keep it contiguous"
        )
    return CHANNELS_LAST[x.dim()]


def compiled_reorder(functions: Library, given: Operands) -> torch.Tensor:
    x, channels_last, dtype = given
    plan = _plan(x.shape, x.stride(), x.dtype, dtype, channels_last)
    if plan is None:
        return NotImplemented
    y = torch.empty_strided(x.shape, plan.strides, dtype=dtype)
    call(functions.reorder, integers(x.data_ptr(), y.data_ptr()) + plan.numbers, plan.size)
    return y


def compiled_reorder_into(functions: Library, given: Operands) -> Any:
    x, y = given
    wanted = memory_format_by_strides(y)
    if x.shape != y.shape or not y.is_contiguous(memory_format=wanted):
        return NotImplemented
    last = wanted is not torch.contiguous_format
    plan = _plan(x.shape, x.stride(), x.dtype, y.dtype, last)
    if plan is None:
        return NotImplemented
    call(functions.reorder, integers(x.data_ptr(), y.data_ptr()) + plan.numbers, plan.size)
    return None


@dataclass(frozen=True, slots=True)
class _ReorderPlan:
    """Keeps what C is told of copies of one shape and memory format to the other."""

    strides: Sizes  # of the result
    size: int
    numbers: bytes


@functools.lru_cache(PLANS_KEPT)
def _plan(
    shape: Sizes, strides: Sizes, given: torch.dtype, made: torch.dtype, channels_last: bool
) -> _ReorderPlan | None:
    """Plans a copy of a tensor of this shape and these strides, from one dtype to another.

    None where it has the format already, or a type or gaps that the kernel does not know. A window
    of a contiguous block along its first spatial dim has gaps between channels, which it knows.
    """
    x = torch.empty_strided(shape, strides, device="meta")
    wanted = wanted_format(x, channels_last)
    before = memory_format_by_strides(x)
    known = given in TYPE_CODES and made in TYPE_CODES
    if before == wanted or not known or x.numel() == 0:
        return None
    dense = strides_in(shape, before)
    if x.is_contiguous(memory_format=before):
        steps = dense[:2]
    elif strides[2:] == dense[2:]:
        steps = strides[:2]
    else:
        return None
    samples, channels, *extents = shape
    sizes = (samples, channels, math.prod(extents), *steps)
    streamed = x.numel() * made.itemsize >= STREAMED
    numbers = integers(TYPE_CODES[given], TYPE_CODES[made], *sizes, channels_last, streamed)
    return _ReorderPlan(strides_in(shape, wanted), x.numel(), numbers)


declare(reorder, compiled_reorder, "reorder.c", "tiles")
declare(reorder_into, compiled_reorder_into, "reorder.c", writes=("y",))
