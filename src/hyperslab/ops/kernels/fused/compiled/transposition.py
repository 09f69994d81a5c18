"""From contiguous memory to channels last and back by the compiled kernel."""

from __future__ import annotations

import math
import struct

import torch

from hyperslab.ops.kernels.fused import reorder
from hyperslab.ops.kernels.fused.compiled.library import Library, call, library
from hyperslab.ops.kernels.fused.compiled.plans import STREAMED, TYPE_CODES, dense_strides
from hyperslab.ops.kernels.fused.layout import format_of

REORDERING = struct.Struct("@9q")
"""``reordering`` of ``reorder.c`` but for the number of the part and that of all parts."""


def compiled_reorder(x: torch.Tensor, channels_last: bool, dtype: torch.dtype) -> torch.Tensor:
    """See the schema."""
    functions = library()
    wanted = reorder.wanted_format(x, channels_last)
    if functions is None or not _turns(x, wanted, dtype):
        return reorder.reference(x, channels_last, dtype)
    y = torch.empty_strided(x.shape, dense_strides(x.shape, wanted), dtype=dtype)
    _run(functions, x, y, channels_last)
    return y


def compiled_reorder_into(x: torch.Tensor, y: torch.Tensor) -> None:
    """See the schema."""
    functions = library()
    wanted = format_of(y)
    dense = x.shape == y.shape and y.is_contiguous(memory_format=wanted)
    if functions is None or not dense or not _turns(x, wanted, y.dtype):
        reorder.reorder_into(x, y)
    else:
        _run(functions, x, y, wanted is not torch.contiguous_format)


def _turns(x: torch.Tensor, wanted: torch.memory_format, dtype: torch.dtype) -> bool:
    """Whether it is for the kernel: another format, and types that it knows."""
    given = format_of(x)
    turned = given != wanted and x.is_contiguous(memory_format=given) and x.numel() > 0
    return turned and x.dtype in TYPE_CODES and dtype in TYPE_CODES


def _run(functions: Library, x: torch.Tensor, y: torch.Tensor, channels_last: bool) -> None:
    samples, channels, *extents = x.shape
    values = (
        x.data_ptr(),
        y.data_ptr(),
        TYPE_CODES[x.dtype],
        TYPE_CODES[y.dtype],
        samples,
        channels,
        math.prod(extents),
        channels_last,
        y.nbytes >= STREAMED,
    )
    call(functions.reorder, REORDERING.pack(*values), x.numel())
