"""Distributes average, maximum and power-average pooling over windows.

In reading order: flat positions of maxima in a sample's whole volume; the input with its halo
and the place of the output; windows that tile the block, which join a fused epilogue; windows
that overlap, by the kernel of `hyperslab.kernels.max_pool` with its graph; the rules.

Max pooling has these cases; the first one that holds runs, on all ranks alike (`max_pool`):

======================================  ====================  =======================
case                                    forward               backward
======================================  ====================  =======================
windows tile every rank's block         `EpilogueFunction`    ``chain_backward``
    with ``create_graph``                                     factors of ones
    after a normalisation                                     ... and its sums
    after one, with ``create_graph``                          torch's operators
CPU, 3 dims, no dilation, small window  `WindowMaximum`       compiled winners
    with ``create_graph``                                     winners, by ``scatter_add``
else, and always with indices           torch's own           torch's own
======================================  ====================  =======================

The first two take windows of at most 256 elements in float32, bfloat16 or float16: a byte names
the winner, where torch's own keeps eight. Each ``create_graph`` row is the same gradient out of
operators that have a derivative, which no kernel has. Without a normalisation only marks are
saved, so torch's operators would have no input: hence the factors. After a normalisation over
several ranks the gradient has no derivative, and torch says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.comm import plan_exchange
from hyperslab.comm.exchange import fetch
from hyperslab.errors import LayoutError
from hyperslab.geometry import Interval, Window
from hyperslab.kernels import registry
from hyperslab.kernels.avg_pool import TileAverage
from hyperslab.kernels.max_pool import window_maximum_backward
from hyperslab.kernels.memory_format import memory_format_of
from hyperslab.ops.fusion import FusedEpilogue, begin_epilogue, epilogue_result
from hyperslab.ops.operands import device_constant
from hyperslab.ops.overloads import (
    Operator,
    PerDim,
    per_dim,
    register_each,
    result_type,
    spatial_dims,
)
from hyperslab.ops.placement import (
    check_input,
    output_partition,
    place_outputs,
    read_cover,
    with_batch,
)
from hyperslab.tensor import Sharded


def move_indices(
    index: torch.Tensor,
    extents: Sequence[int],
    move: Callable[[int, torch.Tensor], torch.Tensor],
    target: Sequence[int],
) -> torch.Tensor:
    """Convert flat positions in a block of ``extents`` to those in one of ``target`` extents.

    ``move(dim, coordinate)`` says where a coordinate of a spatial dim lies in the other block.
    """
    moved = torch.zeros_like(index)
    rest = index
    stride = 1
    for dim in reversed(range(len(extents))):
        moved = moved + stride * move(dim, rest % extents[dim])
        rest = rest // extents[dim]
        stride *= target[dim]
    return moved


Windows = Sequence[Window]


class PoolingInput:
    """A pooling's input with its halo, and where its output lies.

    Distribution scheme: 1. place every output on the rank that owns the centre of its window,
    2. fetch the halo; beyond the volume's edge is ``fill``, 3. pool without padding along the cut
    dims, with the op's own padding along the others.
    """

    def __init__(self, x: Sharded, windows: Windows, ceil: bool, fill: float, name: str) -> None:
        check_input(x, len(windows), name)
        self.windows = windows
        self.inputs = tuple(x.shape[2:])
        extents = [w.outputs(e, ceil=ceil) for w, e in zip(windows, self.inputs, strict=True)]
        x, self.cuts = place_outputs(x, windows, extents, name)
        self.partition = output_partition(x.partition, x.shape[1], extents, self.cuts)
        covered = [cut is not None for cut in self.cuts]
        cover = read_cover(x.partition, windows, self.cuts, extents, covered)
        plan = plan_exchange(x.partition, cover, x.grid)
        self.plan = plan
        self.fill = fill
        self.name = name
        self.first = plan.wanted.lo[2:]
        self.kernel = [w.kernel for w in windows]
        self.stride = [w.stride for w in windows]
        self.padding = [0 if c else w.before for c, w in zip(covered, windows, strict=True)]
        self.out = self.partition.box(x.grid.coords)
        self.x = x

    @cached_property
    def block(self) -> torch.Tensor:
        """Return the rank's input with its halo."""
        what = f"the halo exchange of {self.name}"
        return fetch(self.x.block, self.plan, fill=self.fill, what=what)

    def wrap(self, block: torch.Tensor) -> Sharded:
        """Wrap a block of the output as a cut tensor."""
        return self.x.like(block, self.partition, fresh=True)


