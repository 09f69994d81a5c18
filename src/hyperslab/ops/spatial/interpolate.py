"""Distributes ``interpolate`` (so ``upsample`` and ``nn.Upsample``) and sampling at coordinates.

In reading order: interpolation weights along one dim, of which every output has a few; a
request for a resize, and what torch's own operator makes of a dim; linear maps along all
spatial dims in one pass, with their graph; layout and rules; `grid_sample`, where any output
may read any input.

Where torch samples, and how it weighs, follows from rounded arithmetic that differs between
types, devices and modes. None of it is repeated here: torch's own operator answers to combs of
ones.

Legend: a *spatial dim* is counted from 0 after batch and channel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F

from hyperslab.comm import Grid, per_grid, plan_exchange
from hyperslab.comm.exchange import ExchangePlan, fetch
from hyperslab.errors import LayoutError
from hyperslab.geometry import Box, Cut, Interval, Partition, scale_cut
from hyperslab.kernels import registry
from hyperslab.kernels.memory_format import CHANNELS_LAST, memory_format_of
from hyperslab.kernels.resample import SparseMap
from hyperslab.ops.linalg.contraction import DimLabel, contract
from hyperslab.ops.overloads import PerDim, hashable
from hyperslab.ops.placement import check_input, output_partition, placement, read_cover
from hyperslab.ops.pooling.adaptive import adaptive_avg_pool
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe

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

    def copies_as(self, other: InterpolationWeights) -> bool:
        """Returns whether both copy the same inputs."""
        return (
            self.weight is None
            and other.weight is None
            and torch.equal(self.index, other.index)
            and torch.equal(self.back, other.back)
        )


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
        """Cuts the outputs in proportion."""
        return scale_cut(cut, outputs)


RowOperator = Callable[[torch.Tensor], torch.Tensor]
"""Maps rows, one by one."""


def find_weights(
    operator: RowOperator, within: RowOperator, like: torch.Tensor, outputs: int
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


def _where_gradients_go(operator: RowOperator, like: torch.Tensor) -> torch.Tensor:
    """Finds the input that gets each output's gradient, in order: (1, outputs)."""
    with torch.inference_mode(False), torch.enable_grad():
        row = torch.zeros_like(like)[None].requires_grad_()
        (counts,) = torch.autograd.grad(operator(row).sum(), row)
    inputs = torch.arange(like.shape[0], device=like.device)
    return inputs.repeat_interleave(counts[0].long())[None]


class ApplyWeights(torch.autograd.Function):
    """Applies weights along one dim of a block: a pass over the output for every tap."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, taps: InterpolationWeights) -> torch.Tensor:
        ctx.dim = dim
        ctx.taps = taps
        ctx.extent = x.shape[dim]
        if taps.weight is None:
            return x.index_select(dim, taps.index[0])
        first, *others = zip(taps.index, _broadcast_along(taps.weight, dim, x.dim()), strict=True)
        out = x.index_select(dim, first[0]).mul_(first[1])
        for index, weight in others:
            out.addcmul_(x.index_select(dim, index), weight)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _ApplyAdjoint.apply(gradient, ctx.dim, ctx.taps, ctx.extent), None, None


class _ApplyAdjoint(torch.autograd.Function):
    """Applies the adjoint of `ApplyWeights`: an output's gradient, weighted, goes to its inputs."""

    @staticmethod
    def forward(
        ctx: Any, gradient: torch.Tensor, dim: int, taps: InterpolationWeights, extent: int
    ) -> torch.Tensor:
        ctx.dim = dim
        ctx.taps = taps
        shape = list(gradient.shape)
        shape[dim] = extent
        out = gradient.new_zeros(shape)
        if taps.weight is None:
            return out.index_add_(dim, taps.back[0], gradient)
        for index, weight in zip(
            taps.back, _broadcast_along(taps.weight, dim, out.dim()), strict=True
        ):
            out.index_add_(dim, index, gradient * weight)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ApplyWeights.apply(gradient, ctx.dim, ctx.taps), None, None, None


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


assert registry  # registers the operator reorder
assert registry  # and resample


@dataclass(frozen=True, slots=True, eq=False)
class Resampling:
    """Holds a map for every spatial dim, and their adjoints; the operator takes ``tensors``.

    ``results``: the extents of what it makes of a block.
    """

    maps: tuple[SparseMap, ...]
    adjoints: tuple[SparseMap, ...]
    tensors: list[torch.Tensor]
    results: tuple[int, ...]

    @staticmethod
    def of(maps: Sequence[SparseMap], adjoints: Sequence[SparseMap]) -> Resampling:
        """Combines the maps of each dim."""
        tensors = [tensor for one in maps for tensor in one.tensors]
        return Resampling(tuple(maps), tuple(adjoints), tensors, tuple(m.results for m in maps))

    @property
    def adjoint(self) -> Resampling:
        """Maps the gradient of the results to that of the block."""
        return Resampling.of(self.adjoints, self.maps)


