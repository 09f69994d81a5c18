"""Distributes concatenation and repetition: cat, stack, expand, repeat, tile, repeat_interleave.

Along a dim that is whole they go block by block, along a cut one by boxes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hyperslab.comm import Grid, per_grid, plan_exchange
from hyperslab.comm.exchange import fetch
from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.geometry import Cover, Cut, Interval, Partition
from hyperslab.kernels.memory_format import CHANNELS_LAST, memory_format_of
from hyperslab.ops.operands import other_extents
from hyperslab.ops.overloads import Integers, Operator, integers, register_each
from hyperslab.ops.views.reshape import reshape_to, unsqueeze
from hyperslab.ops.views.slicing import Span, crop
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe, read_dim


@dataclass(frozen=True, slots=True)
class SourceInterval:
    """Names a part of ``source`` along the joined dim; ordinary sources are global."""

    source: torch.Tensor
    interval: Interval


def join(
    sections: Sequence[SourceInterval], dim: int, target: Partition, like: Sharded, what: str
) -> Sharded:
    """Concatenate sections along ``dim``, into a tensor that is cut as ``target``.

    Distribution scheme: 1. of every section this rank fetches what lies in its box of the target
    (nothing travels where the section is cut like the target), 2. it concatenates them.
    """
    parts = []
    offset = 0
    for section in sections:
        cover = _wanted_boxes(target, dim, offset, section.interval)
        offset += section.interval[1] - section.interval[0]
        if isinstance(section.source, Sharded):
            plan = plan_exchange(section.source.partition, cover, like.grid)
            parts.append(fetch(section.source.block, plan, what=what))
        else:
            parts.append(section.source[cover.box(like.grid.coords).slices()])
    return like.like(_cat(parts, dim), target, fresh=True)


def _cat(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    alike = len({part.dtype for part in parts}) == 1
    last = alike and all(memory_format_of(p) is not torch.contiguous_format for p in parts)
    if dim == 1 and last and any(part.requires_grad for part in parts):
        return _JoinedChannels.apply(*parts)
    return torch.cat(parts, dim)


class _JoinedChannels(torch.autograd.Function):
    """Concatenates channels, which are last in memory.

    Torch hands views of the gradient on; adding another one to such a view takes seven times as
    long as to a tensor of its own, and a convolution copies it anyway (2.13, bfloat16).
    """

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> torch.Tensor:
        ctx.extents = [part.shape[1] for part in parts]
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pieces = gradient.split(ctx.extents, 1)
        order = CHANNELS_LAST[gradient.dim()]
        needs = zip(pieces, ctx.needs_input_grad, strict=True)
        return tuple(p.contiguous(memory_format=order) if wanted else None for p, wanted in needs)


def _wanted_boxes(target: Partition, dim: int, offset: int, interval: Interval) -> Cover:
    """Finds each rank's wanted box of a source whose section begins at ``offset`` of the target."""
    lo, hi = interval
    shift = lo - offset
    cover = target.cover
    spans = [(max(a + shift, lo), min(b + shift, hi)) for a, b in cover.intervals[dim]]
    intervals = list(cover.intervals)
    intervals[dim] = tuple((min(a, hi), max(min(a, hi), b)) for a, b in spans)
    return Cover(cover.axes, tuple(intervals))


def cut_of_joined(tensors: Sequence[torch.Tensor], dim: int, extent: int, grid: Grid) -> Partition:
    """Cuts the joined tensor like that operand for which the fewest elements travel.

    Along ``dim``, where that operand is cut there, in balanced shards.
    """
    cut = [t.partition for t in tensors if isinstance(t, Sharded)]
    candidates = tuple(dict.fromkeys(_candidate_cut(partition, dim, extent) for partition in cut))
    if len(candidates) == 1:
        return candidates[0]
    held = tuple(
        t.partition if isinstance(t, Sharded) else Partition.whole(t.shape) for t in tensors
    )
    return _cheapest_cut(grid, candidates, held, dim)


@per_grid
def _cheapest_cut(
    grid: Grid, candidates: tuple[Partition, ...], held: tuple[Partition, ...], dim: int
) -> Partition:
    return min(candidates, key=lambda target: _moved_elements(held, dim, target, grid))