MOST_WINNERS = 256
"""Elements of a tile of which one byte can say which is the largest."""


def pooled_epilogue(p: PoolingInput, *, maximum: bool) -> FusedEpilogue | None:
    """Return the input's chain with this pooling as the last link; None if it cannot be."""
    if not _tiles_every_block(p):
        return None
    if isinstance(p.x.pending, FusedEpilogue) and p.x.pending.links.pool:
        p.x.force()
    chain = begin_epilogue(p.x)
    if chain is None or (maximum and math.prod(p.kernel) > MOST_WINNERS):
        return None
    dtype = result_type(p.name, chain.dtype, chain.block.device)
    return chain.linked(chain.links.pooled(tuple(p.kernel), maximum, dtype))


def _tiles_every_block(p: PoolingInput) -> bool:
    """Tell if tiles cover the block of every rank; all decide alike, see `begin_epilogue`."""
    if p.kernel != p.stride or any(w.before or w.after or w.dilation != 1 for w in p.windows):
        return False
    for cut, extent, k in zip(p.x.partition.cuts[2:], p.inputs, p.kernel, strict=True):
        ends = [extent] if cut is None else [hi for _, hi in cut.intervals]
        if any(end % k for end in ends):
            return False
    return True


_kernels = torch.ops.hyperslab


@dataclass(frozen=True, slots=True)
class WindowGrid:
    """Describes where the windows of a block lie; ``extents`` counts them along each dim."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    extents: tuple[int, ...]


class WindowMaximum(torch.autograd.Function):
    """The maximum of every window, in ``dtype``; kept is one byte an element of the result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grid: WindowGrid, dtype: torch.dtype) -> torch.Tensor:
        ctx.grid = grid
        ctx.shape = tuple(x.shape)
        ctx.dtype = x.dtype
        ctx.channels_last = memory_format_of(x) is not torch.contiguous_format
        mark = ctx.needs_input_grad[0]
        y, winners = _kernels.window_maximum(
            x, grid.kernel, grid.stride, grid.padding, grid.extents, mark, dtype
        )
        ctx.save_for_backward(winners if mark else None)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (winners,) = ctx.saved_tensors
        grid = ctx.grid
        differentiable = torch.is_grad_enabled()
        run = window_maximum_backward if differentiable else _kernels.window_maximum_backward
        dx = run(
            gradient,
            winners,
            grid.kernel,
            grid.stride,
            grid.padding,
            ctx.shape,
            ctx.channels_last,
            ctx.dtype,
        )
        return dx, None, None


MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
MAX_WITH_INDICES = {
    1: F.max_pool1d_with_indices,
    2: F.max_pool2d_with_indices,
    3: F.max_pool3d_with_indices,
}
AVG: dict[int, Operator] = {2: F.avg_pool2d, 3: F.avg_pool3d}


def pool_windows(
    n: int,
    kernel: PerDim,
    stride: PerDim | None = None,
    padding: PerDim = 0,
    dilation: PerDim = 1,
) -> tuple[Window, ...]:
    """One window per spatial dim; an absent stride is the kernel's extent."""
    kernels = per_dim(kernel, n)
    strides = kernels if stride is None or stride == [] or stride == () else per_dim(stride, n)
    pads = per_dim(padding, n)
    for k, p in zip(kernels, pads, strict=True):
        if not 0 <= p <= k // 2:
            raise ValueError(f"padding {p} must be at most half of the pooling window {k}")
    dilations = per_dim(dilation, n)
    return tuple(
        Window(k, s, p, p, d) for k, s, p, d in zip(kernels, strides, pads, dilations, strict=True)
    )


