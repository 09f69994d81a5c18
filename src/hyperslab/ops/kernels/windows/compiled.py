"""The maximum over windows and its adjoint by the compiled kernels."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence

import torch

from hyperslab.memory_format import CHANNELS_LAST
from hyperslab.ops.kernels.fused.compiled.library import call, library
from hyperslab.ops.kernels.fused.compiled.plans import PLANS_KEPT, TYPE_CODES, Sizes, dense_strides
from hyperslab.ops.kernels.fused.compiled.tensors import ready
from hyperslab.ops.kernels.fused.layout import format_of
from hyperslab.ops.kernels.windows import reference

WINDOW_POINTERS = struct.Struct("@3q")
"""The tensors of ``windows`` in ``windows.c``."""

WINDOW_NUMBERS = struct.Struct("@19q")
"""What follows them, but for the number of the part and that of all parts."""


def compiled_window_maximum(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    extents: Sequence[int],
    mark: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the schema."""
    functions = library()
    windows = (tuple(kernel), tuple(stride), tuple(padding))
    memory_format = format_of(x)
    last = memory_format != torch.contiguous_format
    numbers = _numbers(x.shape, tuple(extents), windows, (x.dtype, dtype), last)
    if functions is None or numbers is None:
        return reference.window_maximum(x, *windows, extents, mark, dtype)
    x = ready(x, memory_format)
    result = (*x.shape[:2], *extents)
    strides = dense_strides(result, memory_format)
    y = torch.empty_strided(result, strides, dtype=dtype)
    if mark:
        winners = torch.empty_strided(result, strides, dtype=torch.uint8)
    else:
        winners = torch.empty(0, dtype=torch.uint8)
    pointers = WINDOW_POINTERS.pack(x.data_ptr(), y.data_ptr(), winners.data_ptr() if mark else 0)
    call(functions.window_maximum, pointers + numbers, x.numel())
    return y, winners


def compiled_window_maximum_backward(
    g: torch.Tensor,
    winners: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    shape: Sequence[int],
    channels_last: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See the schema."""
    functions = library()
    windows = (tuple(kernel), tuple(stride), tuple(padding))
    numbers = _numbers(tuple(shape), tuple(g.shape[2:]), windows, (g.dtype, dtype), channels_last)
    if functions is None or numbers is None:
        return reference.window_maximum_backward(g, winners, *windows, shape, channels_last, dtype)
    if winners.shape != g.shape or winners.dtype != torch.uint8:
        raise ValueError(f"winners {tuple(winners.shape)} for a gradient {tuple(g.shape)}")
    memory_format = CHANNELS_LAST[g.dim()] if channels_last else torch.contiguous_format
    g = ready(g, memory_format)
    winners = ready(winners, memory_format)
    dx = torch.empty_strided(tuple(shape), dense_strides(shape, memory_format), dtype=dtype)
    pointers = WINDOW_POINTERS.pack(g.data_ptr(), dx.data_ptr(), winners.data_ptr())
    call(functions.window_spread, pointers + numbers, dx.numel())
    return dx


@functools.lru_cache(PLANS_KEPT)
def _numbers(
    shape: Sizes,
    extents: Sizes,
    windows: tuple[Sizes, Sizes, Sizes],
    types: tuple[torch.dtype, torch.dtype],
    channels_last: bool,
) -> bytes | None:
    """What the C code is told; None where it does not know the types or the number of dims.

    Raises:
        ValueError: a byte cannot name every tap.
    """
    reference.check_windows(windows[0])
    known = all(dtype in TYPE_CODES for dtype in types)
    if not known or not 3 <= len(shape) <= 5 or not math.prod(shape) * math.prod(extents):
        return None
    samples, channels, *inputs = shape
    blocks = (samples, channels) if channels_last else (samples * channels, 1)
    missing = 3 - len(inputs)
    kernel, stride, padding = windows
    spatial = [
        *(1,) * missing,
        *inputs,
        *(1,) * missing,
        *extents,
        *(1,) * missing,
        *kernel,
        *(1,) * missing,
        *stride,
        *(0,) * missing,
        *padding,
    ]
    return WINDOW_NUMBERS.pack(*(TYPE_CODES[dtype] for dtype in types), *blocks, *spatial)