def _candidate_cut(partition: Partition, dim: int, extent: int) -> Partition:
    cut = partition.cuts[dim]
    joined = cut and Cut.balanced(cut.axis, extent, cut.parts)
    return partition.with_dim(dim, extent, None if joined is None or joined.thin else joined)


def _moved_elements(held: Sequence[Partition], dim: int, target: Partition, grid: Grid) -> int:
    """Counts the elements that all ranks receive together."""
    moved = 0
    offset = 0
    places = [grid.coords_of(rank) for rank in range(grid.size)]
    for partition in held:
        extent = partition.shape[dim]
        cover = _wanted_boxes(target, dim, offset, (0, extent))
        offset += extent
        for coords in places:
            wanted = cover.box(coords)
            moved += wanted.size - wanted.intersect(partition.box(coords)).size
    return moved


def concatenate(tensors: Sequence[torch.Tensor], dim: int, name: str) -> Sharded:
    """Join whole tensors, cut or ordinary; see `join` for the scheme."""
    tensors = tuple(tensors)
    like = next(t for t in tensors if isinstance(t, Sharded))
    dim = read_dim(dim, like.dim(), name)
    # Torch skips one-dimensional empty tensors, with which old code begins its lists.
    kept = [t for t in tensors if tuple(t.shape) != (0,) or like.dim() == 1]
    _check_joinable(kept, dim, like, name)
    target = cut_of_joined(kept, dim, sum(t.shape[dim] for t in kept), like.grid)
    joined = join([SourceInterval(t, (0, t.shape[dim])) for t in kept], dim, target, like, name)
    if len(kept) == len(tensors):
        return joined
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    return like.like(joined.block.to(dtype), target)


def _check_joinable(tensors: Sequence[torch.Tensor], dim: int, like: Sharded, name: str) -> None:
    """Refuses on every rank what one rank's blocks would not show."""
    for tensor in tensors:
        differs = tensor.dim() != like.dim() or other_extents(tensor, dim) != other_extents(
            like, dim
        )
        if differs:
            raise LayoutError(
                f"{name} along dim {dim}: the other dims of the global shapes differ\n"
                f"{describe(tensors)}    crop, pad or interpolate them to one shape"
            )


@register(torch.cat, torch.concat, torch.concatenate, family="views")
def cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Sharded:
    """Any dim, cut or not; operands that are cut otherwise are aligned the cheapest way."""
    return concatenate(tensors, dim, "cat")


@register(torch.stack, family="views")
def stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> Sharded:
    """A new dim, anywhere, that is not cut; operands are aligned as by cat."""
    n = next(t for t in tensors if isinstance(t, Sharded)).dim()
    new = read_dim(dim, n + 1, "stack")
    return concatenate([_with_dim(t, new) for t in tensors], new, "stack")