def max_pool(x: Sharded, windows: Windows, ceil: bool) -> Sharded:
    """Return the maximum of every window."""
    p = _max_pool_input(x, windows, ceil)
    chain = pooled_epilogue(p, maximum=True)
    if chain is not None:
        return epilogue_result(chain, p.x, p.partition)
    dilation = [w.dilation for w in windows]
    if registry.choose("max_pool", p.block, p.kernel, max(dilation)) == "windows":
        shapes = (p.kernel, p.stride, p.padding, p.out.shape[2:])
        grid = WindowGrid(*map(tuple, shapes))
        dtype = result_type(p.name, p.block.dtype, p.block.device)
        return p.wrap(WindowMaximum.apply(p.block, grid, dtype))
    run = MAX[len(windows)]
    return p.wrap(run(p.block, p.kernel, p.stride, p.padding, dilation, ceil))


def max_pool_with_indices(x: Sharded, windows: Windows, ceil: bool) -> tuple[Sharded, Sharded]:
    """Return the maxima and their flat positions in the whole volume."""
    p = _max_pool_input(x, windows, ceil)
    dilation = [w.dilation for w in windows]
    run = MAX_WITH_INDICES[len(windows)]
    y, index = run(p.block, p.kernel, p.stride, p.padding, dilation, ceil)

    def move(dim: int, at: torch.Tensor) -> torch.Tensor:
        at = at + p.first[dim]
        # Padding wins where all is -inf: torch names the window's first element that is not.
        return torch.where(at < 0, at % p.windows[dim].dilation, at)

    return p.wrap(y), p.wrap(move_indices(index, p.block.shape[2:], move, p.inputs))


def _max_pool_input(x: Sharded, windows: Windows, ceil: bool) -> PoolingInput:
    lowest = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    p = PoolingInput(x, windows, ceil, lowest, f"max_pool{len(windows)}d")
    for window, extent in zip(windows, p.inputs, strict=True):
        _check_not_empty(window, extent, ceil, x)
    return p


def _check_not_empty(window: Window, extent: int, ceil: bool, x: Sharded) -> None:
    """Refuse a window that steps over the volume: torch's backward pass would write elsewhere."""
    outputs = range(window.outputs(extent, ceil=ceil) if extent < window.dilation else 0)
    taps = (window.taps(o, (0, extent)) for o in outputs)
    if any(first == end for first, end in taps):
        raise LayoutError(
            f"max_pool of {x.partition} on {x.grid}: {window} reads nothing of the extent {extent} "
            "but its padding\n    use a smaller dilation or less padding"
        )


