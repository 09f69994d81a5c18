"""Computes the weight gradient of convolutions that take every channel by itself.

oneDNN (3.12) has kernels for them in two dims; in three it takes a plain loop, ten times as long as
the compiled kernel here. Forward pass and input gradient it computes well. `depthwise_is_known`
says if this processor has the instructions; elsewhere the operator is the reference, torch's own.
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
    addresses,
    call,
    depthwise_is_known,
    integers,
    three,
)
from hyperslab.kernels.conv_problem import (
    WINOGRAD_DTYPES,
    ConvOptions,
    aten_gradients,
    in_channels_last,
)
from hyperslab.kernels.memory_format import CHANNELS_LAST
from hyperslab.kernels.registry import Operands, declare


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
    options = ConvOptions((1,) * len(kernel), tuple(dilation), channels)
    weight = x.new_empty((channels, 1, *kernel))
    dw = aten_gradients(g, x, weight, options, padding, (False, True, False))[1]
    assert dw is not None
    return dw.contiguous()


def compiled_depthwise_gradient(functions: Library, given: Operands) -> torch.Tensor:
    """Runs the C kernel; `NotImplemented` for operands that it does not take."""
    x, g, kernel, padding, dilation = given
    numbers = _depthwise_numbers(
        x.shape, g.shape, tuple(kernel), tuple(padding), tuple(dilation), x.dtype
    )
    if numbers is None or g.dtype != x.dtype:
        return NotImplemented
    x = in_channels_last(x)
    g = in_channels_last(g)
    dw = torch.empty((x.shape[1], 1, *kernel))
    call(functions.depthwise_gradient, addresses(x, g, dw) + numbers, g.numel() * dw[0].numel())
    return dw.to(x.dtype)


@functools.lru_cache(PLANS_KEPT)
def _depthwise_numbers(
    x: Sizes, g: Sizes, kernel: Sizes, padding: Sizes, dilation: Sizes, dtype: torch.dtype
) -> bytes | None:
    """Packs the numbers for C; None for what it does not know, or for torch to refuse."""
    dims = len(kernel)
    if (
        not depthwise_is_known()
        or dtype not in WINOGRAD_DTYPES
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


declare(depthwise_gradient, compiled_depthwise_gradient, "depthwise.c")
