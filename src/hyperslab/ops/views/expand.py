"""Expand, repeat, tile and repeat_interleave."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.geometry import Cut, Partition
from hyperslab.ops.common.arguments import Integers, integers
from hyperslab.ops.views.concat import concatenate
from hyperslab.ops.views.reshape import reshape_to
from hyperslab.ops.views.slicing import Span, crop
from hyperslab.tensor import Sharded, register


def expanded(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The view of a global shape in which dims of extent 1 are repeated; -1 keeps a dim."""
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
    """Laid one after the other along every dim; new dims stand in front.

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
