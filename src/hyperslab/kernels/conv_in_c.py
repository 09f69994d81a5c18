"""Convolves in C where oneDNN (3.12) has no fast kernel: few channels, 3³ windows, lone channels.

The operators, whose plain references say what they return::

    torch.ops.hyperslab.direct_convolution           the convolution, or its input's gradient
    torch.ops.hyperslab.direct_convolution_gradient  the gradients of weight and bias
    torch.ops.hyperslab.winograd_gradient            the same, for 3³ windows
    torch.ops.hyperslab.depthwise_gradient           the weight's, of every channel by itself

Why there are these, and no others: docs/design/0015-convolution-kernels.md. A processor without the
instructions has not all of the kernels: there the operators are the references, torch's own, in
float32. In reading order: the direct kernels, Winograd's, the depthwise one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from hyperslab.kernels.compile import (
    PLANS_KEPT,
    STREAMED,
    TYPE_CODES,
    CompiledFunction,
    Library,
    Sizes,
    addresses,
    call,
    integers,
    parts_for,
    three,
)
from hyperslab.kernels.conv_problem import (
    WINOGRAD_DTYPES,
    WINOGRAD_KERNEL,
    ConvOptions,
    aten_convolution,
    aten_gradients,
    in_channels_last,
)
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
    y = aten_convolution(x.to(wide), weight.to(wide), bias, _steps_of_one(padding))
    return y.to(x.dtype).contiguous(memory_format=CHANNELS_LAST[x.dim()])


def _steps_of_one(padding: Sequence[int]) -> ConvOptions:
    ones = (1,) * len(padding)
    return ConvOptions(ones, tuple(padding), ones, 1)


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
    needs = [False, True, False]
    _, dw, _ = aten_gradients(g.to(wide), x.to(wide), weight, _steps_of_one(padding), needs)
    assert dw is not None
    dims = [0, *range(2, g.dim())]
    db = g.to(wide).sum(dims) if with_bias else g.new_empty(0, dtype=wide)
    return dw.to(x.dtype).contiguous(), db.to(x.dtype)


def check_volumes(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, adjoint: bool
) -> None:
    out, channels = weight.shape[:2][::-1] if adjoint else weight.shape[:2]
    fits = x.dim() in CHANNELS_LAST and x.dim() == weight.dim() and channels == x.shape[1]
    if not fits or weight.dtype != x.dtype:
        raise ValueError(f"a weight {tuple(weight.shape)} for a volume {tuple(x.shape)}")
    if bias is not None and (bias.shape != (out,) or bias.dtype != x.dtype):
        raise ValueError(f"a bias {tuple(bias.shape)} for {out} channels")


def check_gradient(
    x: torch.Tensor, g: torch.Tensor, kernel: Sequence[int], padding: Sequence[int]
) -> None:
    """Checks that the gradient has the shape of the convolution's result."""
    extents = _results(x.shape[2:], kernel, padding)
    if x.dim() not in CHANNELS_LAST or (g.shape[0], *g.shape[2:]) != (x.shape[0], *extents):
        raise ValueError(f"a gradient {tuple(g.shape)} for results of {extents}")
    if g.dtype != x.dtype:
        raise ValueError(f"a gradient in {g.dtype} for a volume in {x.dtype}")


def compiled_direct_convolution(functions: Library, given: Operands) -> torch.Tensor:
    x, weight, bias, padding, adjoint = given
    out = weight.shape[1 if adjoint else 0]
    numbers = _direct_numbers(x.shape, out, weight.shape[2:], tuple(padding), x.dtype, adjoint)
    if functions.direct_forward is None or numbers is None:
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
    x, g, kernel, padding, with_bias = given
    numbers = _direct_numbers(x.shape, g.shape[1], tuple(kernel), tuple(padding), x.dtype, False)
    if functions.direct_gradient is None or numbers is None:
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
    dw = torch.empty((parts, g.shape[1], x.shape[1], *kernel), dtype=torch.float32, device="cpu")
    db = dw.new_empty((parts, g.shape[1] if with_bias else 0))
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
    if dtype != torch.bfloat16 or len(shape) not in CHANNELS_LAST:
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
    x, g, padding, with_bias = given
    numbers = _winograd_numbers(x.shape, g.shape, tuple(padding), x.dtype)
    if functions.winograd_gradient is None or numbers is None:
        return NotImplemented
    check_gradient(x, g, WINOGRAD_KERNEL, padding)
    return sum_of_parts(functions.winograd_gradient, x, g, WINOGRAD_KERNEL, with_bias, numbers)


