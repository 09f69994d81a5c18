"""The convolution tap by tap, with which implementations are compared."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from hyperslab.kernels.conv_problem import ConvOptions


def conv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
) -> torch.Tensor:
    """Adds up every tap of the kernel times the inputs that it meets; differentiable."""
    x = F.pad(x, [p for p in reversed(options.padding) for _ in range(2)])
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
