"""Runs the general distributed convolution: fills a halo buffer, convolves it without padding.

`ConvSpec` is one rank's share of a convolution as geometry; `BufferConv` is for windows that do
not line up with the cut, and for transposed convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from hyperslab.comm import ExchangePlan
from hyperslab.comm.exchange import (
    add_returned,
    copy_overlap,
    fetch,
    gaps_in,
    give_back,
    new_box,
    start,
    start_adjoint,
)
from hyperslab.geometry import Box, Window
from hyperslab.kernels.conv import (
    Gradients,
    Passes,
    RecomputedInput,
    SavedInput,
    conv_backward,
    conv_forward,
)
from hyperslab.kernels.conv_problem import ConvOptions, Kernels
from hyperslab.kernels.memory_format import HaloPaddedBuffer


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """The windows, the exchange and the output box of one rank.

    ``covered[i]``: the plan's wanted box spans spatial dim ``i`` with its halo and its padding,
    so that a convolution of it needs no padding there.
    """

    name: str
    windows: tuple[Window, ...]
    covered: tuple[bool, ...]
    options: ConvOptions
    plan: ExchangePlan
    out: Box

    @property
    def uncovered_padding(self) -> list[int]:
        """Padding left to the op when it runs on the wanted box."""
        return [0 if c else w.before for c, w in zip(self.covered, self.windows, strict=True)]

    @property
    def box(self) -> Box:
        """Return the box that the buffer spans for one convolution of block and halo."""
        return self.plan.wanted

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kernels: Kernels,
    ) -> torch.Tensor:
        """Compute the rank's outputs from the buffer."""
        return conv_forward(x, weight, bias, self.options, self.uncovered_padding, kernels)

    def backward(
        self,
        gradient: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        needs: Sequence[bool],
        kernels: Kernels,
    ) -> Gradients:
        """Gradients of buffer, weight and bias; None where ``needs`` is false."""
        padding = self.uncovered_padding
        return conv_backward(gradient, x, weight, self.options, padding, needs, kernels)


class BufferedPasses(Passes, Protocol):
    """One rank's share of a convolution or a transposed one: the exchange, the buffer, the op.

    ``box``: what the buffer spans: what the plan brings, and zeros beside it.
    """

    @property
    def name(self) -> str: ...

    @property
    def plan(self) -> ExchangePlan: ...

    @property
    def box(self) -> Box: ...


class BufferConv(torch.autograd.Function):
    """Convolution whose windows do not line up with the cut, or whose input has `HaloPaddedBuffer`.

    Distribution scheme, forward: 1. exchange halos, 2. put block and halos into one buffer that
    spans what the outputs read, zeros where that is padding, 3. convolve the buffer. Where the
    block was made with ``room`` for its halo it lies in that buffer already, which is then kept.
    Otherwise saved are the block (the producer's own tensor, or what ``source`` makes it of) and
    the thin halos, not the buffer: it is filled again in the backward pass. Backward: 1. gradients
    of buffer, weight, bias, 2. halo gradients travel home and are added; or `backward_with_graph`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        spec: BufferedPasses,
        kernels: Kernels,
        source: RecomputedInput | None,
        room: HaloPaddedBuffer | None = None,
    ) -> torch.Tensor:
        pieces = start(x, spec.plan, spec.name).wait()
        buffer = _fill_buffer(x, pieces, spec, room)
        kept = SavedInput(x, source)
        ctx.value = kept.value
        ctx.spec = spec
        ctx.kernels = kernels
        ctx.has_bias = bias is not None
        ctx.has_buffer = source is None and room is not None and room.buffer is not None
        halos = [buffer] if ctx.has_buffer else pieces
        ctx.save_for_backward(weight, *kept.tensors, *halos)
        ctx.kept = len(kept.tensors)
        ctx.room = room and room.empty()
        return spec.forward(buffer, weight, bias, kernels)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        spec = ctx.spec
        plan = spec.plan
        weight, *saved = ctx.saved_tensors
        kept = tuple(saved[: ctx.kept])
        halos = saved[ctx.kept :]
        needs = [*ctx.needs_input_grad[:2], ctx.has_bias and ctx.needs_input_grad[2]]
        if torch.is_grad_enabled():
            x = ctx.value(kept)
            return *backward_with_graph(gradient, x, weight, spec, needs), *[None] * 4
        if ctx.has_buffer:
            (buffer,) = halos
        else:
            buffer = _fill_buffer(ctx.value(kept, ctx.room), halos, spec, ctx.room)
        whole, dw, db = spec.backward(gradient, buffer, weight, needs, ctx.kernels)
        del buffer
        if whole is None:
            return None, dw, db, *[None] * 4
        halos = [whole[t.box.slices(spec.box)] for t in plan.receives]
        pending = start_adjoint(halos, whole, plan, spec.name)
        if spec.box.contains(plan.own):
            dx = whole[plan.own.slices(spec.box)]
        else:
            dx = new_box(plan.own, plan.kept_parts, whole)
            copy_overlap(dx, plan.own, whole, spec.box)
        add_returned(dx, pending.wait(), plan)
        return dx, dw, db, *[None] * 4


def backward_with_graph(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    spec: BufferedPasses,
    needs: Sequence[bool],
) -> Gradients:
    """Gradients of block, weight and bias out of operators that can be differentiated again.

    For ``create_graph=True``. The halo is fetched once more: the saved one has no history.
    """
    buffer = fetch(x, spec.plan, what=spec.name)
    wanted = spec.plan.wanted
    box = spec.box
    before = [a - b for a, b in zip(wanted.lo, box.lo, strict=True)]
    after = [b - a for a, b in zip(wanted.hi, box.hi, strict=True)]
    margins = [m for ends in zip(reversed(before), reversed(after), strict=True) for m in ends]
    buffer = F.pad(buffer, margins) if any(margins) else buffer
    whole, dw, db = spec.backward(gradient, buffer, weight, needs, "torch")
    if whole is None:
        return None, dw, db
    return give_back(whole[wanted.slices(box)], spec.plan, what=spec.name), dw, db


def _fill_buffer(
    x: torch.Tensor,
    pieces: Sequence[torch.Tensor],
    spec: BufferedPasses,
    room: HaloPaddedBuffer | None,
) -> torch.Tensor:
    """Return what the outputs read; ``x`` itself, or a part of it, where that is all."""
    plan = spec.plan
    box = spec.box
    if plan.local and plan.own.contains(box):
        return x[box.slices(plan.own)]
    if room is not None and room.buffer is not None:
        buffer = room.buffer
        for gap in gaps_in(box, plan.brought):
            buffer[gap].zero_()
    else:
        buffer = new_box(box, plan.brought, x)
        copy_overlap(buffer, box, x, plan.own)
    for t, piece in zip(plan.receives, pieces, strict=True):
        copy_overlap(buffer, box, piece, t.box)
    return buffer
