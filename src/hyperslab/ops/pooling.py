"""Distributes average, maximum and power-average pooling, adaptive pooling and unpooling.

In reading order: flat positions of maxima in a sample's whole volume; the place of the output and
what it reads, `PoolLayout`; windows that tile the block, which join a fused epilogue; windows
that overlap, by the kernel of `hyperslab.kernels.max_pool` with its graph; the rules. Then
adaptive pooling, whose windows follow from the two extents (``interpolate`` calls the average
*area*), and maximum unpooling, where values go back to where their maxima were.

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

Legend: a *spatial dim* is counted from 0 after batch and channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import index
from typing import Any, cast

import torch
import torch.nn.functional as F

from hyperslab.comm import ExchangePlan, Grid, all_reduce_sum, fetch, per_grid, plan_exchange
from hyperslab.comm.agreement import any_rank
from hyperslab.comm.collectives import stack_ranks
from hyperslab.errors import LayoutError
from hyperslab.geometry import (
    AdaptiveWindow,
    Box,
    Interval,
    Partition,
    TransposedWindow,
    Window,
)
from hyperslab.kernels import registry
from hyperslab.kernels.max_pool import window_maximum_backward
from hyperslab.kernels.memory_format import MOST_TAPS, memory_format_by_strides, memory_format_of
from hyperslab.kernels.resample import Line, SparseMap, apply_maps
from hyperslab.ops.fusion import FusedEpilogue, begin_epilogue, epilogue_result
from hyperslab.ops.operands import device_constant, operand_block
from hyperslab.ops.overloads import (
    Operator,
    PerDim,
    per_dim,
    register_each,
    result_type,
    run_composed,
    spatial_dims,
)
from hyperslab.ops.placement import (
    batch_of_one,
    batched_input,
    check_unbatched,
    log_thin,
    only_sample,
    output_partition,
    placement,
    read_cover,
    with_batch,
)
from hyperslab.tensor import Sharded
from hyperslab.util.derivatives import LinearMap
from hyperslab.util.torch_internals import BlockFunction, without_dispatch_modes


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


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """One rank's geometry of a pooling; made once per (partition, arguments).

    Distribution scheme: 1. place every output on the rank that owns the centre of its window, 2.
    fetch the halo, with ``fill`` beyond the volume's edge, 3. pool without padding along the cut
    dims, and with the op's own padding along the others.

    ``padding`` is what is left to the operator, along dims that are not cut. ``divisors``: of an
    average, by spatial dim, what the elements of each output's window are divided by; None where
    that is the window's extent everywhere. ``tiles``: windows cover the block of every rank.
    """

    name: str
    input: Partition  # the input's, after gathering axes for which the output is too thin
    output: Partition
    plan: ExchangePlan
    windows: tuple[Window, ...]
    ceil: bool
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    lines: tuple[Line, ...]  # the windows of the block, as kernels take them
    divisors: tuple[tuple[int, ...], ...] | None
    tiles: bool

    def fetch(self, x: Sharded, fill: float) -> torch.Tensor:
        """Return this rank's input with its halo; ``fill`` beyond the volume's edge."""
        return fetch(x.block, self.plan, fill=fill, what=f"the halo exchange of {self.name}")


@per_grid
def lay_out_pool(
    grid: Grid,
    x: Partition,
    name: str,
    kernel: PerDim,
    stride: PerDim | None,
    padding: PerDim,
    dilation: PerDim,
    ceil: bool,
    include_padding: bool,
) -> PoolLayout:
    """Return where the outputs of a pooling lie and what they read."""
    windows = pool_windows(len(x.shape) - 2, kernel, stride, padding, dilation)
    inputs = x.shape[2:]
    extents = [w.outputs(e, ceil=ceil) for w, e in zip(windows, inputs, strict=True)]
    given = x
    x, cuts = placement(x, grid, windows, extents, name)
    output = output_partition(x, x.shape[1], extents, cuts)
    covered = [cut is not None for cut in cuts]
    plan = plan_exchange(x, read_cover(x, windows, cuts, extents, covered), grid)
    out = output.box(grid.coords)
    divisors = None
    if name.startswith("avg"):
        divisors = tuple(
            _divisors(w, e, out.interval(dim), include_padding)
            for dim, (w, e) in enumerate(zip(windows, inputs, strict=True), start=2)
        )
        if all(set(per) <= {w.kernel} for w, per in zip(windows, divisors, strict=True)):
            divisors = None
    left = tuple(0 if c else w.before for c, w in zip(covered, windows, strict=True))
    kernels = tuple(w.kernel for w in windows)
    strides = tuple(w.stride for w in windows)
    if name.startswith("max"):
        for window, extent in zip(windows, inputs, strict=True):
            _check_reads(window, extent, ceil, f"{given} on {grid}")
    return PoolLayout(
        name=name,
        input=x,
        output=output,
        plan=plan,
        windows=windows,
        ceil=ceil,
        kernel=kernels,
        stride=strides,
        padding=left,
        dilation=tuple(w.dilation for w in windows),
        lines=tuple(map(Line, kernels, strides, left, out.shape[2:])),
        divisors=divisors,
        tiles=_tiles_every_block(x, windows),
    )


def _check_reads(window: Window, extent: int, ceil: bool, where: str) -> None:
    """Refuse a window that steps over the volume.

    Torch's backward pass would write elsewhere.
    """
    outputs = range(window.outputs(extent, ceil=ceil) if extent < window.dilation else 0)
    taps = (window.taps(o, (0, extent)) for o in outputs)
    if any(first == end for first, end in taps):
        raise LayoutError(
            f"max_pool of {where}: {window} reads nothing of the extent {extent} but its padding\n"
            "    use a smaller dilation or less padding"
        )


def _tiles_every_block(x: Partition, windows: Sequence[Window]) -> bool:
    """Tell if tiles cover the block of every rank; all decide alike, see `begin_epilogue`."""
    for cut, extent, w in zip(x.cuts[2:], x.shape[2:], windows, strict=True):
        if w.kernel != w.stride or w.before or w.after or w.dilation != 1:
            return False
        ends = [extent] if cut is None else [hi for _, hi in cut.intervals]
        if any(end % w.kernel for end in ends):
            return False
    return True


def _placed(
    x: Sharded,
    kind: str,
    n: int,
    kernel: PerDim,
    stride: PerDim | None,
    padding: PerDim,
    dilation: PerDim = 1,
    ceil: bool = False,
    include_padding: bool = True,
) -> tuple[Sharded, PoolLayout]:
    """Return a pooling's input, gathered where its output is too thin, and its layout."""
    name = f"{kind}_pool{n}d"
    x = batched_input(x, n, name)
    given: list[Any] = [kernel, stride, padding, dilation]
    given = [v if type(v) is int or v is None else _as_numbers(v) for v in given]
    how = (*given, bool(ceil), bool(include_padding))
    layout = lay_out_pool(x.grid, x.partition, name, *how)
    if layout.input is not x.partition:
        x = x.redistribute(layout.input, f"the gather before {name}")
    return x, layout