class Resample(torch.autograd.Function):
    """Resamples a block in ``dtype``; nothing is saved, and the adjoint is a resampling, too."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, resampling: Resampling, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.resampling = resampling
        ctx.dtype = x.dtype
        ctx.format = memory_format_of(x)
        return torch.ops.hyperslab.resample(x, resampling.tensors, resampling.results, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            gradient = gradient.contiguous(memory_format=ctx.format)
        elif not gradient.is_contiguous(memory_format=ctx.format):
            last = ctx.format is not torch.contiguous_format
            gradient = torch.ops.hyperslab.reorder(gradient, last, gradient.dtype)
        return Resample.apply(gradient, ctx.resampling.adjoint, ctx.dtype), None, None


@dataclass(frozen=True, slots=True)
class InterpolateLayout:
    """Holds one rank's geometry of an interpolation; cached by partition, resize and block kind."""

    input: Partition
    output: Partition
    plan: ExchangePlan
    weights: tuple[tuple[int, InterpolationWeights], ...]  # of spatial dims
    rest: tuple[int, ...]  # the spatial dims that are left to torch's operator
    sizes: tuple[int, ...]  # the block's after it
    resampling: Resampling | None  # all dims in one pass, in place of the two above


def interpolate(x: Sharded, resize: Resize) -> Sharded:
    """Resize a cut tensor (batch, channel, *spatial).

    Distribution scheme:
    1. Cut the output in proportion to the input.
    2. Fetch the inputs that this rank's outputs read, by the weights of the whole extents.
    3. Apply the weights along all dims in one pass, where there is a kernel. Otherwise along the
       cut dims; where torch's own operator on the block alone copies the same inputs (nearest
       neighbours, a whole factor), leave the dim to it.
    4. Along the other dims torch's own operator.
    """
    name = f"interpolate(mode={resize.mode!r})"
    kind = BlockKind.of(x.block)
    layout = lay_out_interpolate(x.grid, x.partition, resize, kind, name)
    x = x.redistribute(layout.input, f"the gather before {name}")
    block = fetch(x.block, layout.plan, what=f"the halo exchange of {name}")
    dtype = resize.run(block.new_zeros((1,) * x.dim()), (), ()).dtype  # what autocast makes of it
    if layout.resampling is not None:
        y = Resample.apply(block, layout.resampling, dtype)
        return x.like(y, layout.output, fresh=True)
    if any(taps.weight is not None for _, taps in layout.weights):
        block = block.to(kind.dtype)
    block = block.movedim(1, -1) if kind.last else block  # the layout in memory stays
    for dim, taps in layout.weights:
        block = ApplyWeights.apply(block, dim + (1 if kind.last else 2), taps)
    block = block.movedim(-1, 1) if kind.last else block
    if layout.rest:
        block = _resize_rest(resize, block, layout)
    y = block.to(dtype)
    return x.like(_with_gradient_alike(y) if layout.rest else y, layout.output)


def _with_gradient_alike(y: torch.Tensor) -> torch.Tensor:
    """Have the gradient in the order of ``y``, channels last.

    Of a contiguous one torch takes 1.7 times as long, with the conversion (2.13).
    """
    order = memory_format_of(y)
    if y.requires_grad and order is not torch.contiguous_format:
        y.register_hook(lambda gradient: gradient.contiguous(memory_format=order))
    return y


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
    """Lays out the outputs of an interpolation, what they read and how."""
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
        resampling = _resampling(resize, several, x, plan, out, kind)
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


def _resampling(
    resize: Resize,
    several: Sequence[Sequence[InterpolationWeights]],
    x: Partition,
    plan: ExchangePlan,
    out: Box,
    kind: BlockKind,
) -> Resampling:
    """Makes the maps from the rank's inputs to its outputs; ``several``: the known taps."""
    maps = []
    for d, known in enumerate(several):
        whole = known[0] if known else taps_of(resize, d, x.shape[d + 2], resize.sizes[d], kind)
        taps = whole.of(out.interval(d + 2), plan.wanted.lo[d + 2])
        weight = torch.ones_like(taps.index) if taps.weight is None else taps.weight
        maps.append(SparseMap.of_taps(taps.index, weight, plan.wanted.shape[d + 2]))
    return Resampling.of(maps, [one.adjoint() for one in maps])


def _block_alone_suffices(
    taps: InterpolationWeights, resize: Resize, dim: int, inputs: int, outputs: int, kind: BlockKind
) -> bool:
    """Returns whether torch's operator on the block alone makes the same copies."""
    if taps.weight is not None:
        return False
    if resize.scales is not None and int(inputs * resize.scales[dim]) != outputs:
        return False
    return taps.copies_as(taps_of(resize, dim, inputs, outputs, kind))


