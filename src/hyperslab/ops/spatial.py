"""Distributes operators that move, pad or resample voxels.

In reading order: flips, rolls, right-angled turns and pixel shuffles; ``F.pad``, so the padding
modules and convolutions with their modes; ``F.unfold`` and ``F.fold``; ``interpolate`` (so
``upsample`` and ``nn.Upsample``): weights along one dim, of which every output has a few, a request
for a resize and what torch's own operator makes of a dim, linear maps along all spatial dims in one
pass, layout and rules.

Where torch samples, and how it weighs, follows from rounded arithmetic that differs between
types, devices and modes. None of it is repeated here: torch's own operator answers to combs of
ones.

Legend: a *spatial dim* is counted from 0 after batch and channel. An output ``o`` of a dim is
padded at ``before`` and reads the *source* ``o - before``, which is an index of the input where
it lies inside it and else goes by the mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.comm import ExchangePlan, Grid, fetch, per_grid, plan_exchange
from hyperslab.errors import LayoutError
from hyperslab.geometry import Cover, Cut, Interval, Partition, Window, scale_cut
from hyperslab.kernels import registry
from hyperslab.kernels.memory_format import CHANNELS_LAST, memory_format_of, with_gradient_in
from hyperslab.kernels.resample import SparseMap, apply_maps
from hyperslab.ops.overloads import (
    Integers,
    Operator,
    PerDim,
    hashable,
    integers,
    per_dim,
    register_each,
)
from hyperslab.ops.placement import (
    batched_input,
    log_thin,
    output_partition,
    placement,
    read_cover,
    with_whole,
)
from hyperslab.ops.pooling import adaptive_avg_pool
from hyperslab.ops.views import exchanged, join, reshape_to
from hyperslab.tensor import Sharded, gather, register
from hyperslab.tensor.dispatch import read_dims
from hyperslab.util.derivatives import LinearMap, TensorMap
from hyperslab.util.torch_internals import EnableTorchFunction


def flipped(x: Sharded, dims: Sequence[int]) -> Sharded:
    """Mirrors along some dims; the result is cut as the input.

    Distribution scheme: 1. every rank fetches the mirror image of its box, 2. and flips it.
    """
    if not x.partition.axes:
        return x.like(torch.flip(x.native_local, list(dims)), consumed=True)
    cover = x.partition.cover
    intervals = list(cover.intervals)
    for dim in dims:
        extent = x.shape[dim]
        intervals[dim] = tuple((extent - hi, extent - lo) for lo, hi in intervals[dim])
    plan = plan_exchange(x.partition, Cover(cover.axes, tuple(intervals)), x.grid)
    return x.like(torch.flip(fetch(x.local, plan, what="a flip"), list(dims)))


def rolled(x: Sharded, shift: int, dim: int) -> Sharded:
    """Rolls along one dim; the result is cut as the input.

    Distribution scheme: 1. if the dim is not cut, roll the block; 2. if it is cut, every rank
    fetches the parts of its box from the end and from the beginning, and joins them.
    """
    extent = x.shape[dim]
    turn = extent - shift % extent if extent else 0
    if x.partition.cuts[dim] is None:
        return x.like(x.native_local.roll(shift, dim), consumed=True)
    return join([(x, (turn, extent)), (x, (0, turn))], dim, x.partition, x, "a roll")


@register(torch.flip, torch.Tensor.flip)
def flip(input: Sharded, *dims: Integers, **named: Integers) -> Sharded:
    """Flips any dims; along cut dims every rank fetches the mirror image of its box."""
    return flipped(input, _distinct_dims(input, integers(*dims, *named.values()), "flip"))


def _distinct_dims(x: Sharded, dims: Sequence[int], name: str) -> tuple[int, ...]:
    found = read_dims(dims, x.dim(), name)
    if len(set(found)) != len(found):
        raise ValueError(f"{name}: a dim appears twice in {tuple(dims)}")
    return found


@register_each({"fliplr": "Flips dim 1.", "flipud": "Flips dim 0."})
def flip_rows_or_columns(operator: Operator, input: Sharded) -> Sharded:
    """Flips one dim."""
    name = operator.__name__
    return flipped(input, read_dims([1 if name == "fliplr" else 0], input.dim(), name))


@register(torch.roll, torch.Tensor.roll, dims=["dims"], merged=True)
def roll(input: Sharded, shifts: Integers, dims: Integers | None = None) -> Sharded:
    """Rolls any dims; along a cut dim every rank fetches the two parts of its box."""
    turns = integers(shifts)
    along = () if dims is None else integers(dims)
    if not along:
        row = reshape_to(input, (input.numel(),))
        return reshape_to(rolled(row, turns[0], 0), input.shape)
    if len(turns) != len(along):
        raise ValueError(f"roll: {len(turns)} shifts for {len(along)} dims")
    if not input.partition.axes:
        return input.like(input.native_local.roll(turns, along), consumed=True)
    for shift, dim in zip(turns, along, strict=True):
        input = rolled(input, shift, dim)
    return input


@register(torch.rot90, torch.Tensor.rot90, dims=["dims"])
def rot90(input: Sharded, k: int = 1, dims: Sequence[int] = (0, 1)) -> Sharded:
    """Turns the plane of any two dims; each cut goes with its dim, across the cut as flip."""
    a, b = _distinct_dims(input, dims, "rot90")
    if k % 4 == 0:
        return input.like(input.local.clone())
    if k % 4 == 2:
        return flipped(input, [a, b])
    return exchanged(flipped(input, [b if k % 4 == 1 else a]), a, b)


@register(torch.pixel_shuffle)
def pixel_shuffle(input: Sharded, upscale_factor: int) -> Sharded:
    """Runs block by block: every pixel becomes a square of pixels."""
    input = batched_input(input, 2, "pixel_shuffle")
    r = upscale_factor
    local = F.pixel_shuffle(input.local, r)
    cuts = [c and Cut(c.axis, tuple(r * b for b in c.bounds)) for c in input.partition.cuts[2:]]
    extents = [r * extent for extent in input.shape[2:]]
    return input.like(local, output_partition(input.partition, local.shape[1], extents, cuts))


@register(torch.pixel_unshuffle)
def pixel_unshuffle(input: Sharded, downscale_factor: int) -> Sharded:
    """Takes any cut and moves it so that it goes through no square of pixels."""
    input = batched_input(input, 2, "pixel_unshuffle")
    r = downscale_factor
    if any(extent % r for extent in input.shape[2:]):
        raise LayoutError(
            f"pixel_unshuffle of {input.partition} on {input.grid}: height and width should be "
            f"divisible by {r}\n    use torch.nn.functional.pad before it"
        )
    channels = input.shape[1] * r * r
    extents = [extent // r for extent in input.shape[2:]]
    windows = [Window(r, r)] * 2
    placed, cuts = placement(input.partition, input.grid, windows, extents, "pixel_unshuffle")
    moved = [c and Cut(c.axis, tuple(r * b for b in c.bounds)) for c in cuts]
    whole = output_partition(placed, input.shape[1], input.shape[2:], moved)
    x = input.redistribute(whole, "squares of pixel_unshuffle")
    partition = output_partition(x.partition, channels, extents, cuts)
    return x.like(F.pixel_unshuffle(x.local, r), partition)


WHAT = "the exchange of pad"


@register(F.pad)
def pad(
    input: Sharded, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Sharded:
    """Pads constant, reflect, replicate and circular, also negative; the cut stays where it is.

    Distribution scheme:
    1. Give the planes that padding adds to the first and the last shard.
    2. constant: one exchange asks for the source, with the value outside it.
    3. reflect, replicate: the same exchange asks for the sources inside (mostly the own block,
       without a message), and the ranks at the edge of the volume run the local op.
    4. circular: dim by dim, so that corners need no message of their own, the first and the last
       rank fetch the planes that are wrapped around.
    """
    return _padded(input, tuple(map(int, pad)), mode, 0 if value is None else value)


@register(torch.constant_pad_nd)
def constant_pad_nd(input: Sharded, pad: Sequence[int], value: complex = 0) -> Sharded:
    """Pads as ``F.pad`` with a constant, which may be complex."""
    return _padded(input, tuple(map(int, pad)), "constant", value)


@register(F.unfold)
def image_columns(
    input: Sharded,
    kernel_size: PerDim,
    dilation: PerDim = 1,
    padding: PerDim = 0,
    stride: PerDim = 1,
) -> Sharded:
    """Makes windows of images columns: pads, takes windows along either dim, and reshapes them.

    Distribution scheme: as `F.pad` and `Tensor.unfold`; columns stay cut where rows of windows are.
    """
    # Torch's own checks, on the global shape.
    meta = torch.empty(input.shape, dtype=input.dtype, device="meta")
    sizes, gaps, pads, steps = (per_dim(o, 2) for o in (kernel_size, dilation, padding, stride))
    columns = F.unfold(meta, sizes, gaps, pads, steps).shape
    high, wide = pads
    first = input.dim() - 2
    with EnableTorchFunction():  # or torch would ask for no rule inside of one
        x: Any = F.pad(input, [wide, wide, high, high])
        for dim, (kernel, gap, step) in enumerate(zip(sizes, gaps, steps, strict=True), first):
            x = x.unfold(dim, gap * (kernel - 1) + 1, step)[..., ::gap]
        return x.movedim((-2, -1), (first, first + 1)).reshape(columns)


@register(F.fold, merged=True)
def fold_columns(
    input: Sharded,
    output_size: PerDim,
    kernel_size: PerDim,
    dilation: PerDim = 1,
    padding: PerDim = 0,
    stride: PerDim = 1,
) -> torch.Tensor:
    """Sums overlapping windows from columns, as a transposed convolution with filters of ones.

    Distribution scheme: as `F.conv_transpose2d`; columns stay cut where `F.unfold` leaves them so.
    """
    # Torch's own checks, on the global shape.
    meta = torch.empty(input.shape, dtype=input.dtype, device="meta")
    sizes, gaps, pads, steps = (per_dim(o, 2) for o in (kernel_size, dilation, padding, stride))
    extents = per_dim(output_size, 2)
    F.fold(meta, extents, sizes, gaps, pads, steps)
    spans = [gap * (kernel - 1) + 1 for kernel, gap in zip(sizes, gaps, strict=True)]
    free = [n + 2 * pad - span for n, pad, span in zip(extents, pads, spans, strict=True)]
    rows, columns = (n // step + 1 for n, step in zip(free, steps, strict=True))
    taps = math.prod(sizes)
    channels = input.shape[-2] // taps
    # One filter a tap: it is 1 there.
    ones = torch.eye(taps, dtype=input.dtype, device=input.device).view(taps, 1, *sizes)
    filters = ones.repeat(channels, 1, 1, 1)
    more = [n % step for n, step in zip(free, steps, strict=True)]
    with EnableTorchFunction():  # as above
        x = input.reshape(*input.shape[:-2], channels * taps, rows, columns)
        return F.conv_transpose2d(x, filters, None, steps, pads, more, channels, gaps)


def _padded(x: Sharded, pads: tuple[int, ...], mode: str, value: complex) -> Sharded:
    if not x.partition.axes:
        y = _pad_whole(x.block, pads, mode, value)
        return x.like(y, Partition.whole(y.shape), consumed=True)
    _check_padding(x.shape, x.dtype, pads, mode, value)
    if mode == "constant":
        return _constant(x, pads, value)
    return _circular(x, pads) if mode == "circular" else _at_edge(x, pads, mode)


@lru_cache(256, typed=True)
def _check_padding(
    shape: torch.Size, dtype: torch.dtype, pads: tuple[int, ...], mode: str, value: complex
) -> None:
    """Has torch check the arguments, on the global shape."""
    _pad_whole(torch.empty(shape, dtype=dtype, device="meta"), pads, mode, value)


def _pad_whole(x: torch.Tensor, pads: tuple[int, ...], mode: str, value: Any) -> torch.Tensor:
    if mode == "constant":
        return torch.constant_pad_nd(x, pads, value)  # F.pad takes no complex number
    return F.pad(x, pads, mode, value)


def _windows(ndim: int, pads: Sequence[int]) -> list[Window]:
    """Turns padding into windows of one element; ``pads`` begin with the last dim."""
    count = ndim - len(pads) // 2
    pairs = zip(pads[-2::-2], pads[::-2], strict=True)
    return [Window(1)] * count + [Window(1, before=a, after=b) for a, b in pairs]


def _place(x: Sharded, windows: Sequence[Window]) -> tuple[Sharded, Partition]:
    """Places the output; gathers the input where too little is left to be cut."""
    thin, output = _placement(x.grid, x.partition, windows)
    return gather(x, thin) if thin else x, output


def _placement(
    grid: Grid, partition: Partition, windows: Sequence[Window]
) -> tuple[tuple[str, ...], Partition]:
    """Returns the axes along which the input is to be gathered, and the output's partition."""
    extents = tuple(w.outputs(e) for w, e in zip(windows, partition.shape, strict=True))
    cuts = tuple(
        cut and window.cut_outputs(cut, extent)
        for cut, window, extent in zip(partition.cuts, windows, extents, strict=True)
    )
    thin = tuple(cut.axis for cut in cuts if cut is not None and cut.thin)
    if not thin:
        return (), Partition(extents, cuts)
    log_thin(grid, "pad:", tuple(extents), thin, "; gathered there,")
    return thin, _placement(grid, partition.without(thin), windows)[1]


