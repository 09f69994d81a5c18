"""Copies a block from contiguous memory to channels last and back, with a change of dtype.

The operators ``reorder`` and ``reorder_into``: plain references, then compiled versions.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hyperslab.kernels.compile import STREAMED, TYPE_CODES, Library, addresses, call, integers
from hyperslab.kernels.memory_format import CHANNELS_LAST, memory_format_by_strides, strides_in
from hyperslab.kernels.registry import Operands, declare

Steps = tuple[int, ...]


def reorder(x: torch.Tensor, channels_last: bool, dtype: torch.dtype) -> torch.Tensor:
    """Makes a new tensor of the same values in that format and type."""
    memory_format = wanted_format(x, channels_last)
    return torch.empty_like(x, dtype=dtype, memory_format=memory_format).copy_(x)


def reorder_into(x: torch.Tensor, y: torch.Tensor) -> None:
    """Copies the values of ``x`` to ``y``, in its format and type."""
    y.copy_(x)


def wanted_format(x: torch.Tensor, channels_last: bool) -> torch.memory_format:
    """Returns torch's name of the format.

    Raises:
        ValueError: torch has channels last for tensors of 4 or 5 dims only.
    """
    if not channels_last:
        return torch.contiguous_format
    if x.dim() not in CHANNELS_LAST:
        raise ValueError(
            f"channels last is for tensors of 4 or 5 dims, not {x.dim()}: keep it contiguous"
        )
    return CHANNELS_LAST[x.dim()]


def compiled_reorder(functions: Library, given: Operands) -> torch.Tensor:
    x, channels_last, dtype = given
    wanted = wanted_format(x, channels_last)
    steps = _steps(x, wanted, dtype)
    if steps is None:
        return NotImplemented
    y = torch.empty_strided(x.shape, strides_in(x.shape, wanted), dtype=dtype)
    _run_reorder(functions, x, y, steps, channels_last)
    return y


def compiled_reorder_into(functions: Library, given: Operands) -> Any:
    x, y = given
    wanted = memory_format_by_strides(y)
    steps = _steps(x, wanted, y.dtype)
    if steps is None or x.shape != y.shape or not y.is_contiguous(memory_format=wanted):
        return NotImplemented
    _run_reorder(functions, x, y, steps, wanted is not torch.contiguous_format)
    return None


def _steps(x: torch.Tensor, wanted: torch.memory_format, dtype: torch.dtype) -> Steps | None:
    """Returns how far the next sample and the next channel of ``x`` are.

    None where it has the format already, or a type or gaps that the kernel does not know. A window
    of a contiguous block along its first spatial dim has gaps between channels, which it knows.
    """
    given = memory_format_by_strides(x)
    known = x.dtype in TYPE_CODES and dtype in TYPE_CODES
    if given == wanted or not known or x.numel() == 0:
        return None
    strides = strides_in(x.shape, given)
    if x.is_contiguous(memory_format=given):
        return strides[:2]
    return x.stride()[:2] if x.stride()[2:] == strides[2:] else None


def _run_reorder(
    functions: Library, x: torch.Tensor, y: torch.Tensor, steps: Steps, channels_last: bool
) -> None:
    samples, channels, *extents = x.shape
    types = (TYPE_CODES[x.dtype], TYPE_CODES[y.dtype])
    sizes = (samples, channels, math.prod(extents), *steps)
    numbers = integers(*types, *sizes, channels_last, y.nbytes >= STREAMED)
    call(functions.reorder, addresses(x, y) + numbers, x.numel())


declare(reorder, compiled_reorder, "reorder.c", "tiles:triton_reorder")
declare(reorder_into, compiled_reorder_into, "reorder.c", writes="y")
