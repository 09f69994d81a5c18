"""Convolutions of a block with a graph, where nothing is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from hyperslab.ops.kernels.convolution.block import conv_backward, conv_forward
from hyperslab.ops.kernels.convolution.layout import as_wanted, computes_last, in_channels_last
from hyperslab.ops.kernels.convolution.options import ConvOptions, Kernels
from hyperslab.ops.kernels.convolution.recomputed import Kept, Recomputed
from hyperslab.ops.kernels.convolution.torchs_own import Gradients, own_differentiable


class Passes(Protocol):
    """A convolution or a transposed one of a block, without a graph."""

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kernels: Kernels,
    ) -> torch.Tensor:
        """What it makes of the block."""

    def backward(
        self,
        gradient: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        needs: Sequence[bool],
        kernels: Kernels,
    ) -> Gradients:
        """Gradients of block, weight and bias; None where ``needs`` is false.

        Where a graph is recorded they can be differentiated again.
        """


@dataclass(frozen=True, slots=True)
class ConvPasses:
    """A convolution with its options and its padding."""

    options: ConvOptions
    padding: tuple[int, ...]

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kernels: Kernels,
    ) -> torch.Tensor:
        """As `Passes.forward`."""
        return conv_forward(x, weight, bias, self.options, self.padding, kernels)

    def backward(
        self,
        gradient: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        needs: Sequence[bool],
        kernels: Kernels,
    ) -> Gradients:
        """As `Passes.backward`."""
        return conv_backward(gradient, x, weight, self.options, self.padding, needs, kernels)


class LocalConv(torch.autograd.Function):
    """`Passes` with a graph."""

    @staticmethod
    def forward(ctx, x, weight, bias, passes: Passes, kernels: Kernels, source):  # type: ignore[no-untyped-def]
        kept = Kept(x, source)
        ctx.value = kept.value
        ctx.passes = passes
        ctx.kernels = kernels
        ctx.has_bias = bias is not None
        ctx.save_for_backward(weight, *kept.tensors)
        return passes.forward(x, weight, bias, kernels)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        weight, *kept = ctx.saved_tensors
        needs = [*ctx.needs_input_grad[:2], ctx.has_bias and ctx.needs_input_grad[2]]
        x = ctx.value(tuple(kept))
        return *ctx.passes.backward(gradient, x, weight, needs, ctx.kernels), None, None, None


def differentiable_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
    padding: Sequence[int],
    margins: Sequence[int] = (),
    kernels: Kernels = "fixed",
    source: Recomputed | None = None,
) -> torch.Tensor:
    """The convolution of a block with its graph.

    ``margins``: more padding, as ``F.pad`` takes it; ``source``: what ``x`` can be computed from
    again.
    """
    if margins:
        x = F.pad(x, margins)
        source = None
    if not computes_last(x, weight, kernels):
        x = as_wanted(x, weight, kernels)
        return own_differentiable(x, weight, bias, options, padding)
    x = converted(x, weight, kernels)
    return LocalConv.apply(x, weight, bias, ConvPasses(options, tuple(padding)), kernels, source)


def converted(x: torch.Tensor, weight: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """A network's input in the format in which a convolution of it computes.

    The convolution keeps what it is given, so that the input need not be converted once more in
    the backward pass. What has a gradient is left as it is: whoever made it may keep it as well.
    """
    if x.requires_grad:
        return x
    if computes_last(x, weight, kernels):
        return in_channels_last(x)
    return as_wanted(x, weight, kernels)


def cast_input(x: torch.Tensor, weight: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """A network's input in another type, and in channels last in the same pass where it may be."""
    rows = x.is_contiguous() and not x.requires_grad and x.dtype == torch.float32
    if rows and computes_last(x[:0].to(weight.dtype), weight, kernels):
        return torch.ops.hyperslab.reorder(x, True, weight.dtype)
    return x