def _sources(partition: Partition, windows: Sequence[Window]) -> list[tuple[Interval, ...]]:
    return [
        tuple(window.reads(out) for out in intervals)
        for window, intervals in zip(windows, partition.cover.intervals, strict=True)
    ]


def _constant(x: Sharded, pads: Sequence[int], value: complex) -> Sharded:
    thin, partition, plan = _lay_out_constant(x.grid, x.partition, tuple(pads))
    x = gather(x, thin) if thin else x
    local = _fresh(fetch(x.block, plan, fill=value, what=WHAT), x)
    return x.like(local, partition, consumed=True)


@per_grid
def _lay_out_constant(
    grid: Grid, partition: Partition, pads: tuple[int, ...]
) -> tuple[tuple[str, ...], Partition, ExchangePlan]:
    """Returns the axes to gather, the output's partition, and what asks for the sources."""
    windows = _windows(partition.ndim, pads)
    thin, output = _placement(grid, partition, windows)
    cover = Cover(output.cover.axes, tuple(_sources(output, windows)))
    return thin, output, plan_exchange(partition.without(thin), cover, grid)


def _fresh(local: torch.Tensor, x: Sharded) -> torch.Tensor:
    """Copies where nothing was copied yet: torch's padding never gives a view."""
    theirs = x.block.untyped_storage().data_ptr()
    shared = local.untyped_storage().data_ptr() == theirs
    return local.clone(memory_format=memory_format_of(local)) if shared else local


