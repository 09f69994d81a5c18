"""Linear maps along the spatial dims by the compiled kernel."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence

import torch

from hyperslab.ops.kernels.fused.compiled.library import call, library
from hyperslab.ops.kernels.fused.compiled.plans import (
    PLANS_KEPT,
    STREAMED,
    TYPE_CODES,
    Sizes,
    dense_strides,
)
from hyperslab.ops.kernels.fused.compiled.tensors import ready
from hyperslab.ops.kernels.fused.layout import format_of
from hyperslab.ops.kernels.resample import reference

RESAMPLE_POINTERS = struct.Struct("@11q")
"""The tensors of ``resampling`` in ``resample.c``."""

RESAMPLE_NUMBERS = struct.Struct("@11q")
"""What follows them, but for the number of the part and that of all parts."""


def compiled_resample(
    x: torch.Tensor, maps: Sequence[torch.Tensor], extents: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """See the schema."""
    functions = library()
    memory_format = format_of(x)
    last = memory_format != torch.contiguous_format
    results = tuple(extents)
    numbers = _numbers(x.shape, results, (x.dtype, dtype), last)
    if functions is None or numbers is None:
        return reference.resample_by_dims(x, maps, extents, dtype)
    reference.check_maps(x, maps, extents)
    x = ready(x, memory_format)
    shape = (*x.shape[:2], *results)
    y = torch.empty_strided(shape, dense_strides(shape, memory_format), dtype=dtype)
    given = [*_IDENTITY * (3 - len(results)), *maps]
    pointers = RESAMPLE_POINTERS.pack(x.data_ptr(), y.data_ptr(), *(t.data_ptr() for t in given))
    call(functions.resample, pointers + numbers, max(x.numel(), y.numel()))
    return y


_IDENTITY = [torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1)]
"""The map of a dim that is not there."""


@functools.lru_cache(PLANS_KEPT)
def _numbers(
    shape: Sizes, results: Sizes, types: tuple[torch.dtype, torch.dtype], channels_last: bool
) -> bytes | None:
    """What the C code is told; None where it does not know the types or the number of dims."""
    known = all(dtype in TYPE_CODES for dtype in types)
    if not known or not 3 <= len(shape) <= 5 or not math.prod(shape) * math.prod(results):
        return None
    samples, channels, *inputs = shape
    blocks = (samples, channels) if channels_last else (samples * channels, 1)
    missing = (1,) * (3 - len(inputs))
    size = samples * channels * math.prod(results) * types[1].itemsize
    return RESAMPLE_NUMBERS.pack(
        *(TYPE_CODES[dtype] for dtype in types),
        *blocks,
        *missing,
        *inputs,
        *missing,
        *results,
        size >= STREAMED,
    )
