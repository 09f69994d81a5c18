"""Distributes maximum unpooling: values go back to where their maxima were.

Legend: a *spatial dim* is counted from 0 after batch and channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hyperslab.comm import Grid, per_grid, plan_exchange
from hyperslab.comm.agreement import any_rank
from hyperslab.comm.exchange import ExchangePlan, fetch
from hyperslab.errors import LayoutError
from hyperslab.geometry import Box, Cut, Interval, Partition, TransposedWindow
from hyperslab.ops.operands import operand_block
from hyperslab.ops.overloads import Operator, PerDim, per_dim, register_each, spatial_dims
from hyperslab.ops.placement import (
    batch_of_one,
    check_input,
    check_unbatched,
    only_sample,
    output_partition,
    placement,
    read_cover,
)
from hyperslab.ops.pooling.pool import move_indices
from hyperslab.tensor import Sharded

UNPOOLINGS = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}


@dataclass(frozen=True, slots=True)
class Unpooling:
    """Along one dim, value ``i`` of ``extent`` goes somewhere into ``i * stride - padding`` and
    the ``kernel - 1`` outputs after it.
    """

    kernel: int
    stride: int
    padding: int
    extent: int

    def reads(self, out: Interval) -> Interval:
        """Values that may go to the outputs ``out``, one at least."""
        lo, hi = TransposedWindow(self.kernel, self.stride, self.padding).reads(out)
        lo = min(max(lo, 0), self.extent - 1)
        return lo, max(min(hi, self.extent), lo + 1)

    def writes(self, values: Interval) -> Interval:
        """Return where the values may go; not clipped."""
        first = values[0] * self.stride - self.padding
        return first, (values[1] - 1) * self.stride - self.padding + self.kernel

    def cut_outputs(self, cut: Cut, outputs: int) -> Cut:
        """The cut of the outputs: that of the map that was pooled, where windows do not overlap."""
        return TransposedWindow(self.kernel, self.stride, self.padding).cut_outputs(cut, outputs)


@dataclass(frozen=True, slots=True)
class UnpoolLayout:
    """One rank's geometry of an unpooling; made once per (partition, windows, sizes)."""

    input: Partition
    output: Partition
    plan: ExchangePlan
    windows: tuple[Unpooling, ...]
    cut: tuple[bool, ...]  # whether the output is, by spatial dim
    reach: Box  # where this rank's values may go, and its outputs


def max_unpool(
    x: Sharded, indices: torch.Tensor, windows: tuple[Unpooling, ...], sizes: tuple[int, ...]
) -> Sharded:
    """Put values at their ``indices``, flat positions in a volume of ``sizes``, and 0 elsewhere.

    Distribution scheme:
    1. Place the outputs of every window on the rank that owns it; fetch values and indices that
       may come into this rank's outputs from windows that reach over the cut.
    2. All ranks make sure together that no index lies outside its window.
    3. Torch's own unpooling into all that the fetched windows span, of which this rank's outputs
       are kept.
    """
    n = len(sizes)
    name = f"max_unpool{n}d"
    layout = lay_out_unpool(x.grid, x.partition, windows, sizes, name)
    x = x.redistribute(layout.input, f"the gather before {name}")
    at = operand_block(indices, target=layout.input, like=x)
    values = fetch(x.block, layout.plan, what=f"the exchange of {name}")
    at = fetch(at, layout.plan, what=f"the exchange of {name}")
    if any(layout.cut):
        _check_indices(at, x, layout, sizes, name)
    reach = layout.reach
    out = layout.output.box(x.grid.coords)
    at = move_indices(at, sizes, lambda d, index: index - reach.lo[d + 2], reach.shape[2:])
    # Of all kernels with stride 1, those whose unpooling has just the extents wanted.
    pairs = zip(reach.shape[2:], values.shape[2:], strict=True)
    y = UNPOOLINGS[n](values, at, [to - have + 1 for to, have in pairs], [1] * n)
    return x.like(y if reach == out else y[out.slices(reach)], layout.output)


@per_grid
def lay_out_unpool(
    grid: Grid, x: Partition, windows: tuple[Unpooling, ...], sizes: tuple[int, ...], name: str
) -> UnpoolLayout:
    """Return where the outputs of an unpooling lie and which values may come there."""
    x, cuts = placement(x, grid, windows, sizes, name)
    output = output_partition(x, x.shape[1], sizes, cuts)
    cut = tuple(c is not None for c in cuts)
    plan = plan_exchange(x, read_cover(x, windows, cuts, sizes, cut), grid)
    out = output.box(grid.coords)
    spans = [out.interval(0), out.interval(1)]
    for d, (window, size) in enumerate(zip(windows, sizes, strict=True)):
        lo, hi = window.writes(plan.wanted.interval(d + 2)) if cut[d] else (0, size)
        held = out.interval(d + 2)
        spans.append((min(max(lo, 0), held[0]), max(min(hi, size), held[1])))
    return UnpoolLayout(x, output, plan, windows, cut, Box.of(spans))


def _check_indices(
    at: torch.Tensor, x: Sharded, layout: UnpoolLayout, sizes: Sequence[int], name: str
) -> None:
    """Refuse, on all ranks, an index out of its window: its value would go to a rank far away."""
    outside = torch.zeros_like(at, dtype=torch.bool)
    rest = at
    for d in reversed(range(len(sizes))):
        index = rest if d == 0 else rest % sizes[d]
        rest = rest // sizes[d]
        lo, hi = layout.plan.wanted.interval(d + 2)
        window = layout.windows[d]
        shape = [-1 if dim == d + 2 else 1 for dim in range(at.dim())]
        first = torch.arange(lo, hi, device=at.device).view(shape) * window.stride - window.padding
        if layout.cut[d]:
            outside |= (index < first) | (index >= first + window.kernel)
        outside |= (index < 0) | (index >= sizes[d])
    if any_rank(bool(outside.any())):
        raise LayoutError(
            f"{name} of {x.partition} on {x.grid} to {tuple(sizes)}: an index lies outside the "
            "window that its value belongs to\n    give the output_size of the map that was "
            "pooled, and its window, without dilation; or use hyperslab.gather(x, axes)"
        )


@register_each(*UNPOOLINGS.values(), family="pooling")
def maximum_unpool(
    operator: Operator,
    input: Sharded,
    indices: torch.Tensor,
    kernel_size: PerDim,
    stride: PerDim | None = None,
    padding: PerDim = 0,
    output_size: Sequence[int] | None = None,
) -> Sharded:
    """Any window and output_size; every index has to lie in its own window."""
    n = spatial_dims(operator)
    if isinstance(input, Sharded) and input.dim() == n + 1:
        check_unbatched(input, operator.__name__)
        indices = batch_of_one(indices) if isinstance(indices, Sharded) else indices[None]
        if output_size is not None and len(output_size) == n + 1:
            output_size = (1, *output_size)
        options = (kernel_size, stride, padding, output_size)
        return only_sample(maximum_unpool(operator, batch_of_one(input), indices, *options))
    check_input(input, n, f"max_unpool{n}d")
    meta = torch.empty(input.shape, device="meta")
    to = operator(meta, meta.long(), kernel_size, stride, padding, output_size).shape[2:]
    kernel = per_dim(kernel_size, n)
    strides = kernel if stride is None else per_dim(stride, n)
    every = zip(kernel, strides, per_dim(padding, n), input.shape[2:], strict=True)
    return max_unpool(input, indices, tuple(Unpooling(*each) for each in every), tuple(to))