def _at_edge(x: Sharded, pads: Sequence[int], mode: str) -> Sharded:
    """Pads by the modes that repeat what is next to the edge."""
    windows = _windows(x.dim(), pads)
    x, partition = _place(x, windows)
    sources = _sources(partition, windows)
    hulls = [
        tuple(_hull(source, extent, mode) for source in choices)
        for choices, extent in zip(sources, x.shape, strict=True)
    ]
    wanted, held = (Cover(partition.cover.axes, tuple(c)) for c in (sources, hulls))
    local = fetch(x.block, plan_exchange(x.partition, held, x.grid), what=WHAT)
    mine = wanted.box(x.grid.coords)
    hull = held.box(x.grid.coords)
    first = [max(0, -lo) for lo in mine.lo]
    last = [max(0, hi - extent) for hi, extent in zip(mine.hi, x.shape, strict=True)]
    if max(pads, default=0) > 0:
        # On ranks in the middle by nothing: second derivatives need one graph on all of them.
        sides = [side for pair in zip(last, first, strict=True) for side in pair][::-1]
        local = F.pad(local, sides[: len(pads)], mode)
    for dim, (lo, extent) in enumerate(zip(mine.lo, mine.shape, strict=True)):
        if local.shape[dim] != extent:  # a reflection that reaches beyond this rank's planes
            local = local.narrow(dim, lo + first[dim] - hull.lo[dim], extent).clone()
    return x.like(_fresh(local, x), partition)


