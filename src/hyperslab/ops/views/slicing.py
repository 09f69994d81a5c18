"""Distributes slices along any dim (narrow, select, split, chunk and their kin) and windows."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsInt

import torch

from hyperslab.comm import plan_exchange
from hyperslab.comm.exchange import fetch
from hyperslab.errors import LayoutError
from hyperslab.geometry import Cover, Cut, Interval, Partition, Window
from hyperslab.ops.overloads import Operator, register_each
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import read_dim

_LAYOUTS = 4096
"""Limits the layouts that are cached, of crops of one partition each."""


@dataclass(frozen=True, slots=True)
class Span:
    """Selects the ``count`` elements ``start, start + step, ...`` of one dim.

    >>> Span(1, 3, 2).reads((1, 3))
    (3, 6)
    >>> Span(1, 3, 2).follow(Cut("depth", (0, 4, 8))).bounds
    (0, 2, 3)
    """

    start: int
    count: int
    step: int = 1

    def reads(self, out: Interval) -> Interval:
        """Returns the smallest interval of the dim that holds the chosen elements ``out``."""
        lo, hi = out
        first = self.start + lo * self.step
        return (first, first + (hi - lo - 1) * self.step + 1) if lo < hi else (first, first)

    def follow(self, cut: Cut) -> Cut:
        """Returns the cut that leaves every chosen element where it is; shards may become empty."""
        inner = (-((self.start - bound) // self.step) for bound in cut.bounds[1:-1])
        bounds = (0, *(min(max(bound, 0), self.count) for bound in inner), self.count)
        return Cut(cut.axis, bounds)

    def slice(self, out: Interval, origin: int) -> slice:
        """Returns the slice of the chosen elements ``out`` in a block that begins at ``origin``."""
        lo, hi = self.reads(out)
        return slice(lo - origin, hi - origin, self.step) if lo < hi else slice(0, 0)


def crop(x: Sharded, spans: Mapping[int, Span]) -> Sharded:
    """Crops some dims to the elements ``spans[dim]``.

    Distribution scheme: 1. chosen elements stay on the ranks that own them, and the result is a
    view; 2. where that leaves a rank without any, that dim is cut in balanced shards, or not at
    all if there are fewer elements than ranks, and every rank fetches its own.
    """
    chosen = tuple(spans.get(d, Span(0, extent)) for d, extent in enumerate(x.shape))
    stay, target, cover = _lay_out_slices(x.partition, chosen)
    block = x.local
    origin = x.box
    if not stay:
        block = fetch(block, plan_exchange(x.partition, cover, x.grid), what="a crop")
        origin = cover.box(x.grid.coords)
    box = target.box(x.grid.coords)
    slices = [s.slice(box.interval(d), origin.lo[d]) for d, s in enumerate(chosen)]
    y = x.like(block[tuple(slices)], target)
    if not stay:
        y.mark_as_copy(x)
    elif any(x.partition.cuts[d] and s.count != x.shape[d] for d, s in enumerate(chosen)):
        y.mark_as_crop()
    return y


@functools.lru_cache(_LAYOUTS)
def _lay_out_slices(
    partition: Partition, chosen: tuple[Span, ...]
) -> tuple[bool, Partition, Cover]:
    """Returns if all elements stay where they are, the result's partition, and what it reads."""
    cuts = []
    stay = True
    for cut, span in zip(partition.cuts, chosen, strict=True):
        new = cut and span.follow(cut)
        if new is not None and new.thin:
            stay = False
            new = Cut.balanced(new.axis, span.count, new.parts)
        cuts.append(None if new is None or new.thin else new)
    target = Partition(tuple(s.count for s in chosen), tuple(cuts))
    reads = [
        tuple(span.reads(out) for out in outs)
        for span, outs in zip(chosen, target.cover.intervals, strict=True)
    ]
    return stay, target, Cover(target.cover.axes, tuple(reads))


