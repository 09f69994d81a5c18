"""Direct convolution by the compiled kernels."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence

import torch

from hyperslab.memory_format import CHANNELS_LAST
from hyperslab.ops.kernels.direct import reference
from hyperslab.ops.kernels.fused.compiled.library import call, library, parts_for
from hyperslab.ops.kernels.fused.compiled.plans import PLANS_KEPT, STREAMED, Sizes, dense_strides
from hyperslab.ops.kernels.fused.compiled.tensors import address, ready

DIRECT_POINTERS = struct.Struct("@5q")
"""The tensors of ``direct`` in ``direct.h``."""

DIRECT_NUMBERS = struct.Struct("@17q")
"""What follows them, but for the number of the part and that of all parts."""


@functools.cache
def is_known() -> bool:
    """Whether there are compiled kernels for this processor."""
    functions = library()
    return functions is not None and bool(functions.direct_is_known(b""))


def compiled_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: Sequence[int],
    adjoint: bool,
) -> torch.Tensor:
    """See the schema."""
    functions = library()
    out = weight.shape[1 if adjoint else 0]
    numbers = _numbers(x.shape, out, weight.shape[2:], tuple(padding), x.dtype, adjoint)
    if functions is None or numbers is None:
        return reference.direct_convolution(x, weight, bias, padding, adjoint)
    reference.check_volumes(x, weight, bias, adjoint)
    last = CHANNELS_LAST[x.dim()]
    x = ready(x, last)
    weight = weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    shape = (x.shape[0], out, *_results(x.shape[2:], weight.shape[2:], padding))
    y = torch.empty_strided(shape, dense_strides(shape, last), dtype=x.dtype)
    pointers = DIRECT_POINTERS.pack(x.data_ptr(), weight.data_ptr(), address(bias), y.data_ptr(), 0)
    call(functions.direct_forward, pointers + numbers, y.numel())
    return y


def compiled_gradient(
    x: torch.Tensor,
    g: torch.Tensor,
    kernel: Sequence[int],
    padding: Sequence[int],
    with_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the schema."""
    functions = library()
    numbers = _numbers(x.shape, g.shape[1], tuple(kernel), tuple(padding), x.dtype, False)
    if functions is None or numbers is None:
        return reference.direct_convolution_gradient(x, g, kernel, padding, with_bias)
    reference.check_gradient(x, g, kernel, padding)
    last = CHANNELS_LAST[x.dim()]
    x = ready(x, last)
    g = ready(g, last)
    parts = parts_for(g.numel())
    dw = torch.empty((parts, g.shape[1], x.shape[1], *kernel))
    db = torch.empty((parts, g.shape[1] if with_bias else 0))
    pointers = DIRECT_POINTERS.pack(
        x.data_ptr(), g.data_ptr(), 0, dw.data_ptr(), db.data_ptr() if with_bias else 0
    )
    call(functions.direct_gradient, pointers + numbers, g.numel())
    if parts > 1:
        return dw.sum(0).to(x.dtype), db.sum(0).to(x.dtype)
    return dw[0].to(x.dtype), db[0].to(x.dtype)


@functools.lru_cache(PLANS_KEPT)
def _numbers(
    shape: Sizes, out: int, kernel: Sizes, padding: Sizes, dtype: torch.dtype, adjoint: bool
) -> bytes | None:
    """What the C code is told; None where it does not know the type or the number of dims."""
    if not is_known() or dtype != torch.bfloat16 or len(shape) not in CHANNELS_LAST:
        return None
    results = _results(shape[2:], kernel, padding)
    if len(kernel) != len(results) or min(*shape, *results, *kernel, out) < 1 or min(padding) < 0:
        return None
    samples, channels, *extents = shape
    missing = 3 - len(extents)
    streamed = 2 * samples * out * math.prod(results) >= STREAMED
    spatial = [
        *(1,) * missing,
        *extents,
        *(1,) * missing,
        *results,
        *(1,) * missing,
        *kernel,
        *(0,) * missing,
        *padding,
    ]
    return DIRECT_NUMBERS.pack(samples, channels, out, *spatial, adjoint, streamed)


def _results(extents: Sequence[int], kernel: Sequence[int], padding: Sequence[int]) -> Sizes:
    steps = zip(extents, kernel, padding, strict=True)
    return tuple(e + 2 * p - k + 1 for e, k, p in steps)