def _as_numbers(given: Any) -> Any:
    """Return a number or several as numbers of Python, by which a layout is found."""
    return tuple(map(index, given)) if isinstance(given, Iterable) else index(given)


def pooled_epilogue(x: Sharded, layout: PoolLayout, *, maximum: bool) -> FusedEpilogue | None:
    """Return the input's chain with this pooling as the last link; None if it cannot be."""
    if not layout.tiles:
        return None
    if isinstance(x.pending, FusedEpilogue) and x.pending.links.pool:
        x.force()
    chain = begin_epilogue(x)
    if chain is None or (maximum and math.prod(layout.kernel) > MOST_TAPS):
        return None
    dtype = result_type(layout.name, chain.dtype, chain.block.device)
    return chain.linked(pool=layout.kernel, maximum=maximum, dtype=dtype)


_window_maximum = registry.OPERATORS["window_maximum"]
_window_maximum_backward = registry.OPERATORS["window_maximum_backward"]


class WindowMaximum(BlockFunction):
    """The maximum of every window, in ``dtype``; kept is one byte an element of the result."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, lines: Sequence[Line], dtype: torch.dtype
    ) -> torch.Tensor:
        *ctx.windows, outputs = zip(*lines, strict=True)
        ctx.shape = tuple(x.shape)
        ctx.dtype = x.dtype
        ctx.channels_last = memory_format_of(x) is not torch.contiguous_format
        mark = ctx.needs_input_grad[0]
        y, winners = _window_maximum(x, *ctx.windows, outputs, mark, dtype)
        ctx.save_for_backward(winners if mark else None)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (winners,) = ctx.saved_tensors
        differentiable = torch.is_grad_enabled()
        run = window_maximum_backward if differentiable else _window_maximum_backward
        kernel, stride, padding = ctx.windows
        form = (ctx.shape, ctx.channels_last, ctx.dtype)
        return run(gradient, winners, kernel, stride, padding, *form), None, None


def _for_dims(name: str) -> dict[int, Operator]:
    return {n: getattr(F, name.format(n)) for n in (1, 2, 3)}


MAX = _for_dims("max_pool{}d")
MAX_WITH_INDICES = _for_dims("max_pool{}d_with_indices")
AVG = _for_dims("avg_pool{}d")


def pool_windows(
    n: int,
    kernel: PerDim,
    stride: PerDim | None = None,
    padding: PerDim = 0,
    dilation: PerDim = 1,
) -> tuple[Window, ...]:
    """Returns one window per spatial dim; an absent stride is the kernel's extent."""
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


