"""From contiguous memory to channels last and back by the compiled kernel."""

from __future__ import annotations

import math
import struct

import torch

from hyperslab.ops.kernels.fused import reorder
from hyperslab.ops.kernels.fused.compiled.library import call, library
from hyperslab.ops.kernels.fused.compiled.plans import STREAMED, TYPE_CODES, dense_strides
from hyperslab.ops.kernels.fused.layout import format_of

REORDERING = struct.Struct("@9q")
"""``reordering`` of ``reorder.c`` but for the number of the part and that of all parts."""


def compiled_reorder(x: torch.Tensor, channels_last: bool, dtype: torch.dtype) -> torch.Tensor:
    """See the schema."""
    functions = library()
    wanted = reorder.wanted_format(x, channels_last)
    given = format_of(x)
    turned = given != wanted and x.is_contiguous(memory_format=given) and x.numel()
    if functions is None or not turned or x.dtype not in TYPE_CODES or dtype not in TYPE_CODES:
        return reorder.reference(x, channels_last, dtype)
    y = torch.empty_strided(x.shape, dense_strides(x.shape, wanted), dtype=dtype)
    samples, channels, *extents = x.shape
    values = (
        x.data_ptr(),
        y.data_ptr(),
        TYPE_CODES[x.dtype],
        TYPE_CODES[dtype],
        samples,
        channels,
        math.prod(extents),
        channels_last,
        y.nbytes >= STREAMED,
    )
    call(functions.reorder, REORDERING.pack(*values), x.numel())
    return y
