"""Torch's own convolution of a block, with a guard for what it gets wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hyperslab.ops.kernels import choose
from hyperslab.ops.kernels.convolution.options import ConvOptions, outreaches

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
"""By the number of spatial dims."""

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Of input, weight and bias; None where it was not asked for."""


def kernel_is_larger(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether padding must be part of ``x``, see `outreaches`."""
    return choose.device_kind(x) == "cpu" and outreaches(weight.shape, x.shape, x.dtype)


def own_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
    padding: Sequence[int],
) -> torch.Tensor:
    """The convolution."""
    if kernel_is_larger(x, weight):
        x = F.pad(x, [p for p in reversed(padding) for _ in range(2)])
        padding = [0] * len(padding)
    return torch.ops.aten.convolution(
        x,
        weight,
        bias,
        options.stride,
        padding,
        options.dilation,
        False,
        [0] * len(padding),
        options.groups,
    )


def own_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    options: ConvOptions,
    padding: Sequence[int],
    needs: Sequence[bool],
) -> Gradients:
    """Gradients of input, weight and bias; None where ``needs`` is false. Differentiable."""
    if (needs[0] or needs[1]) and kernel_is_larger(x, weight):
        margins = [p for p in reversed(padding) for _ in range(2)]
        zero = [0] * len(padding)
        x = F.pad(x, margins)
        dx, dw, db = _backward(gradient, x, weight, options, zero, needs)
        return None if dx is None else F.pad(dx, [-m for m in margins]), dw, db
    return _backward(gradient, x, weight, options, padding, needs)


def _backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    options: ConvOptions,
    padding: Sequence[int],
    needs: Sequence[bool],
) -> Gradients:
    return torch.ops.aten.convolution_backward(
        gradient,
        x,
        weight,
        [weight.shape[0]],
        options.stride,
        padding,
        options.dilation,
        False,
        [0] * len(padding),
        options.groups,
        list(needs),
    )


def own_differentiable(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
    padding: Sequence[int],
) -> torch.Tensor:
    """The convolution with its graph."""
    if kernel_is_larger(x, weight):
        x = F.pad(x, [p for p in reversed(padding) for _ in range(2)])
        padding = [0] * len(padding)
    local = CONVOLUTIONS[len(padding)]
    return local(x, weight, bias, options.stride, padding, options.dilation, options.groups)


def own_transposed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
    padding: Sequence[int],
    extra: Sequence[int],
) -> torch.Tensor:
    """The transposed convolution; ``extra`` is its output padding. Differentiable."""
    return torch.ops.aten.convolution(
        x,
        weight,
        bias,
        options.stride,
        padding,
        options.dilation,
        True,
        extra,
        options.groups,
    )


def own_transposed_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    options: ConvOptions,
    padding: Sequence[int],
    extra: Sequence[int],
    needs: Sequence[bool],
) -> Gradients:
    """Gradients of input, weight and bias; None where ``needs`` is false. Differentiable."""
    return torch.ops.aten.convolution_backward(
        gradient,
        x,
        weight,
        [weight.shape[1] * options.groups],
        options.stride,
        padding,
        options.dilation,
        True,
        extra,
        options.groups,
        list(needs),
    )