def _hull(source: Interval, extent: int, mode: str) -> Interval:
    """Finds the inputs that the op makes ``source`` of: from the edge on where it reaches over."""
    lo = max(source[0], 0)
    hi = min(source[1], extent)
    reflect = mode == "reflect"
    if source[0] < 0:
        hi = max(hi, 1 - source[0] * reflect)
    if source[1] > extent:
        lo = min(lo, extent - 1 - (source[1] - extent) * reflect)
    return lo, hi


def _circular(x: Sharded, pads: Sequence[int]) -> Sharded:
    y = _constant(x, [min(0, p) for p in pads], 0) if min(pads, default=0) < 0 else x
    windows = _windows(x.dim(), [max(0, p) for p in pads])
    for dim, window in enumerate(windows):
        if max(window.before, window.after) > y.shape[dim]:
            raise LayoutError(
                f"pad: {window.before} and {window.after} planes of circular padding in dim {dim} "
                f"need as many to repeat, of {y.partition}"
            )
        cut = y.partition.cuts[dim]
        if cut is not None and window != Window(1):
            extent = y.shape[dim]
            wider = window.outputs(extent)
            target = y.partition.with_dim(dim, wider, window.cut_outputs(cut, wider))
            spans = ((extent - window.before, extent), (0, extent), (0, window.after))
            y = join([(y, span) for span in spans], dim, target, y, WHAT)
            windows[dim] = Window(1)
    sides = [side for window in windows for side in (window.after, window.before)][::-1]
    local = F.pad(y.block, sides[: len(pads)], "circular") if any(sides) else y.block
    return y.like(_fresh(local, x), _place(y, windows)[1])


REACH = 5
"""Limits how far an output reads to each side, in inputs or, where the map shrinks, in outputs.

The widest filter of torch, Lanczos, has 3; half an output more is the alignment of the corners.
"""


