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
    if not _kernel_applies(x, wanted, dtype):
        return NotImplemented
    y = torch.empty_strided(x.shape, strides_in(x.shape, wanted), dtype=dtype)
    _run_reorder(functions, x, y, channels_last)
    return y


def compiled_reorder_into(functions: Library, given: Operands) -> Any:
    x, y = given
    wanted = memory_format_by_strides(y)
    dense = x.shape == y.shape and y.is_contiguous(memory_format=wanted)
    if not dense or not _kernel_applies(x, wanted, y.dtype):
        return NotImplemented
    _run_reorder(functions, x, y, wanted is not torch.contiguous_format)
    return None


def _kernel_applies(x: torch.Tensor, wanted: torch.memory_format, dtype: torch.dtype) -> bool:
    """Asks for another format, and for types that the kernel knows."""
    given = memory_format_by_strides(x)
    turned = given != wanted and x.is_contiguous(memory_format=given) and x.numel() > 0
    return turned and x.dtype in TYPE_CODES and dtype in TYPE_CODES


def _run_reorder(functions: Library, x: torch.Tensor, y: torch.Tensor, channels_last: bool) -> None:
    samples, channels, *extents = x.shape
    types = (TYPE_CODES[x.dtype], TYPE_CODES[y.dtype])
    streamed = y.nbytes >= STREAMED
    numbers = integers(*types, samples, channels, math.prod(extents), channels_last, streamed)
    call(functions.reorder, addresses(x, y) + numbers, x.numel())


declare(reorder, compiled_reorder, "reorder.c", "reorder:triton_reorder")
declare(reorder_into, compiled_reorder_into, "reorder.c", writes="y")
