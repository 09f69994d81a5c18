"""Joining tensors along a dim: block by block where it is whole, by boxes where it is cut."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hyperslab.comm import Grid, per_grid, plan_exchange
from hyperslab.comm.exchange import fetch
from hyperslab.errors import LayoutError
from hyperslab.geometry import Cover, Cut, Interval, Partition
from hyperslab.ops.views.reshape import unsqueeze
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe


@dataclass(frozen=True, slots=True)
class Piece:
    """The part ``interval`` of ``source`` along the joined dim; ordinary sources are global."""

    source: torch.Tensor
    interval: Interval


def join(pieces: Sequence[Piece], dim: int, target: Partition, like: Sharded, what: str) -> Sharded:
    """Lay pieces one after the other along ``dim``, into a tensor that is cut as ``target``.

    Distribution scheme: 1. of every piece this rank fetches what lies in its box of the target
    (nothing travels where the piece is cut like the target), 2. it joins the parts.
    """
    parts, offset = [], 0
    for piece in pieces:
        cover = _wanted(target, dim, offset, piece.interval)
        offset += piece.interval[1] - piece.interval[0]
        if isinstance(piece.source, Sharded):
            plan = plan_exchange(piece.source.partition, cover, like.grid)
            parts.append(fetch(piece.source.local, plan, what=what))
        else:
            parts.append(piece.source[cover.box(like.grid.coords).slices()])
    return like.like(torch.cat(parts, dim), target)


def _wanted(target: Partition, dim: int, offset: int, interval: Interval) -> Cover:
    """Which box of a piece every rank wants, if the piece begins at ``offset`` of the target."""
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
    moved, offset = 0, 0
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
    if not -like.dim() <= dim < like.dim():
        raise IndexError(f"{name}: dim {dim} of tensors of {like.dim()} dims")
    dim %= like.dim()
    # Torch skips one-dimensional empty tensors, with which old code begins its lists.
    kept = [t for t in tensors if tuple(t.shape) != (0,) or like.dim() == 1]
    _check(kept, dim, like, name)
    target = cut_of_joined(kept, dim, sum(t.shape[dim] for t in kept), like.grid)
    joined = join([Piece(t, (0, t.shape[dim])) for t in kept], dim, target, like, name)
    if len(kept) == len(tensors):
        return joined
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    return like.like(joined.local.to(dtype), target)


def _check(tensors: Sequence[torch.Tensor], dim: int, like: Sharded, name: str) -> None:
    """Every rank must refuse what one rank's blocks would not show."""
    for tensor in tensors:
        if isinstance(tensor, Sharded) and tensor.grid.extents != like.grid.extents:
            raise LayoutError(f"{name}: operands on two grids: {like.grid} and {tensor.grid}")
        differs = tensor.dim() != like.dim() or _without(tensor, dim) != _without(like, dim)
        if differs:
            raise LayoutError(
                f"{name} along dim {dim}: the other dims of the global shapes differ\n"
                f"{describe(tensors)}    crop, pad or interpolate them to one shape"
            )


def _without(tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], *tensor.shape[dim + 1 :])


@register(torch.cat, torch.concat, torch.concatenate, family="joining")
def cat(tensors: Any, dim: int = 0, *, axis: Any = None, out: Any = None) -> Sharded:
    """Any dim, cut or not; operands that are cut otherwise are aligned the cheapest way."""
    _no_out(out, "cat")
    return concatenate(tensors, dim if axis is None else axis, "cat")


@register(torch.stack, family="joining")
def stack(tensors: Any, dim: int = 0, *, out: Any = None) -> Sharded:
    """A new dim, anywhere, that is not cut; operands are aligned as by cat."""
    _no_out(out, "stack")
    n = next(t for t in tensors if isinstance(t, Sharded)).dim()
    if not -n - 1 <= dim <= n:
        raise IndexError(f"stack: dim {dim} of tensors of {n} dims")
    return concatenate([_with_dim(t, dim % (n + 1)) for t in tensors], dim, "stack")


def _with_dim(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return unsqueeze(tensor, dim) if isinstance(tensor, Sharded) else tensor.unsqueeze(dim)


def _no_out(out: Any, name: str) -> None:
    if out is not None:
        raise LayoutError(f"{name}(out=...) of cut tensors has no rule; use its return value")


def _register_stacks(*functions: Callable[..., Any], dim: int) -> None:
    def rule(tensors: Any, *, out: Any = None) -> Sharded:
        """As cat along its dim, for tensors that have that dim already."""
        name = functions[0].__name__
        _no_out(out, name)
        if any(t.dim() <= dim for t in tensors):
            raise LayoutError(f"{name} of tensors with fewer than {dim + 1} dims; use stack")
        return concatenate(tensors, dim, name)

    register(*functions, family="joining")(rule)


_register_stacks(torch.vstack, torch.row_stack, dim=0)
_register_stacks(torch.hstack, dim=1)
_register_stacks(torch.dstack, dim=2)