@dataclass(frozen=True, slots=True, eq=False)
class InterpolationWeights:
    """Defines output ``o`` as the sum over ``k`` of ``weight[k, o] * input[index[k, o]]``.

    Without ``weight`` it is the copy of one input. ``back`` has the inputs that the gradient goes
    to: ``index``, but for the rare copies where torch rounds otherwise in its backward pass. All
    are of shape (taps, outputs). Weights of zero are those that torch multiplies by, too: they
    make NaN of infinities.
    """

    index: torch.Tensor
    back: torch.Tensor
    weight: torch.Tensor | None

    def of(self, out: Interval, origin: int) -> InterpolationWeights:
        """Returns the weights of outputs ``out``, for a block that begins at input ``origin``."""
        these = (slice(None), slice(*out))
        weight = self.weight if self.weight is None else self.weight[these]
        return InterpolationWeights(self.index[these] - origin, self.back[these] - origin, weight)


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """Maps windows of an interpolation: the ``first`` and the ``last`` input of every output.

    Of several taps it spans all that any of them touches. Blocks of one tensor may lie in memory
    in different ways, and so have different taps, but all ranks must expect the same messages.
    Of none it stands for a dim that is not cut.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]

    @staticmethod
    def of(several: Sequence[InterpolationWeights]) -> ReadSpan:
        if not several:
            return ReadSpan((), ())
        touched = torch.cat([t for taps in several for t in (taps.index, taps.back)])
        return ReadSpan(tuple(touched.amin(0).tolist()), tuple(touched.amax(0).tolist()))

    def reads(self, out: Interval) -> Interval:
        """Returns the inputs that the outputs ``out`` read, or that get their gradient."""
        return min(self.first[slice(*out)]), max(self.last[slice(*out)]) + 1

    def cut_outputs(self, cut: Cut, outputs: int) -> Cut:
        return scale_cut(cut, outputs)


def find_weights(
    operator: TensorMap, within: TensorMap, like: torch.Tensor, outputs: int
) -> InterpolationWeights:
    """Finds the taps of an operator from (N, inputs) to (N, outputs), for rows like ``like``.

    A comb has a tooth at every ``period``-th input, so far apart that an output meets one of them
    at most. ``within``: the operator on rows in a volume of zeros, times any number but zero.
    """
    extent = like.shape[0]
    reach = math.ceil(REACH * max(1.0, extent / outputs)) + 1
    period = 2 * reach + 1
    residues = torch.arange(extent, device=like.device) % period
    combs = torch.nn.functional.one_hot(residues, period).T.to(like.dtype)
    infinite = within(combs.masked_fill(combs > 0, math.inf))
    index, weight = _teeth(operator(combs), infinite.isnan(), extent, reach)
    if weight.shape[0] > 1 or not bool((weight == 1).all()):
        return InterpolationWeights(index, index, weight)
    return InterpolationWeights(index, _where_gradients_go(operator, like), None)


def _teeth(
    answer: torch.Tensor, void: torch.Tensor, extent: int, reach: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the teeth that the outputs of an ``answer`` (period, outputs) met, and their weights.

    ``void``: where infinite teeth became NaN, which is where one was multiplied by zero.
    """
    period, outputs = answer.shape
    o = torch.arange(outputs, device=answer.device)
    near = o * extent // outputs
    inputs = near + torch.arange(-reach, reach + 1, device=answer.device)[:, None]
    inside = (inputs >= 0) & (inputs < extent)
    weights = answer[inputs % period, o] * inside
    assert torch.allclose(weights.sum(0), answer.sum(0)), "an output reads beyond the reach"
    used = torch.cat([weights != 0, void[inputs % period, o] & inside])
    order = torch.argsort(used.int(), dim=0, descending=True, stable=True)
    count = used.sum(0)
    order = order[: int(count.max())]
    index = torch.cat([inputs, inputs]).gather(0, order)
    weight = torch.cat([weights, torch.zeros_like(weights)]).gather(0, order)
    for tap in range(1, len(order)):  # who has fewer gets its last one in two halves
        split = tap >= count
        index[tap] = torch.where(split, index[tap - 1], index[tap])
        half = weight[tap - 1] / 2
        weight[tap] = torch.where(split, half, weight[tap])
        weight[tap - 1] = torch.where(split, half, weight[tap - 1])
    return index, weight


def _where_gradients_go(operator: TensorMap, like: torch.Tensor) -> torch.Tensor:
    """Finds the input that gets each output's gradient, in order: (1, outputs)."""
    with torch.inference_mode(False), torch.enable_grad():
        row = torch.zeros_like(like)[None].requires_grad_()
        (counts,) = torch.autograd.grad(operator(row).sum(), row)
    inputs = torch.arange(like.shape[0], device=like.device)
    return inputs.repeat_interleave(counts[0].long())[None]


def _weighted(taps: InterpolationWeights, dim: int, x: torch.Tensor) -> torch.Tensor:
    """Applies weights along one dim of a block: a pass over the output for every tap."""
    if taps.weight is None:
        return x.index_select(dim, taps.index[0])
    first, *others = zip(taps.index, _broadcast_along(taps.weight, dim, x.dim()), strict=True)
    out = x.index_select(dim, first[0]).mul_(first[1])
    for index, weight in others:
        out.addcmul_(x.index_select(dim, index), weight)
    return out


