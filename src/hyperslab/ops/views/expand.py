"""Repeated values: expanded, tiled, or element by element."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.geometry import Cut, Partition
from hyperslab.ops.views.concat import concatenate
from hyperslab.ops.views.reshape import reshape_to
from hyperslab.ops.views.slicing import Span, crop, dim_of
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


def _numbers(given: tuple[Any, ...]) -> tuple[int, ...]:
    one = len(given) == 1 and not hasattr(given[0], "__index__")
    return tuple(map(operator.index, given[0] if one else given))


@register(torch.Tensor.expand, family="expansion")
def expand(self: Any, *sizes: Any, **kwargs: Any) -> torch.Tensor:
    """Dims of extent 1 and new ones in front, by global shape; a view."""
    return expanded(self, _numbers((kwargs["size"],) if "size" in kwargs else sizes))


@register(torch.Tensor.expand_as, family="expansion")
def expand_as(self: Any, other: Any) -> torch.Tensor:
    """To the global shape of the other tensor; a view."""
    return expanded(self, tuple(other.shape))


@register(torch.broadcast_to, torch.Tensor.broadcast_to, family="expansion")
def broadcast_to(input: Any, size: Any) -> torch.Tensor:
    """As expand."""
    return expanded(input, tuple(size))


@register(torch.broadcast_tensors, family="expansion")
def broadcast_tensors(*tensors: Any) -> tuple[torch.Tensor, ...]:
    """As expand, each cut as it is; ordinary ones stay whole."""
    shape = torch.broadcast_shapes(*(tuple(t.shape) for t in tensors))
    return tuple(expanded(t, shape) for t in tensors)


@register(torch.Tensor.repeat, family="expansion")
def repeat(self: Any, *repeats: Any, **kwargs: Any) -> Sharded:
    """Any dims; along a cut dim as cat of the tensor with itself."""
    return repeated(self, _numbers((kwargs["repeats"],) if kwargs else repeats), "repeat")


@register(torch.tile, torch.Tensor.tile, family="expansion")
def tile(input: Any, *dims: Any, **kwargs: Any) -> Sharded:
    """Any dims; along a cut dim as cat of the tensor with itself."""
    counts = _numbers((kwargs["dims"],) if kwargs else dims)
    return repeated(input, (*[1] * (input.dim() - len(counts)), *counts), "tile")


@register(torch.repeat_interleave, torch.Tensor.repeat_interleave, family="expansion")
def repeat_interleave(
    input: Any, repeats: Any, dim: Any = None, *, output_size: Any = None
) -> Sharded:
    """Any dim, by a number or one for each element; copies stay on the rank of their element.

    Distribution scheme: 1. the local repetition, 2. a new cut if a rank is left without elements.
    """
    if dim is None or isinstance(repeats, Sharded):
        raise UnsupportedOp(
            f"repeat_interleave of {getattr(input, 'partition', tuple(input.shape))} needs a dim "
            "and ordinary numbers of copies\n    use x.full() to repeat all elements as one row"
        )
    d = dim_of(input, dim, "repeat_interleave")
    extent = input.shape[d]
    counts = torch.as_tensor(repeats).flatten().expand(extent).tolist()
    ends = [0, *itertools.accumulate(counts)]
    cut = input.partition.cuts[d]
    new = cut and Cut(cut.axis, tuple(ends[bound] for bound in cut.bounds))
    partition = input.partition.with_dim(d, ends[-1], new)
    lo, hi = input.box.interval(d)
    copies = torch.tensor(counts[lo:hi], dtype=torch.int64, device=input.device)
    y = input.like(input.local.repeat_interleave(copies, d), partition)
    if new is None or not new.thin:
        return y
    balanced = Cut.balanced(new.axis, ends[-1], new.parts)
    spread = partition.with_dim(d, ends[-1], None if balanced.thin else balanced)
    return y.redistribute(spread, "repeat_interleave")
