"""Concatenation along a dim: block by block where it is whole, by boxes where it is cut."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hyperslab.comm import Grid, per_grid, plan_exchange
from hyperslab.comm.exchange import fetch
from hyperslab.errors import LayoutError
from hyperslab.geometry import Cover, Cut, Interval, Partition
from hyperslab.memory_format import CHANNELS_LAST, memory_format_of
from hyperslab.ops.common.forms import Operator, register_each
from hyperslab.ops.common.operands import other_extents
from hyperslab.ops.views.reshape import unsqueeze
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe
from hyperslab.tensor.signature import read_dim


@dataclass(frozen=True, slots=True)
class SourceInterval:
    """The part ``interval`` of ``source`` along the joined dim; ordinary sources are global."""

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
        cover = _wanted(target, dim, offset, section.interval)
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
    """`torch.cat` of channels, which are last in memory.

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


def _wanted(target: Partition, dim: int, offset: int, interval: Interval) -> Cover:
    """Which box of a source every rank wants, if its section begins at ``offset`` of the target."""
    lo, hi = interval
    shift = lo - offset
    cover = target.cover
    spans = [(max(a + shift, lo), min(b + shift, hi)) for a, b in cover.intervals[dim]]
    intervals = list(cover.intervals)
    intervals[dim] = tuple((min(a, hi), max(min(a, hi), b)) for a, b in spans)
    return Cover(cover.axes, tuple(intervals))


def cut_of_joined(tensors: Sequence[torch.Tensor], dim: int, extent: int, grid: Grid) -> Partition:
    """How the joined tensor is cut: as that operand for which the fewest elements travel.

    Along ``dim``, where that operand is cut there, in balanced shards.
    """
    cut = [t.partition for t in tensors if isinstance(t, Sharded)]
    candidates = tuple(dict.fromkeys(_candidate(partition, dim, extent) for partition in cut))
    if len(candidates) == 1:
        return candidates[0]
    held = tuple(
        t.partition if isinstance(t, Sharded) else Partition.whole(t.shape) for t in tensors
    )
    return _cheapest(grid, candidates, held, dim)


@per_grid
def _cheapest(
    grid: Grid, candidates: tuple[Partition, ...], held: tuple[Partition, ...], dim: int
) -> Partition:
    return min(candidates, key=lambda target: _moved(held, dim, target, grid))


def _candidate(partition: Partition, dim: int, extent: int) -> Partition:
    cut = partition.cuts[dim]
    joined = cut and Cut.balanced(cut.axis, extent, cut.parts)
    return partition.with_dim(dim, extent, None if joined is None or joined.thin else joined)


def _moved(held: Sequence[Partition], dim: int, target: Partition, grid: Grid) -> int:
    """How many elements all ranks receive together."""
    moved = 0
    offset = 0
    places = [grid.coords_of(rank) for rank in range(grid.size)]
    for partition in held:
        extent = partition.shape[dim]
        cover = _wanted(target, dim, offset, (0, extent))
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
    _check(kept, dim, like, name)
    target = cut_of_joined(kept, dim, sum(t.shape[dim] for t in kept), like.grid)
    joined = join([SourceInterval(t, (0, t.shape[dim])) for t in kept], dim, target, like, name)
    if len(kept) == len(tensors):
        return joined
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    return like.like(joined.block.to(dtype), target)


def _check(tensors: Sequence[torch.Tensor], dim: int, like: Sharded, name: str) -> None:
    """Every rank must refuse what one rank's blocks would not show."""
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