def _weighted_back(
    taps: InterpolationWeights, dim: int, extent: int, gradient: torch.Tensor
) -> torch.Tensor:
    """Applies the adjoint of `_weighted`: an output's gradient, weighted, goes to its inputs."""
    out = gradient.new_zeros((*gradient.shape[:dim], extent, *gradient.shape[dim + 1 :]))
    if taps.weight is None:
        return out.index_add_(dim, taps.back[0], gradient)
    for index, weight in zip(taps.back, _broadcast_along(taps.weight, dim, out.dim()), strict=True):
        out.index_add_(dim, index, gradient * weight)
    return out


def _broadcast_along(weight: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """Reshapes weights (taps, outputs) for one dim of ``n``: (taps, 1, ..., outputs, ..., 1)."""
    return weight.view(-1, *(weight.shape[1] if d == dim else 1 for d in range(n)))


@dataclass(frozen=True, slots=True)
class Resize:
    """Describes a call of torch's ``interpolate``; ``scales`` are those that torch samples by.

    Without them it samples by the ratio of the extents.
    """

    mode: str
    sizes: tuple[int, ...]
    scales: tuple[float, ...] | None
    align_corners: bool | None
    antialias: bool

    def run(self, x: torch.Tensor, dims: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Resize the spatial ``dims`` of ``x`` to ``sizes`` (of all dims), leave the others."""
        extents = x.shape[2:]
        to: list[int] | None = None
        by: list[float] | None = None
        if self.scales is None:
            to = [sizes[d] if d in dims else extent for d, extent in enumerate(extents)]
        else:
            by = [self.scales[d] if d in dims else 1.0 for d in range(len(extents))]
        return F.interpolate(x, to, by, self.mode, self.align_corners, antialias=self.antialias)


@dataclass(frozen=True, slots=True)
class BlockKind:
    """Names what else torch's arithmetic depends on: one kind of block."""

    dtype: torch.dtype
    device: torch.device
    channels: int
    last: bool  # channels
    at_once: bool  # by the compiled kernel

    @staticmethod
    def of(x: torch.Tensor) -> BlockKind:
        wide = torch.promote_types(x.dtype, torch.float32)
        last = memory_format_of(x) is not torch.contiguous_format
        at_once = registry.choose("interpolate", x) == "sparse"
        return BlockKind(wide, x.device, min(x.shape[1], 8), last, at_once)


def taps_of(
    resize: Resize, dim: int, inputs: int, outputs: int, kind: BlockKind
) -> InterpolationWeights:
    """Finds the taps of torch's operator from ``inputs`` to ``outputs`` along a spatial dim."""
    n = len(resize.sizes)
    rest = [d for d in range(n) if d != dim]

    def block_of(rows: torch.Tensor, others: int) -> torch.Tensor:
        extents = [inputs if d == dim else others for d in range(n)]
        layout = CHANNELS_LAST[n + 2] if kind.last else torch.contiguous_format
        return rows.new_zeros(len(rows), kind.channels, *extents).contiguous(memory_format=layout)

    def line(at: int) -> tuple[int | slice, ...]:
        return (slice(None), 0, *(slice(None) if d == dim else at for d in range(n)))

    def alone(rows: torch.Tensor) -> torch.Tensor:
        block = block_of(rows, 2)  # with 1 formats look alike
        block += rows.view(len(rows), 1, *(-1 if d == dim else 1 for d in range(n)))
        return resize.run(block, (dim,), (outputs,) * n)[line(0)]

    def within(rows: torch.Tensor) -> torch.Tensor:
        others = 8 if n == 2 else 2  # an output that has an input's weight once: cubes need more
        block = block_of(rows, others)
        block[line((others - 1) // 2)] = rows
        scales = resize.scales and tuple(
            2.0 if d in rest else s for d, s in enumerate(resize.scales)
        )
        sizes = [outputs if d == dim else 2 * others for d in range(n)]
        return replace(resize, scales=scales).run(block, range(n), sizes)[line(others - 1)]

    like = torch.zeros(inputs, dtype=kind.dtype, device=kind.device)
    return find_weights(alone, within, like, outputs)


@dataclass(frozen=True, slots=True)
class InterpolateLayout:
    """Holds one rank's geometry of an interpolation; cached by partition, resize and block kind."""

    input: Partition
    output: Partition
    plan: ExchangePlan
    weights: tuple[tuple[int, InterpolationWeights], ...]  # of spatial dims
    rest: tuple[int, ...]  # the spatial dims that are left to torch's operator
    sizes: tuple[int, ...]  # the block's after it
    # The map of each dim, all in one pass in place of the two above, and the adjoint of each.
    resampling: tuple[list[SparseMap], list[SparseMap]] | None


def interpolate(x: Sharded, resize: Resize) -> Sharded:
    """Resize a cut tensor (batch, channel, *spatial).

    Distribution scheme:
    1. Cut the output in proportion to the input.
    2. Fetch the inputs that this rank's outputs read, by the weights of the whole extents.
    3. If there is a kernel, apply the weights along all dims in one pass. Otherwise apply them
       along the cut dims; if torch's own operator on the block alone copies the same inputs
       (nearest neighbours, a whole factor), leave the dim to it.
    4. Along the other dims, run torch's own operator.
    """
    name = f"interpolate(mode={resize.mode!r})"
    block = x.block
    kind = BlockKind.of(block)
    if not x.partition.axes and not kind.at_once:
        y = resize.run(block, range(len(resize.sizes)), resize.sizes)
        return x.like(with_gradient_in(y), Partition.whole(y.shape), consumed=True)
    layout = lay_out_interpolate(x.grid, x.partition, resize, kind, name)
    if layout.input != x.partition:
        x = x.redistribute(layout.input, f"the gather before {name}")
        block = x.block
    block = fetch(block, layout.plan, what=f"the halo exchange of {name}")
    dtype = block.dtype
    if torch.is_autocast_enabled(block.device.type):
        dtype = resize.run(block.new_zeros((1,) * x.dim()), (), ()).dtype
    if layout.resampling is not None:
        order = memory_format_of(block)
        there, back = layout.resampling
        run = partial(apply_maps, there, order, dtype)
        y = LinearMap.apply(block, run, partial(apply_maps, back, order, block.dtype))
        return x.like(y, layout.output, fresh=True)
    if any(taps.weight is not None for _, taps in layout.weights):
        block = block.to(kind.dtype)
    block = block.movedim(1, -1) if kind.last else block  # the layout in memory stays
    for dim, taps in layout.weights:
        along = dim + (1 if kind.last else 2)
        adjoint = partial(_weighted_back, taps, along, block.shape[along])
        block = LinearMap.apply(block, partial(_weighted, taps, along), adjoint)
    block = block.movedim(-1, 1) if kind.last else block
    if layout.rest:
        block = _resize_rest(resize, block, layout)
    y = block.to(dtype)
    return x.like(with_gradient_in(y) if layout.rest else y, layout.output, consumed=True)


def _resize_rest(resize: Resize, block: torch.Tensor, layout: InterpolateLayout) -> torch.Tensor:
    """Runs torch's own operator along the other dims; planes as channels take half the time."""
    if resize.mode != "trilinear" or 0 in layout.rest or not block.is_contiguous():
        return resize.run(block, layout.rest, layout.sizes)
    scales = resize.scales and resize.scales[1:]
    plane = replace(resize, mode="bilinear", sizes=resize.sizes[1:], scales=scales)
    y = plane.run(block.flatten(1, 2), [d - 1 for d in layout.rest], layout.sizes[1:])
    return y.unflatten(1, block.shape[1:3])


@per_grid
@torch.inference_mode(False)  # what is kept is used in later calls, which may want gradients
def lay_out_interpolate(
    grid: Grid, x: Partition, resize: Resize, kind: BlockKind, name: str
) -> InterpolateLayout:
    dims = range(len(resize.sizes))
    kinds = [kind, replace(kind, last=not kind.last)] if len(dims) > 1 else [kind]
    narrow = resize.antialias and any(x.cuts[2:])  # torch's is wrong on blocks of width 1
    several = [
        [taps_of(resize, d, x.shape[d + 2], resize.sizes[d], kind) for kind in kinds]
        if narrow or x.cuts[d + 2]
        else []
        for d in dims
    ]
    windows = [ReadSpan.of(taps) for taps in several]
    x, cuts = placement(x, grid, windows, resize.sizes, name)
    output = output_partition(x, x.shape[1], resize.sizes, cuts)
    covered = [cut is not None for cut in cuts]
    plan = plan_exchange(x, read_cover(x, windows, cuts, resize.sizes, covered), grid)
    out = output.box(grid.coords)
    if kind.at_once and not resize.mode.startswith("nearest"):
        maps = []
        for d, known in enumerate(several):
            whole = known[0] if known else taps_of(resize, d, x.shape[d + 2], resize.sizes[d], kind)
            taps = whole.of(out.interval(d + 2), plan.wanted.lo[d + 2])
            weight = torch.ones_like(taps.index) if taps.weight is None else taps.weight
            maps.append(SparseMap.of_taps(taps.index, weight, plan.wanted.shape[d + 2]))
        resampling = (maps, [one.adjoint() for one in maps])
        return InterpolateLayout(x, output, plan, (), (), out.shape[2:], resampling)
    weights = []
    rest = []
    for d in reversed(dims):  # the innermost dim costs most: first, while the block is small
        if not covered[d] and not narrow:
            rest.append(d)
            continue
        taps = several[d][0].of(out.interval(d + 2), plan.wanted.lo[d + 2])
        inputs = plan.wanted.shape[d + 2]
        outputs = out.shape[d + 2]
        if _block_alone_suffices(taps, resize, d, inputs, outputs, kind):
            rest.append(d)
        else:
            weights.append((d, taps))
    return InterpolateLayout(x, output, plan, tuple(weights), tuple(rest), out.shape[2:], None)


def _block_alone_suffices(
    taps: InterpolationWeights, resize: Resize, dim: int, inputs: int, outputs: int, kind: BlockKind
) -> bool:
    """Returns whether torch's operator on the block alone makes the same copies."""
    if taps.weight is not None:
        return False
    if resize.scales is not None and int(inputs * resize.scales[dim]) != outputs:
        return False
    alone = taps_of(resize, dim, inputs, outputs, kind)
    return (
        alone.weight is None
        and torch.equal(taps.index, alone.index)
        and torch.equal(taps.back, alone.back)
    )


@register(F.interpolate)
def interpolate_rule(
    input: Sharded,
    size: PerDim | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Sharded:
    """Takes every mode, by size or by any factor, with either alignment of the corners."""
    input = batched_input(input, input.dim() - 2, "interpolate")
    if input.dtype == torch.uint8 and not mode.startswith("nearest"):  # torch's own fixed point
        input = with_whole(input, range(2, input.dim()), f"interpolate(mode={mode!r}) of uint8")
    options = (mode, align_corners, recompute_scale_factor, antialias)
    resize = _read_resize(input, hashable(size), hashable(scale_factor), *options)
    sizes, scales = resize.sizes, resize.scales
    if antialias and sizes[-1] == 1:
        raise LayoutError(
            f"interpolate(antialias=True) of {input.partition} on {input.grid} to {sizes}: torch "
            "itself is wrong where the last extent becomes 1\n    use antialias=False"
        )
    if mode == "area":
        return adaptive_avg_pool(input, sizes)
    if scales is not None and not mode.startswith("nearest"):
        _check_unmoved(input, mode, sizes, scales, antialias)
    return interpolate(input, resize)


def _read_resize(input: Sharded, size: Any, factor: Any, *options: Any) -> Resize:
    """Asks torch for the extents of the result; plain arguments are cached, for that takes ms."""
    numbers = [
        n for given in (size, factor) for n in (given if isinstance(given, tuple) else (given,))
    ]
    plain = all(type(number) in (int, float, NoneType) for number in numbers)
    read = _kept_resize if plain else _new_resize
    return read(input.shape, input.dtype, size, factor, *options)


def _new_resize(
    shape: torch.Size,
    dtype: torch.dtype,
    size: Any,
    factor: Any,
    mode: str,
    align_corners: bool | None,
    recompute: bool | None,
    antialias: bool,
) -> Resize:
    # Without samples torch (2.13) has no form of some modes.
    meta = torch.empty((shape[0] or 1, *shape[1:]), dtype=dtype, device="meta")
    options = (mode, align_corners, recompute, antialias)
    sizes = tuple(F.interpolate(meta, size, factor, *options).shape[2:])
    scales = None
    if factor is not None and not recompute:
        given = [factor] if isinstance(factor, int | float) else factor
        scales = tuple(float(s) for s in given) * (len(sizes) // len(given))
    return Resize(mode, sizes, scales, align_corners, antialias)


_kept_resize = lru_cache(maxsize=256, typed=True)(_new_resize)


def _check_unmoved(
    x: Sharded, mode: str, sizes: Sequence[int], scales: Sequence[float], antialias: bool
) -> None:
    """Refuse a factor that leaves an extent as it is, unless all stay.

    Along that dim torch's kernels for the CPU then copy, and those for other devices sample by
    the factor; with antialias its forward pass does the one and its backward pass the other.
    """
    same = [a == b for a, b in zip(sizes, x.shape[2:], strict=True)]
    odd = any(kept and s != 1 for kept, s in zip(same, scales, strict=True))
    if odd and (antialias or not all(same)):
        raise LayoutError(
            f"interpolate(mode={mode!r}) of {x.partition} on {x.grid}: the factors {scales} leave "
            f"an extent of {tuple(x.shape[2:])} as it is, and torch itself is inconsistent there\n"
            "    use recompute_scale_factor=True, or give the size"
        )