def drop_dim(x: Sharded, dim: int) -> Sharded:
    """Drops a dim of extent 1 that is not cut, as a view."""
    return x.like(x.local.select(dim, 0), x.partition.without_dim(dim))


def split_at(x: Sharded, dim: int, bounds: Sequence[int]) -> tuple[Sharded, ...]:
    """Splits a dim at successive bounds."""
    return tuple(crop(x, {dim: Span(a, b - a)}) for a, b in itertools.pairwise(bounds))


@register(torch.narrow, torch.Tensor.narrow, family="views", dims=["dim"])
def narrow(input: Sharded, dim: int, start: SupportsInt, length: int) -> Sharded:
    """Any dim; elements stay on their ranks unless that leaves a rank without any."""
    first = int(start)
    extent = input.shape[dim]
    if not (-extent <= first <= extent and 0 <= length <= extent - first % (extent + 1)):
        raise IndexError(f"narrow: {length} elements from {first} of dim {dim}, {input.partition}")
    return crop(input, {dim: Span(first + extent * (first < 0), length)})


@register(torch.select, torch.Tensor.select, family="views", dims=["dim"])
def select(input: Sharded, dim: int, index: SupportsInt) -> Sharded:
    """Any dim, the batch too; along a cut dim every rank fetches the slice."""
    position = int(index)
    extent = input.shape[dim]
    if not -extent <= position < extent:
        raise IndexError(f"index {position} is out of bounds for dim {dim} with size {extent}")
    return drop_dim(crop(input, {dim: Span(position % extent, 1)}), dim)


@register(torch.unbind, torch.Tensor.unbind, family="views", dims=["dim"])
def unbind(input: Sharded, dim: int = 0) -> tuple[Sharded, ...]:
    """Every slice of a dim, as select."""
    return tuple(select(input, dim, index) for index in range(input.shape[dim]))


@register(torch.split, torch.Tensor.split, family="views", dims=["dim"])
def split(
    tensor: Sharded,
    split_size_or_sections: int | Sequence[int] = 0,
    dim: int = 0,
    *,
    split_size: int | Sequence[int] | None = None,
) -> tuple[Sharded, ...]:
    """Any dim; each part as narrow."""
    size = split_size_or_sections if split_size is None else split_size
    extent = tensor.shape[dim]
    if not isinstance(size, int):
        return split_with_sizes(tensor, size, dim)
    if size <= 0:
        raise ValueError(f"split: the size of a part must be positive, not {size}")
    return split_at(tensor, dim, [*range(0, extent, size), extent] if extent else [0, 0])


@register(torch.split_with_sizes, torch.Tensor.split_with_sizes, family="views", dims=["dim"])
def split_with_sizes(
    input: Sharded, split_sizes: Sequence[int], dim: int = 0
) -> tuple[Sharded, ...]:
    """Any dim; each part as narrow."""
    sizes = list(split_sizes)
    if sum(sizes) != input.shape[dim] or any(size < 0 for size in sizes):
        raise LayoutError(f"split: sizes {sizes} do not fill dim {dim} of {input.partition}")
    return split_at(input, dim, [0, *itertools.accumulate(sizes)])


@register(torch.chunk, torch.Tensor.chunk, family="views", dims=["dim"])
def chunk(input: Sharded, chunks: int, dim: int = 0) -> tuple[Sharded, ...]:
    """Any dim; each part as narrow."""
    if chunks <= 0:
        raise ValueError(f"chunk expects `chunks` to be greater than 0, got: {chunks}")
    if input.shape[dim] == 0:
        return split_with_sizes(input, [0] * chunks, dim)
    return split(input, math.ceil(input.shape[dim] / chunks), dim)


