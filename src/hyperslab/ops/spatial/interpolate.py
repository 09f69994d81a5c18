"""Interpolation: the rule of ``interpolate``, and so of ``upsample`` and ``nn.Upsample``.

Legend: a *spatial dim* is counted from 0 after batch and channel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F

from hyperslab.comm import Grid, per_grid, plan_exchange
from hyperslab.comm.exchange import ExchangePlan, fetch
from hyperslab.errors import LayoutError
from hyperslab.geometry import Box, Partition
from hyperslab.memory_format import memory_format_of
from hyperslab.ops.common.arguments import PerDim, hashable
from hyperslab.ops.common.placement import check_input, output_partition, placement, read_cover
from hyperslab.ops.kernels.resample.maps import SparseMap
from hyperslab.ops.pooling.adaptive_avg_pool import adaptive_avg_pool
from hyperslab.ops.spatial.interpolation_weights import (
    ApplyWeights,
    InterpolationWeights,
    ReadSpan,
)
from hyperslab.ops.spatial.resample import Resample, Resampling
from hyperslab.ops.spatial.resize import Kind, Resize, taps_of
from hyperslab.tensor import Sharded, register


@dataclass(frozen=True, slots=True)
class InterpolateLayout:
    """One rank's geometry of an interpolation; made once per (partition, resize, kind of block)."""

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
    kind = Kind.of(x.block)
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
    """Torch's own operator along the other dims; planes as channels take half the time."""
    if resize.mode != "trilinear" or 0 in layout.rest or not block.is_contiguous():
        return resize.run(block, layout.rest, layout.sizes)
    scales = resize.scales and resize.scales[1:]
    plane = replace(resize, mode="bilinear", sizes=resize.sizes[1:], scales=scales)
    y = plane.run(block.flatten(1, 2), [d - 1 for d in layout.rest], layout.sizes[1:])
    return y.unflatten(1, block.shape[1:3])


@per_grid
@torch.inference_mode(False)  # what is kept is used in later calls, which may want gradients
def lay_out_interpolate(
    grid: Grid, x: Partition, resize: Resize, kind: Kind, name: str
) -> InterpolateLayout:
    """Where the outputs of an interpolation lie, what they read and how."""
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
        if _alone(taps, resize, d, inputs, outputs, kind):
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
    kind: Kind,
) -> Resampling:
    """The maps from the rank's inputs to its outputs; ``several``: the taps that are known."""
    maps = []
    for d, known in enumerate(several):
        whole = known[0] if known else taps_of(resize, d, x.shape[d + 2], resize.sizes[d], kind)
        taps = whole.of(out.interval(d + 2), plan.wanted.lo[d + 2])
        weight = torch.ones_like(taps.index) if taps.weight is None else taps.weight
        maps.append(SparseMap.of_taps(taps.index, weight, plan.wanted.shape[d + 2]))
    return Resampling.of(maps, [one.adjoint() for one in maps])


def _alone(
    taps: InterpolationWeights, resize: Resize, dim: int, inputs: int, outputs: int, kind: Kind
) -> bool:
    """Whether torch's operator on the block alone makes the same copies."""
    if taps.weight is not None:
        return False
    if resize.scales is not None and int(inputs * resize.scales[dim]) != outputs:
        return False
    return taps.copies_as(taps_of(resize, dim, inputs, outputs, kind))


@register(F.interpolate, family="spatial")
def resample(
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
    """The extents of the result, which torch itself says: of no data, but in several ms."""
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
