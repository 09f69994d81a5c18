"""The convolution of one block, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hyperslab.ops.kernels import choose

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
"""Torch's own, by the number of spatial dims."""

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Of input, weight and bias; None where it was not asked for."""


@dataclass(frozen=True, slots=True)
class ConvOptions:
    """What a convolution takes besides its tensors and its padding."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def reference(
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


def conv_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
    padding: Sequence[int],
) -> torch.Tensor:
    """The convolution of a block, without a graph."""
    if choose.convolution_version(x, weight) == "onednn":
        return torch.ops.aten.mkldnn_convolution(
            x,
            weight.contiguous(),
            bias,
            padding,
            options.stride,
            options.dilation,
            options.groups,
        )
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


def conv_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    options: ConvOptions,
    padding: Sequence[int],
    needs: Sequence[bool],
) -> Gradients:
    """Gradients of input, weight and bias of `conv_forward`; None where ``needs`` is false."""
    version = choose.gradient_version(
        x, weight, of_weight=needs[1], with_graph=torch.is_grad_enabled()
    )
    if version == "padded":
        margins = [p for p in reversed(padding) for _ in range(2)]
        zero = [0] * len(padding)
        dx, dw, db = conv_backward(gradient, F.pad(x, margins), weight, options, zero, needs)
        return None if dx is None else F.pad(dx, [-m for m in margins]), dw, db
    if version == "onednn":
        x = x.to_mkldnn()  # chooses the kernel; the gradients are ordinary tensors
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


def differentiable_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
    padding: Sequence[int],
    margins: Sequence[int] = (),
) -> torch.Tensor:
    """Torch's own convolution with its graph; ``margins``: more padding, as ``F.pad`` takes it."""
    version = choose.differentiable_version(x, weight)
    if margins:
        x = F.pad(x, margins)
    if version == "padded":
        x = F.pad(x, [p for p in reversed(padding) for _ in range(2)])
        padding = [0] * len(padding)
    local = CONVOLUTIONS[len(padding)]
    return local(x, weight, bias, options.stride, padding, options.dilation, options.groups)
