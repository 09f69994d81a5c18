"""Adaptive average pooling, which ``interpolate`` calls area."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.comm import all_reduce_sum
from hyperslab.ops.common.forms import Operator, register_each, spatial_dims
from hyperslab.ops.common.unbatched import with_batch
from hyperslab.ops.pooling.adaptive_layout import Spans, layout_of, sizes_of
from hyperslab.tensor import Sharded

ADAPTIVE_AVERAGES: dict[int, Operator] = {
    1: F.adaptive_avg_pool1d,
    2: F.adaptive_avg_pool2d,
    3: F.adaptive_avg_pool3d,
}


class SpanMean(torch.autograd.Function):
    """Along one dim of a block, the sums of the spans over the windows' counts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, spans: Spans) -> torch.Tensor:
        dim = spans.dim + 2
        ctx.spans = spans
        ctx.extent = x.shape[dim]
        out = x.new_empty((*x.shape[:dim], len(spans.inputs), *x.shape[dim + 1 :]))
        for o, ((lo, hi), count) in enumerate(zip(spans.inputs, spans.counts, strict=True)):
            out.select(dim, o).copy_(x.narrow(dim, lo, hi - lo).sum(dim).div_(count))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _SpanShare.apply(gradient, ctx.spans, ctx.extent), None


class _SpanShare(torch.autograd.Function):
    """The adjoint of `SpanMean`: every input of a span gets its share."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, spans: Spans, extent: int) -> torch.Tensor:
        ctx.spans = spans
        dim = spans.dim + 2
        out = gradient.new_zeros((*gradient.shape[:dim], extent, *gradient.shape[dim + 1 :]))
        for o, ((lo, hi), count) in enumerate(zip(spans.inputs, spans.counts, strict=True)):
            out.narrow(dim, lo, hi - lo).add_(gradient.narrow(dim, o, 1) / count)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return SpanMean.apply(gradient, ctx.spans), None, None


def adaptive_avg_pool(x: Sharded, sizes: tuple[int, ...]) -> Sharded:
    """Average a cut tensor (batch, channel, *spatial) over windows that follow from ``sizes``.

    Distribution scheme:
    1. Cut the output in proportion to the input and fetch the windows of this rank's outputs;
       where an axis has more ranks than outputs, every rank keeps its part of every window.
    2. Average along the cut dims, then with torch's own pooling along the others.
    3. Add the parts of the ranks that share windows.
    """
    n = len(sizes)
    name = f"adaptive_avg_pool{n}d"
    layout = layout_of(x, sizes, name)
    block = layout.fetch(x, name)
    smallest = block.new_zeros((1,) * (n + 2))
    dtype = ADAPTIVE_AVERAGES[n](smallest, (1,) * n).dtype  # what autocast makes of it
    if layout.spans:
        block = block.to(torch.promote_types(block.dtype, torch.float32))
    for spans in layout.spans:
        block = SpanMean.apply(block, spans)
    if len(layout.spans) < n:
        block = ADAPTIVE_AVERAGES[n](block, layout.sizes)
    block = all_reduce_sum(block, x.grid.group(layout.shared), name)
    return x.like(block.to(dtype), layout.output)


@register_each(*ADAPTIVE_AVERAGES.values(), family="pooling")
@with_batch
def adaptive_average(
    operator: Operator, input: Sharded, output_size: int | Sequence[int | None] | None
) -> Sharded:
    """To any extents; to fewer than ranks by partial sums, without gathering the volume."""
    n = spatial_dims(operator)
    return adaptive_avg_pool(input, sizes_of(input, n, output_size, operator.__name__))
