"""Convolves volumes of few channels in bfloat16, summed in registers.

OneDNN works on 16 channels at a time however few there are. Two operators::

    torch.ops.hyperslab.direct_convolution           the convolution, or its input's gradient
    torch.ops.hyperslab.direct_convolution_gradient  the gradients of weight and bias

`direct_is_known` says if this processor has the instructions; elsewhere the operators are
torch's own, in float32: the references at the beginning.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from hyperslab.kernels.compile import (
    PLANS_KEPT,
    STREAMED,
    CompiledFunction,
    Library,
    Sizes,
    addresses,
    call,
    direct_is_known,
    integers,
    parts_for,
    three,
)
from hyperslab.kernels.conv_problem import ConvOptions, aten_convolution, aten_gradients
from hyperslab.kernels.memory_format import CHANNELS_LAST, as_dense, strides_in
from hyperslab.kernels.registry import Operands, declare


def direct_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: Sequence[int],
    adjoint: bool,
) -> torch.Tensor:
    """Returns y, channels last, in x's dtype; summed in float32.

    Windows go in steps of one and begin at -padding. ``weight`` is (out, C, *kernel), with
    ``adjoint`` (C, out, *kernel), turned round: with a padding of kernel - 1 - p that is the
    gradient of the input of a convolution with p.
    """
    check_volumes(x, weight, bias, adjoint)
    wide = torch.promote_types(x.dtype, torch.float32)
    if adjoint:
        weight = weight.transpose(0, 1).flip(tuple(range(2, weight.dim())))
    bias = None if bias is None else bias.to(wide)
    y = aten_convolution(x.to(wide), weight.to(wide), bias, _steps_of_one(padding), padding)
    return y.to(x.dtype).contiguous(memory_format=CHANNELS_LAST[x.dim()])


def _steps_of_one(padding: Sequence[int]) -> ConvOptions:
    ones = (1,) * len(padding)
    return ConvOptions(ones, ones, 1)


def direct_convolution_gradient(
    x: torch.Tensor,
    g: torch.Tensor,
    kernel: Sequence[int],
    padding: Sequence[int],
    with_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of weight (out, C, *kernel), contiguous, and of the bias.

    That one is empty without ``with_bias``. ``g`` is the gradient of y.
    """
    check_gradient(x, g, kernel, padding)
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = x.new_empty((g.shape[1], x.shape[1], *kernel), dtype=wide)
    options = _steps_of_one(padding)
    needs = [False, True, False]
    _, dw, _ = aten_gradients(g.to(wide), x.to(wide), weight, options, padding, needs)
    assert dw is not None
    dims = [0, *range(2, g.dim())]
    db = g.to(wide).sum(dims) if with_bias else g.new_empty(0, dtype=wide)
    return dw.to(x.dtype).contiguous(), db.to(x.dtype)


def check_volumes(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, adjoint: bool
) -> None:
    """Checks that the tensors fit each other.

    Raises:
        ValueError: they do not.
    """
    out, channels = weight.shape[:2][::-1] if adjoint else weight.shape[:2]
    fits = x.dim() in CHANNELS_LAST and x.dim() == weight.dim() and channels == x.shape[1]
    if not fits or weight.dtype != x.dtype:
        raise ValueError(f"a weight {tuple(weight.shape)} for a volume {tuple(x.shape)}")
    if bias is not None and (bias.shape != (out,) or bias.dtype != x.dtype):
        raise ValueError(f"a bias {tuple(bias.shape)} for {out} channels")


def check_gradient(
    x: torch.Tensor, g: torch.Tensor, kernel: Sequence[int], padding: Sequence[int]
) -> None:
    """Checks that the gradient has the shape of the convolution's result.

    Raises:
        ValueError: it is not.
    """
    extents = _results(x.shape[2:], kernel, padding)
    if x.dim() not in CHANNELS_LAST or (g.shape[0], *g.shape[2:]) != (x.shape[0], *extents):
        raise ValueError(f"a gradient {tuple(g.shape)} for results of {extents}")
    if g.dtype != x.dtype:
        raise ValueError(f"a gradient in {g.dtype} for a volume in {x.dtype}")