@register(F.interpolate, family="spatial")
def interpolate_rule(
    input: Sharded,
    size: PerDim | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Sharded:
    """Every mode, by size or by any factor, with either alignment of the corners."""
    check_input(input, input.dim() - 2, "interpolate")
    options = (mode, align_corners, recompute_scale_factor, antialias)
    sizes = _sizes_of(input.shape, input.dtype, hashable(size), hashable(scale_factor), *options)
    if antialias and sizes[-1] == 1:
        raise LayoutError(
            f"interpolate(antialias=True) of {input.partition} on {input.grid} to {sizes}: torch "
            "itself is wrong where the last extent becomes 1\n    use antialias=False"
        )
    if mode == "area":
        return adaptive_avg_pool(input, sizes)
    scales = None
    if scale_factor is not None and not recompute_scale_factor:
        given = [scale_factor] if isinstance(scale_factor, int | float) else scale_factor
        scales = tuple(float(s) for s in given) * (len(sizes) // len(given))
        _check_unmoved(input, mode, sizes, scales, antialias)
    return interpolate(input, Resize(mode, sizes, scales, align_corners, antialias))


def _sizes_of(
    shape: torch.Size, dtype: torch.dtype, size: PerDim | None, factor: Any, *options: Any
) -> tuple[int, ...]:
    """Asks torch for the extents of the result; plain arguments are cached, for that takes ms."""
    numbers = [n for given in (size, factor) for n in (given if _is_tuple(given) else (given,))]
    plain = all(type(number) in (int, float, type(None)) for number in numbers)
    return (_kept_sizes if plain else _find_sizes)(shape, dtype, size, factor, *options)


def _is_tuple(given: object) -> TypeGuard[tuple[object, ...]]:
    return isinstance(given, tuple)


def _find_sizes(
    shape: torch.Size, dtype: torch.dtype, size: Any, factor: Any, *options: Any
) -> tuple[int, ...]:
    meta = torch.empty(shape, dtype=dtype, device="meta")
    return tuple(F.interpolate(meta, size, factor, *options).shape[2:])


_kept_sizes = functools.lru_cache(maxsize=256, typed=True)(_find_sizes)


def _check_unmoved(
    x: Sharded, mode: str, sizes: Sequence[int], scales: Sequence[float], antialias: bool
) -> None:
    """Refuse a factor that leaves an extent as it is, unless all stay.

    Along that dim torch's kernels for the CPU then copy, and those for other devices sample by
    the factor; with antialias its forward pass does the one and its backward pass the other.
    """
    same = [a == b for a, b in zip(sizes, x.shape[2:], strict=True)]
    odd = any(kept and s != 1 for kept, s in zip(same, scales, strict=True))
    if odd and (antialias or not all(same)) and not mode.startswith("nearest"):
        raise LayoutError(
            f"interpolate(mode={mode!r}) of {x.partition} on {x.grid}: the factors {scales} leave "
            f"an extent of {tuple(x.shape[2:])} as it is, and torch is not of one mind there\n"
            "    use recompute_scale_factor=True, or give the size"
        )


@register(F.grid_sample, family="spatial")
def grid_sample(
    input: torch.Tensor,
    grid: torch.Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> torch.Tensor:
    """Of a volume that is not cut in space, at coordinates that may be."""
    if input.dim() != grid.dim() or input.shape[0] != grid.shape[0]:
        raise LayoutError(f"grid_sample takes as many places as samples\n{describe([input, grid])}")
    n = input.dim() - 2
    outputs: list[DimLabel] = [("output", d) for d in range(n)]

    def run(volume: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(volume, points, mode, padding_mode, align_corners)

    labels: list[list[DimLabel]] = [
        ["batch", "channel", *[("input", d) for d in range(n)]],
        ["batch", *outputs, "coordinate"],
    ]
    output = ["batch", "channel", *outputs]
    return contract("grid_sample", (input, grid), labels, output, run, linear=False)


@register(F.affine_grid, family="spatial")
def affine_grid(theta: Sharded, size: Sequence[int], align_corners: bool | None = None) -> Sharded:
    """Coordinates for every sample by its own matrix; only the batch may be cut."""
    batch, *matrix = theta.partition.cuts
    if any(matrix) or size[0] != theta.shape[0]:
        raise LayoutError(
            f"affine_grid takes a whole matrix for each of {size[0]} samples, got "
            f"{theta.partition}\n    use hyperslab.gather(x, axes) before it"
        )
    local = theta.local
    points = F.affine_grid(local, [local.shape[0], *size[1:]], align_corners)
    shape = (theta.shape[0], *points.shape[1:])
    return theta.like(points, Partition(shape, (batch, *[None] * (len(shape) - 1))))
