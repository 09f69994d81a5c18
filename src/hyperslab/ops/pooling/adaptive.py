"""Distributes adaptive average and maximum pooling, whose windows follow from the two extents.

``interpolate`` calls the average *area*.

Legend: a *spatial dim* is counted from 0 after batch and channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.comm import Grid, all_reduce_sum, log_once, per_grid, plan_exchange
from hyperslab.comm.exchange import ExchangePlan, fetch
from hyperslab.errors import LayoutError
from hyperslab.geometry import AdaptiveWindow, Box, Cut, Interval, Partition
from hyperslab.ops.operands import device_constant
from hyperslab.ops.overloads import Operator, register_each, spatial_dims
from hyperslab.ops.placement import check_input, output_partition, read_cover, with_batch
from hyperslab.ops.pooling.pool import move_indices
from hyperslab.tensor import Sharded


@dataclass(frozen=True, slots=True)
class Spans:
    """Along one spatial dim, the ``inputs`` of every output in a block of them; may be none.

    ``counts`` has how many inputs the windows have in the whole volume.
    """

    dim: int
    inputs: tuple[Interval, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdaptiveLayout:
    """One rank's geometry of an adaptive pooling; made once per (partition, sizes).

    A cut dim with fewer outputs than ranks stays as it is cut: every rank pools its part of every
    window, and the parts are brought together along the axes ``shared``. Along the other cut dims
    the output is cut in proportion, and a rank fetches its outputs' windows.
    """

    input: Partition
    output: Partition
    plan: ExchangePlan
    spans: tuple[Spans, ...]  # of the cut dims
    shared: tuple[str, ...]
    sizes: tuple[int, ...]  # the output block's spatial extents

    def fetch(self, x: Sharded, name: str) -> torch.Tensor:
        """This rank's windows, as far as it pools them."""
        x = x.redistribute(self.input, f"the gather before {name}")
        return fetch(x.block, self.plan, what=f"the halo exchange of {name}")

    @property
    def held(self) -> Box:
        """Return the box of what `fetch` returns, in global indices."""
        return self.plan.wanted


def lay_out_adaptive_pool(x: Sharded, sizes: tuple[int, ...], name: str) -> AdaptiveLayout:
    """Return the layout of an adaptive pooling to ``sizes``."""
    return _cached_layout(x.grid, x.partition, sizes, name)


@per_grid
def _cached_layout(grid: Grid, x: Partition, sizes: tuple[int, ...], name: str) -> AdaptiveLayout:
    x = x.without([cut.axis for cut in x.cuts[2:] if cut is not None and cut.thin])
    given = x.cuts[2:]
    windows = [AdaptiveWindow(e, s) for e, s in zip(x.shape[2:], sizes, strict=True)]
    shared = [c.axis for c, s in zip(given, sizes, strict=True) if c is not None and s < c.parts]
    cuts = [
        None if c is None or c.axis in shared else w.cut_outputs(c, s)
        for c, w, s in zip(given, windows, sizes, strict=True)
    ]
    output = output_partition(x, x.shape[1], sizes, cuts)
    cover = read_cover(x, windows, cuts, sizes, [cut is not None for cut in cuts])
    plan = plan_exchange(x, cover, grid)
    out = output.box(grid.coords)
    spans = tuple(
        _spans(d, windows[d], out.interval(d + 2), plan.wanted.interval(d + 2))
        for d in range(len(sizes))
        if given[d] is not None
    )
    if any(c is not None and c.axis in shared and s > 1 for c, s in zip(given, sizes, strict=True)):
        log_once(
            grid,
            f"{name}: output {' x '.join(map(str, sizes))} is too thin to be cut along "
            f"{', '.join(shared)} of {grid}: its ranks repeat the work from here on",
        )
    return AdaptiveLayout(x, output, plan, spans, tuple(shared), out.shape[2:])


def _spans(dim: int, window: AdaptiveWindow, out: Interval, held: Interval) -> Spans:
    reads = [window.reads((o, o + 1)) for o in range(*out)]
    parts = ((max(lo, held[0]) - held[0], min(hi, held[1]) - held[0]) for lo, hi in reads)
    inputs = tuple((lo, hi) if lo < hi else (0, 0) for lo, hi in parts)
    return Spans(dim, inputs, tuple(hi - lo for lo, hi in reads))


def output_sizes(
    x: Sharded, n: int, output_size: int | Sequence[int | None] | None, name: str
) -> tuple[int, ...]:
    """The output's spatial extents; ``None`` keeps the input's."""
    check_input(x, n, name)
    given: list[int | None]
    if output_size is None or isinstance(output_size, int):
        given = [output_size] * n
    else:
        given = list(output_size)
    if len(given) != n:
        raise ValueError(f"{name}: output_size {output_size} should be one number or {n}")
    sizes = tuple(e if s is None else int(s) for s, e in zip(given, x.shape[2:], strict=True))
    if min(sizes) < 1 or min(x.shape[2:]) < 1:
        raise LayoutError(
            f"{name} of {x.partition} on {x.grid} to {sizes} leaves nothing\n"
            "    use an output_size of at least 1 on an input that is not empty"
        )
    return sizes


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
    layout = lay_out_adaptive_pool(x, sizes, name)
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
    return adaptive_avg_pool(input, output_sizes(input, n, output_size, operator.__name__))


