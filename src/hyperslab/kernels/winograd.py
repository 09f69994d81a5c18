"""Computes the weight gradient of convolutions with 3³ windows by Winograd filtering.

64 products of sums do the work of 216. The forward pass and the input's gradient are not made
so: there a rounding error, or an infinity, would reach voxels whose windows do not see where it
comes from. The weight's gradient is a sum over all voxels anyway. `winograd_is_known` says if
this processor has the instructions; elsewhere the operator ``winograd_gradient`` is torch's
own, in float32: the reference at the beginning.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import torch

from hyperslab.kernels.compile import (
    PLANS_KEPT,
    TYPE_CODES,
    Sizes,
    as_dense,
    call,
    library,
    parts_for,
    winograd_is_known,
)
from hyperslab.kernels.conv_problem import WINOGRAD_DTYPES, WINOGRAD_KERNEL
from hyperslab.kernels.direct_bf16 import check_gradient, direct_convolution_gradient
from hyperslab.kernels.registry import KernelOperator, declare


def winograd_gradient(
    x: torch.Tensor, g: torch.Tensor, padding: Sequence[int], with_bias: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the operator by torch's single operators."""
    return direct_convolution_gradient(x, g, WINOGRAD_KERNEL, padding, with_bias)


WINOGRAD_POINTERS = struct.Struct("@4q")
"""The tensors of ``winograd`` in ``winograd.h``."""

WINOGRAD_NUMBERS = struct.Struct("@13q")
"""The numbers that follow, but for those of the part and of all parts."""


def compiled_winograd_gradient(
    x: torch.Tensor, g: torch.Tensor, padding: Sequence[int], with_bias: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the C kernel; `NotImplemented` for operands that it does not take."""
    functions = library()
    numbers = _winograd_numbers(x.shape, g.shape, tuple(padding), x.dtype)
    if functions is None or numbers is None:
        return NotImplemented
    check_gradient(x, g, WINOGRAD_KERNEL, padding)
    x = as_dense(x, torch.channels_last_3d)
    g = as_dense(g, torch.channels_last_3d)
    parts = parts_for(g.numel())
    dw = torch.empty((parts, g.shape[1], x.shape[1], *WINOGRAD_KERNEL))
    db = torch.empty((parts, g.shape[1] if with_bias else 0))
    addresses = x.data_ptr(), g.data_ptr(), dw.data_ptr(), db.data_ptr() if with_bias else 0
    call(functions.winograd_gradient, WINOGRAD_POINTERS.pack(*addresses) + numbers, g.numel())
    if parts > 1:
        return dw.sum(0).to(x.dtype), db.sum(0).to(x.dtype)
    return dw[0].to(x.dtype), db[0].to(x.dtype)


@functools.lru_cache(PLANS_KEPT)
def _winograd_numbers(x: Sizes, g: Sizes, padding: Sizes, dtype: torch.dtype) -> bytes | None:
    """Packs the numbers for C; None where it does not know the type or the number of dims."""
    if (
        not winograd_is_known()
        or dtype not in WINOGRAD_DTYPES
        or {len(x), len(g), len(padding) + 2} != {5}
    ):
        return None
    if min(*x, *g) < 1 or min(padding) < 0:
        return None
    return WINOGRAD_NUMBERS.pack(TYPE_CODES[dtype], x[0], x[1], g[1], *x[2:], *g[2:], *padding)


declare(
    KernelOperator(
        # The gradients of weight (out, C, 3, 3, 3), contiguous, and of the bias (empty without
        # `with_bias`), in x's dtype; summed in float32. Windows go in steps of one and begin at
        # -padding. g: gradient of the result.
        "winograd_gradient(Tensor x, Tensor g, int[] padding, bool with_bias) -> (Tensor, Tensor)",
        reference=winograd_gradient,
        cpu=compiled_winograd_gradient,
        source="winograd.c",
    )
)