def avg_pool(
    x: Sharded,
    windows: Windows,
    ceil: bool,
    *,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Sharded:
    """The mean of every window, or its sum over ``divisor``."""
    p = PoolingInput(x, windows, ceil, 0.0, f"avg_pool{len(windows)}d")
    counts = [
        _divisors(w, e, p.out.interval(dim + 2), count_include_pad)
        for dim, (w, e) in enumerate(zip(windows, p.inputs, strict=True))
    ]
    full = all(c == w.kernel for w, per in zip(windows, counts, strict=True) for c in per)
    chain = pooled_epilogue(p, maximum=False) if full and divisor is None else None
    if chain is not None:
        y = epilogue_result(chain, p.x, p.partition)
        if len(windows) == 3:  # torch's is contiguous
            y.mark_as_reordered()
        return y
    if full or divisor is not None:
        return p.wrap(_average(p, ceil, divisor))
    total = _average(p, ceil, 1)
    return p.wrap(total / _outer_product(counts, total))


def _average(p: PoolingInput, ceil: bool, divisor: int | None) -> torch.Tensor:
    plain = divisor is None and not any(p.padding)
    if plain and registry.choose("avg_pool", p.block, p.kernel, p.stride) == "tiles":
        return TileAverage.apply(p.block, p.kernel)
    if len(p.windows) == 1:  # avg_pool1d knows no divisor: run it as an image of one row
        row = F.avg_pool2d(
            p.block.unsqueeze(2),
            [1, *p.kernel],
            [1, *p.stride],
            [0, *p.padding],
            ceil,
            divisor_override=divisor,
        )
        return row.squeeze(2)
    run = AVG[len(p.windows)]
    return run(p.block, p.kernel, p.stride, p.padding, ceil, divisor_override=divisor)


def _divisors(window: Window, extent: int, out: Interval, include: bool) -> list[int]:
    """How many elements torch counts in each output's window, along one dim."""
    counts = []
    for o in range(*out):
        start = o * window.stride - window.before
        end = min(start + window.kernel, extent + window.after)
        counts.append(end - start if include else min(end, extent) - max(start, 0))
    return counts


def _outer_product(counts: list[list[int]], like: torch.Tensor) -> torch.Tensor:
    out = like.new_ones(())
    for dim, per in enumerate(counts):
        shape = [len(per) if d == dim else 1 for d in range(len(counts))]
        out = out * device_constant(per, like.device, like.dtype).view(shape)
    return out


@register_each(
    (F.max_pool1d, torch.max_pool1d),
    (F.max_pool2d, torch.max_pool2d),
    (F.max_pool3d, torch.max_pool3d),
    family="pooling",
    lazy=True,
)
@with_batch
def maximum(
    operator: Operator,
    input: Sharded,
    kernel_size: PerDim,
    stride: PerDim | None = None,
    padding: PerDim = 0,
    dilation: PerDim = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Sharded:
    """Any window, with overlap, padding, dilation and ceil_mode."""
    n = spatial_dims(operator)
    return max_pool(input, pool_windows(n, kernel_size, stride, padding, dilation), ceil_mode)


@register_each(
    (F.max_pool1d_with_indices, torch.max_pool1d_with_indices),
    F.max_pool2d_with_indices,
    F.max_pool3d_with_indices,
    family="pooling",
)
@with_batch
def maximum_with_indices(
    operator: Operator,
    input: Sharded,
    kernel_size: PerDim,
    stride: PerDim | None = None,
    padding: PerDim = 0,
    dilation: PerDim = 1,
    ceil_mode: bool = False,
    return_indices: bool = True,
) -> tuple[Sharded, Sharded]:
    """Any window; the indices are the maxima's flat positions in the whole volume."""
    windows = pool_windows(spatial_dims(operator), kernel_size, stride, padding, dilation)
    return max_pool_with_indices(input, windows, ceil_mode)


@register_each(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, family="pooling", lazy=True)
@with_batch
def average(
    operator: Operator,
    input: Sharded,
    kernel_size: PerDim,
    stride: PerDim | None = None,
    padding: PerDim = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Sharded:
    """Any window, with overlap, padding, ceil_mode, count_include_pad and divisor_override."""
    return avg_pool(
        input,
        pool_windows(spatial_dims(operator), kernel_size, stride, padding),
        ceil_mode,
        count_include_pad=count_include_pad,
        divisor=divisor_override,
    )


@register_each(F.lp_pool1d, F.lp_pool2d, F.lp_pool3d, family="pooling")
@with_batch
def lp_pool(
    operator: Operator,
    input: Sharded,
    norm_type: float,
    kernel_size: PerDim,
    stride: PerDim | None = None,
    ceil_mode: bool = False,
) -> Sharded:
    """Any window, any power, infinity included: the norm of every window.

    Distribution scheme: 1. the power, block by block, 2. average pooling, 3. its root, block by
    block, as torch composes it. An infinite power is the maximum of the absolute values (or the
    minimum).
    """
    n = spatial_dims(operator)
    check_input(input, n, f"lp_pool{n}d")
    windows = pool_windows(n, kernel_size, stride)
    block = input.block
    if math.isinf(norm_type):
        sign = math.copysign(1, norm_type)
        y = max_pool(input.like(block.abs() * sign), windows, ceil_mode)
        return y.like(y.block * sign)
    y = avg_pool(input.like(block.pow(norm_type)), windows, ceil_mode)
    average = torch.sign(y.block) * F.relu(y.block.abs())
    elements = math.prod(window.kernel for window in windows)
    return y.like((average * elements).pow(1.0 / norm_type))