@register(torch.tensor_split, torch.Tensor.tensor_split, family="views", dims=["dim"])
def tensor_split(
    input: Sharded,
    indices_or_sections: int | Sequence[int] | torch.Tensor = (),
    dim: int = 0,
    *,
    indices: Sequence[int] | None = None,
    sections: int | None = None,
) -> tuple[Sharded, ...]:
    """Any dim; each part as narrow."""
    extent = input.shape[dim]
    given = next((v for v in (indices, sections) if v is not None), indices_or_sections)
    if isinstance(given, Sharded):
        given = given.full()  # or each rank would split elsewhere
    if isinstance(given, torch.Tensor):
        given = given.tolist()
    if isinstance(given, int):
        return split_at(input, dim, Cut.balanced("", extent, given).bounds)
    ends = [slice(None, end).indices(extent)[1] for end in given]
    spans = [Span(a, max(0, b - a)) for a, b in itertools.pairwise([0, *ends, extent])]
    return tuple(crop(input, {dim: span}) for span in spans)


DIM_OF_SPLIT = {"vsplit": 0, "hsplit": 1, "dsplit": 2}


@register_each(*DIM_OF_SPLIT, family="views")
def split_along(
    operator: Operator,
    input: Sharded,
    sections: int | Sequence[int] = (),
    *,
    indices: Sequence[int] | None = None,
) -> tuple[Sharded, ...]:
    """As tensor_split along its dim."""
    name = operator.__name__
    dim = DIM_OF_SPLIT[name]
    if input.dim() <= dim:
        raise LayoutError(f"{name} of {input.partition}\n    use tensor_split with a dim")
    return tensor_split(input, sections if indices is None else indices, dim)


@register(torch.Tensor.unfold, family="views")
def unfold(self: Sharded, dimension: int, size: int, step: int) -> Sharded:
    """Any dim; windows that lie within their rank's block are views of it.

    Distribution scheme: 1. every window lies on the rank that owns its centre; where that leaves a
    rank without any, that dim is cut in balanced shards, or not at all if there are fewer windows
    than ranks, 2. every rank fetches what its windows read, 3. they are views of that.
    """
    dim = read_dim(dimension, self.dim(), "unfold")
    if not 1 <= size <= self.shape[dim]:
        raise ValueError(
            f"unfold: windows of {size} elements along dim {dim}, which has {self.shape[dim]}: "
            f"{self.partition}"
        )
    if step < 1:
        raise ValueError(f"unfold: the step is {step} but must be greater than zero")
    stay, windows, cover = _lay_out_windows(self.partition, dim, Window(size, step))
    target = Partition((*windows.shape, size), (*windows.cuts, None))
    if stay:
        lo, hi = cover.box(self.grid.coords).interval(dim)
        block = self.local.narrow(dim, lo - self.box.lo[dim], hi - lo)
    else:
        block = fetch(self.local, plan_exchange(self.partition, cover, self.grid), what="unfold")
    y = self.like(block.unfold(dim, size, step), target)
    if not stay:
        y.mark_as_copy(self)
    elif self.partition.cuts[dim] is not None:
        y.mark_as_crop()
    return y


@functools.lru_cache(_LAYOUTS)
def _lay_out_windows(
    partition: Partition, dim: int, window: Window
) -> tuple[bool, Partition, Cover]:
    """Returns if every window lies in its rank's block, their partition, and what they read."""
    count = window.outputs(partition.shape[dim])
    cut = partition.cuts[dim]
    new = cut and window.cut_outputs(cut, count)
    if new is not None and new.thin:
        new = None
    windows = partition.with_dim(dim, count, new)
    outs = windows.cover.intervals
    reads = [tuple(map(window.reads, own)) if d == dim else own for d, own in enumerate(outs)]
    cover = Cover(windows.cover.axes, tuple(reads))
    owned = partition.cover.intervals[dim]
    stay = len(owned) == len(reads[dim]) and all(
        lo <= a and b <= hi for (lo, hi), (a, b) in zip(owned, reads[dim], strict=True)
    )
    return stay, windows, cover