WITH_INDICES: dict[int, Operator] = {
    1: F.adaptive_max_pool1d_with_indices,
    2: F.adaptive_max_pool2d_with_indices,
    3: F.adaptive_max_pool3d_with_indices,
}
VALUES: dict[int, Operator] = {
    1: F.adaptive_max_pool1d,
    2: F.adaptive_max_pool2d,
    3: F.adaptive_max_pool3d,
}
NOWHERE = torch.iinfo(torch.int64).max
"""The index of a window's maximum on a rank that holds nothing of the window."""


def adaptive_max_pool(x: Sharded, sizes: tuple[int, ...]) -> tuple[Sharded, Sharded]:
    """The maxima of a cut tensor (batch, channel, *spatial) and where in the volume they are.

    Distribution scheme:
    1. Cut the output in proportion to the input and fetch the windows of this rank's outputs;
       where an axis has more ranks than outputs, every rank keeps its part of every window.
    2. Repeat elements so that along the cut dims all windows are of one extent and lie side by
       side, as torch's own pooling of that block takes them. A repetition changes no maximum.
    3. Of the maxima of the ranks that share windows take the largest, of equals the first.
    """
    n = len(sizes)
    name = f"adaptive_max_pool{n}d"
    layout = lay_out_adaptive_pool(x, sizes, name)
    block = layout.fetch(x, name)
    tables = {spans.dim: _side_by_side(spans) for spans in layout.spans}
    for dim, table in tables.items():
        if table != list(range(block.shape[dim + 2])):
            block = block.index_select(dim + 2, device_constant(table, block.device))
    values, index = WITH_INDICES[n](block, layout.sizes)
    held = layout.held.lo[2:]

    def move(dim: int, at: torch.Tensor) -> torch.Tensor:
        return device_constant(tables[dim], at.device)[at] + held[dim] if dim in tables else at

    index = move_indices(index, block.shape[2:], move, x.shape[2:])
    for spans in layout.spans:
        values, index = _forget_absent(values, index, spans)
    for axis in layout.shared:
        values, index = _first_largest(x, values, index, layout, axis)
    return x.like(values, layout.output), x.like(index, layout.output)


def _side_by_side(spans: Spans) -> list[int]:
    """The inputs of all windows in turn, the last one of a window repeated to one extent."""
    extent = max(1, *(hi - lo for lo, hi in spans.inputs))
    return [min(lo + k, max(hi - 1, 0)) for lo, hi in spans.inputs for k in range(extent)]


def _forget_absent(
    values: torch.Tensor, index: torch.Tensor, spans: Spans
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let no maximum be where this rank holds nothing of the window."""
    if all(lo < hi for lo, hi in spans.inputs):
        return values, index
    shape = [-1 if d == spans.dim + 2 else 1 for d in range(values.dim())]
    absent = device_constant([lo == hi for lo, hi in spans.inputs], values.device).view(shape)
    return values.masked_fill(absent, -torch.inf), index.masked_fill(absent, NOWHERE)


def _first_largest(
    x: Sharded, values: torch.Tensor, index: torch.Tensor, layout: AdaptiveLayout, axis: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the largest value along an axis and its index: of equals the first, of NaN the last."""
    values = _beside(x, values, layout, axis)
    index = _beside(x, index, layout, axis)
    with torch.no_grad():
        nan = values.isnan()
        candidate = nan | (values == values.amax(2, keepdim=True))
        order = torch.where(nan, -index, index)
        choice = order.masked_fill(~candidate, NOWHERE).argmin(2, keepdim=True)
    return values.gather(2, choice).squeeze(2), index.gather(2, choice).squeeze(2)


def _beside(x: Sharded, block: torch.Tensor, layout: AdaptiveLayout, axis: str) -> torch.Tensor:
    """The blocks of all ranks along an axis, beside each other in a new dim 2."""
    ranks = x.grid.extents[axis]
    shape = layout.output.shape
    cuts = layout.output.cuts
    cut = Cut(axis, tuple(range(ranks + 1)))
    one = Partition((*shape[:2], ranks, *shape[2:]), (*cuts[:2], cut, *cuts[2:]))
    each = x.like(block.unsqueeze(2), one)
    return each.redistribute(one.without([axis]), "the parts of adaptive_max_pool").block


@register_each(
    # torch.adaptive_max_pool1d itself returns both
    (F.adaptive_max_pool1d_with_indices, torch.adaptive_max_pool1d),
    F.adaptive_max_pool2d_with_indices,
    F.adaptive_max_pool3d_with_indices,
    family="pooling",
)
@with_batch
def adaptive_maximum_with_indices(
    operator: Operator,
    input: Sharded,
    output_size: int | Sequence[int | None] | None,
    return_indices: bool = True,
) -> tuple[Sharded, Sharded]:
    """To any extents, with the maxima's flat positions in the whole volume."""
    n = spatial_dims(operator)
    return adaptive_max_pool(input, output_sizes(input, n, output_size, f"adaptive_max_pool{n}d"))


@register_each(*VALUES.values(), family="pooling")
def adaptive_maximum(
    operator: Operator,
    input: Sharded,
    output_size: int | Sequence[int | None] | None,
    return_indices: bool = False,
) -> Sharded:
    """To any extents; to fewer than ranks by partial maxima, without gathering the volume."""
    values, _ = adaptive_maximum_with_indices(operator, input, output_size)
    return values
