"""From contiguous memory to channels last and back by the compiled kernel."""

from __future__ import annotations

import math
import struct

import torch

from hyperslab.ops.kernels.fused import reorder
from hyperslab.ops.kernels.fused.compiled.blocks import STREAMED, TYPES, suits
from hyperslab.ops.kernels.fused.compiled.library import call, library, parts_for
from hyperslab.ops.kernels.fused.layout import format_of

REORDERING = struct.Struct("@2q2q3q1q1q2q")
"""``reordering`` of ``reorder.c``."""


def compiled_reorder(x: torch.Tensor, channels_last: bool, dtype: torch.dtype) -> torch.Tensor:
    """See the schema."""
    wanted = reorder.wanted_format(x, channels_last)
    given = format_of(x)
    turned = given != wanted and x.is_contiguous(memory_format=given)
    if not turned or dtype not in TYPES or not suits(x):
        return reorder.reference(x, channels_last, dtype)
    functions = library()
    if functions is None:
        return reorder.reference(x, channels_last, dtype)
    y = torch.empty(x.shape, dtype=dtype, memory_format=wanted)
    samples, channels, *extents = x.shape
    values = (
        x.data_ptr(),
        y.data_ptr(),
        TYPES[x.dtype],
        TYPES[dtype],
        samples,
        channels,
        math.prod(extents),
        channels_last,
        y.nbytes >= STREAMED,
    )
    call(functions.reorder, REORDERING, values, parts_for(x))
    return y
