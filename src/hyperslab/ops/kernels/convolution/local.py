"""Convolutions of a block with a graph, where nothing is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from hyperslab.memory_format import CHANNELS_LAST, dense
from hyperslab.ops.common.room import Room
from hyperslab.ops.kernels.convolution.block import conv_backward, conv_forward
from hyperslab.ops.kernels.convolution.layout import as_wanted, computes_last
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
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        passes: Passes,
        kernels: Kernels,
        source: Recomputed | None,
    ) -> torch.Tensor:
        kept = Kept(x, source)
        ctx.value = kept.value
        ctx.passes = passes
        ctx.kernels = kernels
        ctx.has_bias = bias is not None
        ctx.save_for_backward(weight, *kept.tensors)
        return passes.forward(x, weight, bias, kernels)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
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


def converted(
    x: torch.Tensor,
    weight: torch.Tensor,
    kernels: Kernels,
    dtype: torch.dtype | None = None,
    room: Room | None = None,
) -> torch.Tensor:
    """A block in ``dtype``; a network's input also in the format in which it is convolved.

    The convolution keeps what it is given, so that the input need not be converted once more in
    the backward pass; with ``room`` it is made there, if it may be. What has a gradient is left in
    its format: whoever made it may keep it as well.
    """
    dtype = dtype or x.dtype
    if x.requires_grad:
        return x.to(dtype)
    if not computes_last(x[:0].to(dtype), weight, kernels):
        return as_wanted(x.to(dtype), weight, kernels)
    last = CHANNELS_LAST[x.dim()]
    if x.dtype == dtype and x.is_contiguous(memory_format=last):
        return dense(x, last)
    y = None if room is None else room.block(x.shape, dtype, last)
    if y is None:
        return torch.ops.hyperslab.reorder(x, True, dtype)
    torch.ops.hyperslab.reorder_into(x, y)
    return y
