"""The general distributed convolution: fill a halo buffer, convolve it without padding."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from hyperslab.comm.exchange import add_returned, blank, place, start, start_adjoint
from hyperslab.nn.convspec import ConvSpec, conv_backward, conv_forward


class BufferConv(torch.autograd.Function):
    """Convolution whose windows do not line up with the cut.

    Distribution scheme, forward: 1. exchange halos, 2. put block and halos into one buffer that
    spans what the outputs read, zeros where that is padding, 3. convolve the buffer. Saved are
    the block (the producer's own tensor) and the thin halos, not the buffer: it is filled again
    in the backward pass. Backward: 1. gradients of buffer, weight, bias, 2. halo gradients
    travel home and are added.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, spec: ConvSpec):  # type: ignore[no-untyped-def]
        pieces = start(x, spec.plan, spec.name).wait()
        ctx.spec, ctx.has_bias = spec, bias is not None
        ctx.save_for_backward(x, weight, *pieces)
        return conv_forward(_fill(x, pieces, spec), weight, bias, spec, spec.uncovered_padding)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        spec, plan = ctx.spec, ctx.spec.plan
        x, weight, *pieces = ctx.saved_tensors
        needs = [*ctx.needs_input_grad[:2], ctx.has_bias and ctx.needs_input_grad[2]]
        buffer = _fill(x, pieces, spec)
        whole, dw, db = conv_backward(gradient, buffer, weight, spec, spec.uncovered_padding, needs)
        if whole is None:
            return None, dw, db, None
        halos = [whole[t.box.slices(plan.wanted)] for t in plan.receives]
        pending = start_adjoint(halos, whole, plan, spec.name)
        dx = blank(plan.own, [plan.kept], whole)
        place(dx, plan.own, whole, plan.wanted)
        add_returned(dx, pending.wait(), plan)
        return dx, dw, db, None


def _fill(x: torch.Tensor, pieces: list[torch.Tensor], spec: ConvSpec) -> torch.Tensor:
    plan = spec.plan
    buffer = blank(plan.wanted, [plan.kept, *(t.box for t in plan.receives)], x)
    place(buffer, plan.wanted, x, plan.own)
    for t, piece in zip(plan.receives, pieces, strict=True):
        place(buffer, plan.wanted, piece, t.box)
    return buffer
