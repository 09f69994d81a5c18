"""Calls torch's own convolution of a block, with guards for what torch and oneDNN get wrong.

OneDNN (3.12) reads, and sometimes writes, foreign memory for some shapes, in plain torch
convolutions too: garbage, NaN or a crash. They were found by random shapes; each is a tiny
volume, so that the way round costs nothing that counts.

In reading order: the plain reference that tests compare with; torch's forward and backward,
transposed or not; `guarded`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.kernels import registry
from hyperslab.kernels.conv.problem import (
    ConvOptions,
    Problem,
    in_channels_last,
    kernel_exceeds_volume,
)


def conv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
    padding: Sequence[int],
) -> torch.Tensor:
    """Every tap of the kernel times the inputs that it meets; autograd has its gradients."""
    x = F.pad(x, [p for p in reversed(padding) for _ in range(2)])
    kernel = weight.shape[2:]
    steps = list(zip(kernel, options.stride, options.dilation, strict=True))
    extents = [
        (e - (k - 1) * d - 1) // s + 1 for e, (k, s, d) in zip(x.shape[2:], steps, strict=True)
    ]
    blocks = x.unflatten(1, (options.groups, -1))
    weights = weight.unflatten(0, (options.groups, -1))
    y = x.new_zeros((len(x), weight.shape[0], *extents))
    for tap in itertools.product(*map(range, kernel)):
        met = tuple(
            slice(t * d, t * d + (count - 1) * s + 1, s)
            for t, count, (_, s, d) in zip(tap, extents, steps, strict=True)
        )
        products = torch.einsum("ngc...,goc->ngo...", blocks[(..., *met)], weights[(..., *tap)])
        y = y + products.flatten(1, 2)
    return y if bias is None else y + bias.view(-1, *[1] * len(kernel))


CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
"""By the number of spatial dims."""

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Of input, weight and bias; None where it was not asked for."""


def kernel_is_larger(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether padding must be part of ``x``, see `outreaches`."""
    return registry.device_kind(x) == "cpu" and kernel_exceeds_volume(
        weight.shape, x.shape, x.dtype
    )


def aten_forward(
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


def aten_backward(
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
        dx, dw, db = _aten_backward(gradient, x, weight, options, zero, needs)
        return None if dx is None else F.pad(dx, [-m for m in margins]), dw, db
    return _aten_backward(gradient, x, weight, options, padding, needs)


def _aten_backward(
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


def differentiable_aten_conv(
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


def aten_transposed(
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


def aten_transposed_backward(
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


def guarded(run: Callable[..., Any], problem: Problem, first: torch.Tensor, *others: Any) -> Any:
    """The result of ``run``, or the same one by a way that oneDNN computes right."""
    if problem.has_lone_column:
        y = guarded(run, problem.in_steps_of_one(), first, *others)
        return in_channels_last(y.narrow(-1, 0, 1))
    if not problem.outreaches:
        return run(problem, first, *others)
    margins = [p for p in reversed(problem.padding) for _ in range(2)]
    if problem.task != "input":
        return run(problem.padded(), in_channels_last(F.pad(first, margins)), *others)
    padded = run(problem.padded(), first, *others)
    return in_channels_last(F.pad(padded, [-margin for margin in margins]))