def _with_dim(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return unsqueeze(tensor, dim) if isinstance(tensor, Sharded) else tensor.unsqueeze(dim)


DIM_OF_STACK = {"vstack": 0, "row_stack": 0, "hstack": 1, "dstack": 2}


@register_each(*DIM_OF_STACK, family="views")
def stack_along(operator: Operator, tensors: Sequence[torch.Tensor]) -> Sharded:
    """As cat along its dim, for tensors that have that dim already."""
    name = operator.__name__
    dim = DIM_OF_STACK[name]
    least = max(2, dim + 1)  # torch gives a dim more to tensors that have fewer
    if any(t.dim() < least for t in tensors):
        raise LayoutError(f"{name} of tensors with fewer than {least} dims; use stack")
    return concatenate(tensors, dim, name)


def expanded(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Expands dims of extent 1 to a global shape, as a view; -1 keeps a dim."""
    if not isinstance(x, Sharded):
        return x.expand(*shape)
    front = len(shape) - x.dim()
    own = (*[1] * front, *x.shape)
    found = [b if a == -1 else a for a, b in zip(shape, own, strict=front >= 0)]
    fits = all(b in (1, a) for a, b in zip(found, own, strict=front >= 0))
    if front < 0 or -1 in shape[:front] or not fits:
        raise LayoutError(
            f"expand: {x.partition} cannot be expanded to {tuple(shape)}\n"
            "    shapes of a cut tensor are global"
        )
    cuts = (*[None] * front, *x.partition.cuts)
    kept = tuple(cut if a == b else None for a, b, cut in zip(found, own, cuts, strict=True))
    partition = Partition(tuple(found), kept)
    return x.like(x.local.expand(partition.box(x.grid.coords).shape), partition)


def repeated(x: Sharded, counts: Sequence[int], name: str) -> Sharded:
    """Repeats a tensor along every dim; new dims stand in front.

    Distribution scheme: 1. the local repetition along dims that are not cut, 2. along each cut
    dim the tensor is joined with itself, as cat does it.
    """
    front = len(counts) - x.dim()
    if front < 0:
        raise LayoutError(f"{name}: {len(counts)} numbers for {x.partition}")
    y = reshape_to(x, (*[1] * front, *x.shape))
    cut = y.partition.cut_dims
    local = [1 if dim in cut else count for dim, count in enumerate(counts)]
    shape = tuple(e * n for e, n in zip(y.shape, local, strict=True))
    y = y.like(y.local.repeat(local), Partition(shape, y.partition.cuts))
    for dim in cut:
        if counts[dim] != 1:
            parts = [y] * counts[dim] or [crop(y, {dim: Span(0, 0)})]
            y = concatenate(parts, dim, name)
    return y


@register(torch.Tensor.expand, family="views")
def expand_to_sizes(self: Sharded, *sizes: Integers, size: Integers | None = None) -> torch.Tensor:
    """Dims of extent 1 and new ones in front, by global shape; a view."""
    return expanded(self, integers(*sizes) if size is None else integers(size))


@register(torch.Tensor.expand_as, family="views")
def expand_as(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """To the global shape of the other tensor; a view."""
    return expanded(self, tuple(other.shape))


@register(torch.broadcast_to, torch.Tensor.broadcast_to, family="views")
def broadcast_to(input: Sharded, size: Sequence[int]) -> torch.Tensor:
    """As expand."""
    return expanded(input, tuple(size))


@register(torch.broadcast_tensors, family="views")
def broadcast_tensors(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As expand, each cut as it is; ordinary ones stay whole."""
    shape = torch.broadcast_shapes(*(tuple(t.shape) for t in tensors))
    return tuple(expanded(t, shape) for t in tensors)


@register(torch.Tensor.repeat, family="views")
def repeat(self: Sharded, *repeats: Integers, **named: Integers) -> Sharded:
    """Any dims; along a cut dim as cat of the tensor with itself."""
    return repeated(self, integers(*repeats, *named.values()), "repeat")


@register(torch.tile, torch.Tensor.tile, family="views")
def tile(input: Sharded, *dims: Integers, **named: Integers) -> Sharded:
    """Any dims; along a cut dim as cat of the tensor with itself."""
    counts = integers(*dims, *named.values())
    return repeated(input, (*[1] * (input.dim() - len(counts)), *counts), "tile")


@register(torch.repeat_interleave, torch.Tensor.repeat_interleave, family="views", dims=["dim"])
def repeat_interleave(
    input: torch.Tensor,
    repeats: int | torch.Tensor,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> Sharded:
    """Any dim, by a number or one for each element; copies stay on the rank of their element.

    Distribution scheme: 1. the local repetition, 2. a new cut if a rank is left without elements.
    """
    if not isinstance(input, Sharded) or isinstance(repeats, Sharded) or dim is None:
        raise UnsupportedOp(
            f"repeat_interleave of {getattr(input, 'partition', tuple(input.shape))} needs a dim "
            "and ordinary numbers of copies\n    use x.full() to repeat all elements as one row"
        )
    extent = input.shape[dim]
    counts = torch.as_tensor(repeats).flatten().expand(extent).tolist()
    ends = [0, *itertools.accumulate(counts)]
    cut = input.partition.cuts[dim]
    new = cut and Cut(cut.axis, tuple(ends[bound] for bound in cut.bounds))
    partition = input.partition.with_dim(dim, ends[-1], new)
    lo, hi = input.box.interval(dim)
    copies = torch.tensor(counts[lo:hi], dtype=torch.int64, device=input.device)
    y = input.like(input.local.repeat_interleave(copies, dim), partition)
    if new is None or not new.thin:
        return y
    balanced = Cut.balanced(new.axis, ends[-1], new.parts)
    spread = partition.with_dim(dim, ends[-1], None if balanced.thin else balanced)
    return y.redistribute(spread, "repeat_interleave")
