"""Computes the weight gradient of convolutions with 3³ windows by Winograd filtering.

64 products of sums do the work of 216. The forward pass and the input's gradient are not made
so: there a rounding error, or an infinity, would reach voxels whose windows do not see where it
comes from. The weight's gradient is a sum over all voxels anyway. `winograd_is_known` says if
this processor has the instructions; elsewhere the operator ``winograd_gradient`` is torch's
own, in float32: the reference at the beginning.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from hyperslab.kernels.compile import (
    PLANS_KEPT,
    TYPE_CODES,
    Library,
    Sizes,
    integers,
    winograd_is_known,
)
from hyperslab.kernels.conv_problem import WINOGRAD_DTYPES, WINOGRAD_KERNEL
from hyperslab.kernels.direct_bf16 import (
    check_gradient,
    direct_convolution_gradient,
    sum_of_parts,
)
from hyperslab.kernels.registry import Operands, declare


def winograd_gradient(
    x: torch.Tensor, g: torch.Tensor, padding: Sequence[int], with_bias: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of weight (out, C, 3, 3, 3), contiguous, and of the bias, in x's dtype.

    That of the bias is empty without ``with_bias``; summed in float32. Windows go in steps of one
    and begin at -padding. ``g`` is the gradient of the result.
    """
    return direct_convolution_gradient(x, g, WINOGRAD_KERNEL, padding, with_bias)


def compiled_winograd_gradient(
    functions: Library, given: Operands
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the C kernel; `NotImplemented` for operands that it does not take."""
    x, g, padding, with_bias = given
    numbers = _winograd_numbers(x.shape, g.shape, tuple(padding), x.dtype)
    if numbers is None:
        return NotImplemented
    check_gradient(x, g, WINOGRAD_KERNEL, padding)
    return sum_of_parts(functions.winograd_gradient, x, g, WINOGRAD_KERNEL, with_bias, numbers)


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
    return integers(TYPE_CODES[dtype], x[0], x[1], g[1], *x[2:], *g[2:], *padding)


declare(winograd_gradient, compiled_winograd_gradient, "winograd.c")