def compiled_direct_convolution(functions: Library, given: Operands) -> torch.Tensor:
    """Runs the C kernel; `NotImplemented` for operands that it does not take."""
    x, weight, bias, padding, adjoint = given
    out = weight.shape[1 if adjoint else 0]
    numbers = _direct_numbers(x.shape, out, weight.shape[2:], tuple(padding), x.dtype, adjoint)
    if numbers is None:
        return NotImplemented
    check_volumes(x, weight, bias, adjoint)
    last = CHANNELS_LAST[x.dim()]
    x = as_dense(x, last)
    weight = weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    shape = (x.shape[0], out, *_results(x.shape[2:], weight.shape[2:], padding))
    y = torch.empty_strided(shape, strides_in(shape, last), dtype=x.dtype)
    call(functions.direct_forward, addresses(x, weight, bias, y, None) + numbers, y.numel())
    return y


def compiled_direct_convolution_gradient(
    functions: Library, given: Operands
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the C kernel; `NotImplemented` for operands that it does not take."""
    x, g, kernel, padding, with_bias = given
    numbers = _direct_numbers(x.shape, g.shape[1], tuple(kernel), tuple(padding), x.dtype, False)
    if numbers is None:
        return NotImplemented
    check_gradient(x, g, kernel, padding)
    return sum_of_parts(functions.direct_gradient, x, g, kernel, with_bias, numbers, [None])


def sum_of_parts(
    function: CompiledFunction,
    x: torch.Tensor,
    g: torch.Tensor,
    kernel: Sequence[int],
    with_bias: bool,
    numbers: bytes,
    between: Sequence[None] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs a kernel of the weight's gradient, of which each part of the work has its own sums.

    ``between``: tensors that C knows between ``g`` and the sums, and that a gradient has not.
    """
    last = CHANNELS_LAST[x.dim()]
    x = as_dense(x, last)
    g = as_dense(g, last)
    parts = parts_for(g.numel())
    dw = torch.empty((parts, g.shape[1], x.shape[1], *kernel))
    db = torch.empty((parts, g.shape[1] if with_bias else 0))
    tensors = addresses(x, g, *between, dw, db if with_bias else None)
    call(function, tensors + numbers, g.numel())
    if parts > 1:
        return dw.sum(0).to(x.dtype), db.sum(0).to(x.dtype)
    return dw[0].to(x.dtype), db[0].to(x.dtype)


@functools.lru_cache(PLANS_KEPT)
def _direct_numbers(
    shape: Sizes, out: int, kernel: Sizes, padding: Sizes, dtype: torch.dtype, adjoint: bool
) -> bytes | None:
    """Packs the numbers for C; None where it does not know the type or the number of dims."""
    if not direct_is_known() or dtype != torch.bfloat16 or len(shape) not in CHANNELS_LAST:
        return None
    results = _results(shape[2:], kernel, padding)
    if len(kernel) != len(results) or min(*shape, *results, *kernel, out) < 1 or min(padding) < 0:
        return None
    samples, channels, *extents = shape
    streamed = 2 * samples * out * math.prod(results) >= STREAMED
    spatial = (*three(extents), *three(results), *three(kernel), *three(padding, 0))
    return integers(samples, channels, out, *spatial, adjoint, streamed)


def _results(extents: Sequence[int], kernel: Sequence[int], padding: Sequence[int]) -> Sizes:
    steps = zip(extents, kernel, padding, strict=True)
    return tuple(e + 2 * p - k + 1 for e, k, p in steps)


declare(direct_convolution, compiled_direct_convolution, "direct.c")
declare(direct_convolution_gradient, compiled_direct_convolution_gradient, "direct_gradient.c")