def max_pool(x: Sharded, layout: PoolLayout) -> Sharded:
    chain = pooled_epilogue(x, layout, maximum=True)
    if chain is not None:
        return epilogue_result(chain, x, layout.output)
    block = layout.fetch(x, _lowest(x.dtype))
    if registry.choose("max_pool", block, layout.kernel, max(layout.dilation)) == "windows":
        dtype = result_type(layout.name, block.dtype, block.device)
        y = WindowMaximum.apply(block, layout.lines, dtype)
    else:
        run = MAX[len(layout.windows)]
        how = (layout.kernel, layout.stride, layout.padding, layout.dilation, layout.ceil)
        y = run(block, *how)
    return x.like(y, layout.output, fresh=True)


def _lowest(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def max_pool_with_indices(x: Sharded, layout: PoolLayout) -> tuple[Sharded, Sharded]:
    """Return the maxima and their flat positions in the whole volume."""
    block = layout.fetch(x, _lowest(x.dtype))
    run = MAX_WITH_INDICES[len(layout.windows)]
    how = (layout.kernel, layout.stride, layout.padding, layout.dilation, layout.ceil)
    y, index = run(block, *how)
    first = layout.plan.wanted.lo[2:]

    def move(dim: int, at: torch.Tensor) -> torch.Tensor:
        at = at + first[dim]
        # Padding wins where all is -inf: torch names the window's first element that is not.
        return torch.where(at < 0, at % layout.dilation[dim], at)

    index = move_indices(index, block.shape[2:], move, layout.input.shape[2:])
    values = x.like(y, layout.output, fresh=True)
    return values, x.like(index, layout.output, fresh=True)


def average_windows(x: torch.Tensor, lines: Sequence[Line], divisor: int) -> torch.Tensor:
    """Sums windows over ``divisor``, in float32 and x's memory format; nothing is saved."""
    there, back = _window_maps(tuple(lines), tuple(x.shape[2:]))
    order = memory_format_by_strides(x)

    def run(maps: Sequence[SparseMap], dtype: torch.dtype, block: torch.Tensor) -> torch.Tensor:
        return apply_maps(maps, order, dtype, block).div_(divisor)

    dtype = torch.promote_types(x.dtype, torch.float32)
    return LinearMap.apply(x, partial(run, there, dtype), partial(run, back, x.dtype))


@lru_cache(4096)
@torch.inference_mode(False)  # as of other maps that are kept
def _window_maps(
    lines: tuple[Line, ...], extents: tuple[int, ...]
) -> tuple[list[SparseMap], list[SparseMap]]:
    with without_dispatch_modes():  # a trace would keep tensors without numbers
        maps = list(map(SparseMap.of_windows, lines, extents))
        return maps, [one.adjoint() for one in maps]


def _average(block: torch.Tensor, layout: PoolLayout, divisor: int | None) -> torch.Tensor:
    if registry.choose("avg_pool", block) == "sparse":
        count = math.prod(layout.kernel) if divisor is None else divisor
        return average_windows(block, layout.lines, count)
    if len(layout.windows) == 1:  # avg_pool1d knows no divisor: run it as an image of one row
        row = ([1, *layout.kernel], [1, *layout.stride], [0, *layout.padding], layout.ceil)
        return F.avg_pool2d(block.unsqueeze(2), *row, divisor_override=divisor).squeeze(2)
    run = AVG[len(layout.windows)]
    how = (layout.kernel, layout.stride, layout.padding, layout.ceil)
    return run(block, *how, divisor_override=divisor)


def _divisors(window: Window, extent: int, out: Interval, include: bool) -> tuple[int, ...]:
    """Counts the elements that torch divides by in each output's window, along one dim."""
    counts = []
    for o in range(*out):
        start = o * window.stride - window.before
        end = min(start + window.kernel, extent + window.after)
        counts.append(end - start if include else min(end, extent) - max(start, 0))
    return tuple(counts)


@register_each(
    (F.max_pool1d, torch.max_pool1d),
    (F.max_pool2d, torch.max_pool2d),
    (F.max_pool3d, torch.max_pool3d),
    lazy=True,
)
@register_each(
    {
        (run, torch.max_pool1d_with_indices) if n == 1 else run: "Takes any window; "
        "the indices are the maxima's flat positions in the whole volume."
        for n, run in MAX_WITH_INDICES.items()
    }
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
) -> Sharded | tuple[Sharded, Sharded]:
    """Takes any window, with overlap, padding, dilation and ceil_mode."""
    n = spatial_dims(operator)
    x, layout = _placed(input, "max", n, kernel_size, stride, padding, dilation, ceil_mode)
    run = max_pool_with_indices if operator is MAX_WITH_INDICES[n] else max_pool
    return run(x, layout)


@register_each(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, lazy=True)
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
    """Takes any window, overlap, padding, ceil_mode, count_include_pad and divisor_override."""
    if divisor_override == 0:
        raise ValueError("avg_pool: divisor_override must not be zero")
    n = spatial_dims(operator)
    given = (kernel_size, stride, padding, 1, ceil_mode, count_include_pad)
    x, layout = _placed(input, "avg", n, *given)
    full = layout.divisors is None
    chain = None
    if full and divisor_override is None:
        chain = pooled_epilogue(x, layout, maximum=False)
    if chain is not None:
        y = epilogue_result(chain, x, layout.output)
        if n == 3:  # torch's is contiguous
            y.mark_as_reordered()
        return y
    block = layout.fetch(x, 0.0)
    if layout.divisors is None or divisor_override is not None:
        mean = _average(block, layout, divisor_override)
    else:
        total = _average(block, layout, 1)
        rounded = None if total.is_floating_point() else "trunc"  # as torch's own of integers
        divisors = total.new_ones(())
        for dim, per in enumerate(layout.divisors):
            shape = [-1 if d == dim else 1 for d in range(n)]
            divisors = divisors * device_constant(per, total.device, total.dtype).view(shape)
        mean = torch.div(total, divisors, rounding_mode=rounded)
    y = x.like(mean, layout.output, fresh=True)
    if n == 3 and memory_format_of(y.block) is not torch.contiguous_format:
        y.mark_as_reordered()  # as above
    return y


@register_each(F.lp_pool1d, F.lp_pool2d, F.lp_pool3d)
def lp_pool(operator: Operator, *args: Any, **options: Any) -> torch.Tensor:
    """Takes the norm of every window, for any window and any power, infinity included.

    Distribution scheme: 1. raise the block to the power, 2. average windows, 3. take the root of
    the block, as torch composes it. With an infinite power the result is the maximum of the
    absolute values (or the minimum).
    """
    return cast(torch.Tensor, run_composed(operator, *args, **options))


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
        """Fetches this rank's windows, as far as it pools them."""
        x = x.redistribute(self.input, f"the gather before {name}")
        return fetch(x.block, self.plan, what=f"the halo exchange of {name}")


@per_grid
def lay_out_adaptive_pool(
    grid: Grid, x: Partition, sizes: tuple[int, ...], name: str
) -> AdaptiveLayout:
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
        log_thin(grid, f"{name}: output", tuple(sizes), tuple(shared), ":")
    return AdaptiveLayout(x, output, plan, spans, tuple(shared), out.shape[2:])


def _spans(dim: int, window: AdaptiveWindow, out: Interval, held: Interval) -> Spans:
    reads = [window.reads((o, o + 1)) for o in range(*out)]
    parts = ((max(lo, held[0]) - held[0], min(hi, held[1]) - held[0]) for lo, hi in reads)
    inputs = tuple((lo, hi) if lo < hi else (0, 0) for lo, hi in parts)
    return Spans(dim, inputs, tuple(hi - lo for lo, hi in reads))


def output_sizes(
    x: Sharded, n: int, output_size: int | Sequence[int | None] | None, name: str
) -> tuple[int, ...]:
    """Returns the output's spatial extents; ``None`` keeps the input's."""
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


def _span_means(spans: Spans, x: torch.Tensor) -> torch.Tensor:
    """Computes, along one dim of a block, the sums of the spans over the windows' counts."""
    dim = spans.dim + 2
    out = x.new_empty((*x.shape[:dim], len(spans.inputs), *x.shape[dim + 1 :]))
    for o, ((lo, hi), count) in enumerate(zip(spans.inputs, spans.counts, strict=True)):
        out.select(dim, o).copy_(x.narrow(dim, lo, hi - lo).sum(dim).div_(count))
    return out


def _span_shares(spans: Spans, extent: int, gradient: torch.Tensor) -> torch.Tensor:
    """Gives every input of a span its share of the mean's gradient."""
    dim = spans.dim + 2
    out = gradient.new_zeros((*gradient.shape[:dim], extent, *gradient.shape[dim + 1 :]))
    for o, ((lo, hi), count) in enumerate(zip(spans.inputs, spans.counts, strict=True)):
        out.narrow(dim, lo, hi - lo).add_(gradient.narrow(dim, o, 1) / count)
    return out


ADAPTIVE_AVERAGES = _for_dims("adaptive_avg_pool{}d")


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
    layout = lay_out_adaptive_pool(x.grid, x.partition, sizes, name)
    block = layout.fetch(x, name)
    smallest = block.new_zeros((1,) * (n + 2))
    dtype = ADAPTIVE_AVERAGES[n](smallest, (1,) * n).dtype  # what autocast makes of it
    if layout.spans:
        block = block.to(torch.promote_types(block.dtype, torch.float32))
    for spans in layout.spans:
        shares = partial(_span_shares, spans, block.shape[spans.dim + 2])
        block = LinearMap.apply(block, partial(_span_means, spans), shares)
    if len(layout.spans) < n:
        block = ADAPTIVE_AVERAGES[n](block, layout.sizes)
    block = all_reduce_sum(block, x.grid.group(layout.shared), name)
    return x.like(block.to(dtype), layout.output)


@register_each(*ADAPTIVE_AVERAGES.values())
@with_batch
def adaptive_average(
    operator: Operator, input: Sharded, output_size: int | Sequence[int | None] | None
) -> Sharded:
    """Pools to any extents; to fewer than ranks by partial sums, without gathering the volume."""
    n = spatial_dims(operator)
    name = operator.__name__
    input = batched_input(input, n, name)
    return adaptive_avg_pool(input, output_sizes(input, n, output_size, name))


WITH_INDICES = _for_dims("adaptive_max_pool{}d_with_indices")
VALUES = _for_dims("adaptive_max_pool{}d")
NOWHERE = torch.iinfo(torch.int64).max
"""The index of a window's maximum on a rank that holds nothing of the window."""


@register_each(
    # torch.adaptive_max_pool1d itself returns both
    (F.adaptive_max_pool1d_with_indices, torch.adaptive_max_pool1d),
    F.adaptive_max_pool2d_with_indices,
    F.adaptive_max_pool3d_with_indices,
)
@with_batch
def adaptive_max_pool(
    operator: Operator,
    input: Sharded,
    output_size: int | Sequence[int | None] | None,
    return_indices: bool = True,
) -> tuple[Sharded, Sharded]:
    """Pools to any extents, with the maxima's flat positions in the whole volume.

    Distribution scheme:
    1. Cut the output in proportion to the input and fetch the windows of this rank's outputs; where
       an axis has more ranks than outputs, every rank keeps its part of every window.
    2. Repeat elements so that along the cut dims all windows have the same extent and lie side by
       side, as torch's own pooling of the block needs them. A repetition changes no maximum.
    3. Take the largest of the maxima of ranks that share windows, and of equal ones the first.
    """
    n = spatial_dims(operator)
    name = f"adaptive_max_pool{n}d"
    x = batched_input(input, n, name)
    sizes = output_sizes(x, n, output_size, name)
    layout = lay_out_adaptive_pool(x.grid, x.partition, sizes, name)
    block = layout.fetch(x, name)
    tables = {spans.dim: _side_by_side(spans) for spans in layout.spans}
    for dim, table in tables.items():
        if table != list(range(block.shape[dim + 2])):
            block = block.index_select(dim + 2, device_constant(table, block.device))
    values, index = WITH_INDICES[n](block, layout.sizes)
    held = layout.plan.wanted.lo[2:]

    def move(dim: int, at: torch.Tensor) -> torch.Tensor:
        return device_constant(tables[dim], at.device)[at] + held[dim] if dim in tables else at

    index = move_indices(index, block.shape[2:], move, x.shape[2:])
    for spans in layout.spans:
        values, index = _forget_absent(values, index, spans)
    for axis in layout.shared:
        values, index = _first_largest(x, values, index, axis)
    return x.like(values, layout.output), x.like(index, layout.output)


def _side_by_side(spans: Spans) -> list[int]:
    """Lists the inputs of all windows in turn, a window's last one repeated to one extent."""
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
    x: Sharded, values: torch.Tensor, index: torch.Tensor, axis: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the largest value along an axis and its index: of equals the first, of NaN the last."""
    group = x.grid.group((axis,))
    values, index = (
        stack_ranks(part, group, "the parts of adaptive_max_pool") for part in (values, index)
    )
    with torch.no_grad():
        nan = values.isnan()
        candidate = nan | (values == values.amax(0))
        order = torch.where(nan, -index, index)
        choice = order.masked_fill(~candidate, NOWHERE).argmin(0, keepdim=True)
    return values.gather(0, choice).squeeze(0), index.gather(0, choice).squeeze(0)


@register_each(*VALUES.values())
def adaptive_maximum(
    operator: Operator,
    input: Sharded,
    output_size: int | Sequence[int | None] | None,
    return_indices: bool = False,
) -> Sharded:
    """Pools to any extents; to fewer than ranks by partial maxima, without gathering the volume."""
    values, _ = adaptive_max_pool(operator, input, output_size)
    return values


UNPOOLINGS = _for_dims("max_unpool{}d")


@dataclass(frozen=True, slots=True)
class Unpooling(TransposedWindow):
    """Along one dim, value ``i`` of ``extent`` goes somewhere into ``i * stride - padding`` and
    the ``kernel - 1`` outputs after it.
    """

    extent: int = 1

    def reads(self, out: Interval) -> Interval:
        """Values that may go to the outputs ``out``, one at least."""
        lo, hi = TransposedWindow.reads(self, out)
        lo = min(max(lo, 0), self.extent - 1)
        return lo, max(min(hi, self.extent), lo + 1)

    def writes(self, values: Interval) -> Interval:
        """Return where the values may go; not clipped."""
        first = values[0] * self.stride - self.padding
        return first, (values[1] - 1) * self.stride - self.padding + self.kernel


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
    1. Place the outputs of every window on the rank that owns it; fetch the values and indices of
       windows that reach over the cut and may write into this rank's outputs.
    2. All ranks check together that no index lies outside its window.
    3. Run torch's own unpooling into everything that the fetched windows span, and keep this rank's
       outputs.
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
    # Torch refuses strides that a rank with one row of them may not have.
    values, at = values.contiguous(), at.contiguous()
    y = UNPOOLINGS[n](values, at, [to - have + 1 for to, have in pairs], [1] * n)
    return x.like(y if reach == out else y[out.slices(reach)], layout.output)


@per_grid
def lay_out_unpool(
    grid: Grid, x: Partition, windows: tuple[Unpooling, ...], sizes: tuple[int, ...], name: str
) -> UnpoolLayout:
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


@register_each(*UNPOOLINGS.values())
def maximum_unpool(
    operator: Operator,
    input: Sharded,
    indices: torch.Tensor,
    kernel_size: PerDim,
    stride: PerDim | None = None,
    padding: PerDim = 0,
    output_size: Sequence[int] | None = None,
) -> Sharded:
    """Takes any window and output_size; every index has to lie in its own window."""
    n = spatial_dims(operator)
    if isinstance(input, Sharded) and input.dim() == n + 1:
        check_unbatched(input, operator.__name__)
        indices = batch_of_one(indices) if isinstance(indices, Sharded) else indices[None]
        if output_size is not None and len(output_size) == n + 1:
            output_size = (1, *output_size)
        options = (kernel_size, stride, padding, output_size)
        return only_sample(maximum_unpool(operator, batch_of_one(input), indices, *options))
    input = batched_input(input, n, f"max_unpool{n}d")
    if indices.shape != input.shape:
        raise RuntimeError(
            f"max_unpool{n}d: the shapes of the indices {tuple(indices.shape)} and of the input "
            f"{tuple(input.shape)} should be the same"
        )
    meta = torch.empty(input.shape, device="meta")
    to = operator(meta, meta.long(), kernel_size, stride, padding, output_size).shape[2:]
    kernel = per_dim(kernel_size, n)
    strides = kernel if stride is None else per_dim(stride, n)
    every = zip(kernel, strides, per_dim(padding, n), input.shape[2:], strict=True)
    windows = tuple(Unpooling(k, s, p, extent=extent) for k, s, p, extent in every)
    return max_unpool(input, indices, windows, tuple(to))