@functools.lru_cache(PLANS_KEPT)
def _winograd_numbers(x: Sizes, g: Sizes, padding: Sizes, dtype: torch.dtype) -> bytes | None:
    """Packs the numbers for C; None where it does not know the type or the number of dims."""
    if dtype not in WINOGRAD_DTYPES or {len(x), len(g), len(padding) + 2} != {5}:
        return None
    if min(*x, *g) < 1 or min(padding) < 0:
        return None
    return integers(TYPE_CODES[dtype], x[0], x[1], g[1], *x[2:], *g[2:], *padding)


def depthwise_gradient(
    x: torch.Tensor,
    g: torch.Tensor,
    kernel: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    """Returns the weight's gradient (C, 1, *kernel), contiguous, in x's dtype.

    ``g`` is the gradient of the result (N, C, ...). Windows go in steps of one and begin at
    -padding.
    """
    channels = x.shape[1]
    options = ConvOptions((1,) * len(kernel), tuple(padding), tuple(dilation), channels)
    weight = x.new_empty((channels, 1, *kernel))
    dw = aten_gradients(g, x, weight, options, (False, True, False))[1]
    assert dw is not None
    return dw.contiguous()


def compiled_depthwise_gradient(functions: Library, given: Operands) -> torch.Tensor:
    x, g, kernel, padding, dilation = given
    numbers = _depthwise_numbers(
        x.shape, g.shape, tuple(kernel), tuple(padding), tuple(dilation), x.dtype
    )
    if functions.depthwise_gradient is None or numbers is None or g.dtype != x.dtype:
        return NotImplemented
    x = in_channels_last(x)
    g = in_channels_last(g)
    dw = torch.empty((x.shape[1], 1, *kernel), dtype=torch.float32, device="cpu")
    call(functions.depthwise_gradient, addresses(x, g, dw) + numbers, g.numel() * dw[0].numel())
    return dw.to(x.dtype)


@functools.lru_cache(PLANS_KEPT)
def _depthwise_numbers(
    x: Sizes, g: Sizes, kernel: Sizes, padding: Sizes, dilation: Sizes, dtype: torch.dtype
) -> bytes | None:
    """Packs the numbers for C; None for what it does not know, or for torch to refuse."""
    dims = len(kernel)
    if (
        dtype not in WINOGRAD_DTYPES
        or dims + 2 not in CHANNELS_LAST
        or {len(x), len(g)} != {dims + 2}
        or {len(padding), len(dilation)} != {dims}
        or min(*x, *g, *kernel, *dilation) < 1
        or min(padding) < 0
    ):
        return None
    steps = zip(x[2:], kernel, padding, dilation, strict=True)
    results = tuple(e + 2 * p - d * (k - 1) for e, k, p, d in steps)
    if g != (*x[:2], *results):
        return None
    spatial = (*three(x[2:]), *three(results), *three(kernel), *three(padding, 0), *three(dilation))
    return integers(TYPE_CODES[dtype], x[0], x[1], *spatial)


declare(direct_convolution, compiled_direct_convolution, "direct.c")
declare(direct_convolution_gradient, compiled_direct_convolution_gradient, "direct_gradient.c")
declare(winograd_gradient, compiled_winograd_gradient, "winograd.c")
declare(depthwise_gradient, compiled_depthwise_gradient, "depthwise.c")
