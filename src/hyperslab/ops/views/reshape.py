"""Distributes reshapes and permutations of dims.

In a reshape cut dims that stay as they are stay cut, others are gathered; in a permutation
every cut goes with its dim, and nothing travels.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.geometry import Cut, Interval, Partition
from hyperslab.ops.overloads import Integers, Operator, integers, register_each
from hyperslab.tensor import Sharded, gather, register
from hyperslab.tensor.dispatch import read_dim, read_dims

_LAYOUTS = 4096
"""Limits the layouts that are cached, of reshapes of one partition each."""


@dataclass(frozen=True, slots=True)
class DimGroup:
    """Pairs adjacent dims ``source`` with the adjacent dims ``target`` that they become."""

    source: range
    target: range


@dataclass(frozen=True, slots=True)
class _Reshape:
    """Names the axes to gather first, the result's partition, and whether a cut dim has changed.

    ``single``: some shard of that is one element, of which torch takes any stride.
    """

    gathered: tuple[str, ...]
    partition: Partition
    carried: bool
    single: bool


def dim_groups(old: Sequence[int], new: Sequence[int]) -> list[DimGroup]:
    """Splits a reshape into the smallest independent reshapes of neighbouring dims.

    >>> [(list(g.source), list(g.target)) for g in dim_groups((2, 3, 4), (2, 12))]
    [([0], [0]), ([1, 2], [1])]
    """
    groups: list[DimGroup] = []
    i = j = 0
    while i < len(old) or j < len(new):
        source = i
        target = j
        if i < len(old) and j < len(new) and old[i] == new[j]:
            i += 1
            j += 1
        elif i < len(old) and old[i] == 1:  # dropped, or inserted: nothing merges
            i += 1
        elif j < len(new) and new[j] == 1:
            j += 1
        else:
            i, j = _match_runs(old, new, i, j)
        groups.append(DimGroup(range(source, i), range(target, j)))
    return groups


def _match_runs(old: Sequence[int], new: Sequence[int], i: int, j: int) -> tuple[int, int]:
    """Finds the ends of the shortest runs from ``i`` and ``j`` with equal products."""
    left = right = 1
    start = (i, j)
    while left != right or (i, j) == start:
        if j == len(new) or (left <= right and i < len(old)):
            left *= old[i]
            i += 1
        else:
            right *= new[j]
            j += 1
    return i, j


def resolve_shape(shape: Sequence[int], numel: int, old: Sequence[int]) -> tuple[int, ...]:
    """Replace a -1 by the extent that fits the global number of elements."""
    known = math.prod(extent for extent in shape if extent != -1)
    free = list(shape).count(-1)
    fits = known == numel if free == 0 else free == 1 and known > 0 and numel % known == 0
    if not fits or (numel == 0 and _not_one(shape) != _not_one(old)):
        raise LayoutError(
            f"cannot reshape the global shape {tuple(old)} to {tuple(shape)}\n"
            "    shapes of a cut tensor are global: x.shape[0] is the whole mini-batch"
        )
    return tuple(numel // known if extent == -1 else extent for extent in shape)


def _not_one(shape: Sequence[int]) -> list[int]:
    """Drops extents of 1: without elements nothing tells which other dims merge."""
    return [extent for extent in shape if extent != 1]


def reshape_to(x: Sharded, shape: Sequence[int]) -> Sharded:
    """Reshape by global shape.

    Distribution scheme: 1. spatial dims that merge with others are gathered along their axes
    (leaving space), but for the first one of several: its shards are those of the merged dim, which
    stays cut until a rule asks for all of it; a batch that comes first stays cut for every rule,
    2. the local reshape.
    """
    plan = _lay_out_reshape(x.partition, tuple(shape))
    whole = gather(x, plan.gathered) if plan.gathered else x
    block = whole.local.reshape(plan.partition.box(x.grid.coords).shape)
    # A view on some ranks, a copy on others, as `contiguous`.
    unclear = plan.carried and (whole.is_crop or plan.single)
    y = whole.like(block.clone() if unclear else block, plan.partition)
    if plan.gathered or unclear:
        y.mark_as_copy(x)
    return y


@functools.lru_cache(_LAYOUTS)
def _lay_out_reshape(old: Partition, shape: tuple[int, ...]) -> _Reshape:
    """Lays out a reshape to a global shape, which may have a -1."""
    new = resolve_shape(shape, math.prod(old.shape), old.shape)
    cuts: list[Cut | None] = [None] * len(new)
    gathered: list[str] = []
    shards: list[Interval] = []
    for group in dim_groups(old.shape, new):
        carried = _carried(group, old, new)
        axes = [cut.axis for dim in group.source if (cut := old.cuts[dim]) is not None]
        if carried is not None:
            dim, cut = carried
            cuts[dim] = cut
            axes.remove(cut.axis)
            shards += [] if _kept_cut(group, old.shape, new) else _shards_of_group(group, old)
        gathered += axes
    if "data" in gathered:
        raise LayoutError(
            f"cannot reshape {old} to {new}: the batch dim is cut and would merge with others "
            "before it, or be divided across a cut\n    have it in front of those that it merges "
            "with, or use hyperslab.gather(x, 'data') before"
        )
    single = any(hi - lo < 2 for lo, hi in shards)
    return _Reshape(tuple(gathered), Partition(new, tuple(cuts)), bool(shards), single)


def _shards_of_group(group: DimGroup, old: Partition) -> list[Interval]:
    return [i for dim in group.source if (cut := old.cuts[dim]) for i in cut.intervals]


def _carried(group: DimGroup, old: Partition, new: tuple[int, ...]) -> tuple[int, Cut] | None:
    """Finds the dim of the result that keeps the cut of the group's first one, and its cut.

    The first dim alone: the blocks of its shards lie one after the other in the merged dim.
    """
    source = [dim for dim in group.source if old.shape[dim] != 1]
    target = [dim for dim in group.target if new[dim] != 1]
    if _kept_cut(group, old.shape, new):
        source = list(group.source)
        target = list(group.target)
    cut = old.cuts[source[0]] if source and target else None
    if cut is None:
        return None
    if len(source) == len(target) == 1:
        return target[0], cut
    inner = math.prod(old.shape[dim] for dim in source[1:])
    outer = math.prod(new[dim] for dim in target[1:])
    rows = [bound * inner for bound in cut.bounds]
    if any(row % outer for row in rows):
        return None
    bounds = tuple(row // outer for row in rows)
    if cut.axis == "data":  # rows of samples, or slices of them: each stays with its replica
        return target[0], Cut(cut.axis, bounds)
    if cut.merged == tuple(new[dim] for dim in target):
        return target[0], Cut(cut.axis, bounds)
    if len(target) == 1 and len(new) > 2:  # of two dims the last one holds features
        return target[0], Cut(cut.axis, bounds, tuple(old.shape[dim] for dim in source))
    return None


def _kept_cut(group: DimGroup, old: Sequence[int], new: Sequence[int]) -> bool:
    return (
        len(group.source) == 1 == len(group.target) and old[group.source[0]] == new[group.target[0]]
    )


@register(torch.reshape, torch.Tensor.reshape, torch.Tensor.view, family="views", merged=True)
def reshape(
    input: Sharded, *shape: Integers | torch.dtype, **named: Integers | torch.dtype
) -> Sharded:
    """By global shape; of cut dims that merge the first one may stay cut, the batch say."""
    given = (*shape, *named.values())
    if any(isinstance(value, torch.dtype) for value in given):
        raise LayoutError("view(dtype) of a cut tensor has no rule; use x.to(dtype)")
    return reshape_to(input, integers(*given))  # type: ignore[arg-type]


@register(torch.Tensor.view_as, torch.Tensor.reshape_as, family="views", merged=True)
def reshape_as(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """By the global shape of the other tensor."""
    if not isinstance(input, Sharded):
        return input.reshape(other.shape)
    return reshape_to(input, tuple(other.shape))


@register(
    torch.flatten,
    torch.Tensor.flatten,
    family="views",
    dims=["start_dim", "end_dim"],
    merged=True,
)
def flatten(input: Sharded, start_dim: int = 0, end_dim: int = -1) -> Sharded:
    """Leaves space: gathered along the cut dims that merge; the batch dim stays cut."""
    shape = input.partition.shape
    end = end_dim + 1
    return reshape_to(input, (*shape[:start_dim], math.prod(shape[start_dim:end]), *shape[end:]))


@register(torch.ravel, torch.Tensor.ravel, family="views")
def ravel(input: Sharded) -> Sharded:
    """As flatten."""
    return reshape_to(input, (input.numel(),))


@register(torch.unflatten, torch.Tensor.unflatten, family="views", dims=["dim"], merged=True)
def unflatten(input: Sharded, dim: int, sizes: Sequence[int]) -> Sharded:
    """Splits a dim that is not cut."""
    shape = input.partition.shape
    extents = resolve_shape(tuple(sizes), shape[dim], (shape[dim],))
    return reshape_to(input, (*shape[:dim], *extents, *shape[dim + 1 :]))


@register(torch.unsqueeze, torch.Tensor.unsqueeze, family="views")
def unsqueeze(input: Sharded, dim: int) -> Sharded:
    """Anywhere; each cut goes with its dim."""
    d = read_dim(dim, input.dim() + 1, "unsqueeze")
    shape = list(input.partition.shape)
    shape.insert(d, 1)
    cuts = list(input.partition.cuts)
    cuts.insert(d, None)
    return input.like(input.local.unsqueeze(d), Partition(tuple(shape), tuple(cuts)))


@register(torch.squeeze, torch.Tensor.squeeze, family="views", dims=["dim"])
def squeeze(input: Sharded, dim: Integers | None = None) -> Sharded:
    """Drops dims of global extent 1; each cut goes with its dim."""
    n = input.dim()
    shape = input.partition.shape
    cuts = input.partition.cuts
    dims = range(n) if dim is None else integers(dim)
    drop = [d for d in dims if shape[d] == 1]
    keep = [d for d in range(n) if d not in drop]
    partition = Partition(tuple(shape[d] for d in keep), tuple(cuts[d] for d in keep))
    return input.like(input.local.squeeze(drop) if drop else input.local, partition)


def permuted(x: Sharded, dims: Sequence[int]) -> Sharded:
    """Permutes the dims: dim ``i`` of the view is dim ``dims[i]`` of ``x``."""
    n = x.dim()
    order = [d % n if -n <= d < n else n for d in dims]
    if sorted(order) != list(range(n)):
        raise LayoutError(f"permute: {tuple(dims)} is no order of the dims of {x.partition}")
    shape = x.partition.shape
    cuts = x.partition.cuts
    partition = Partition(tuple(shape[d] for d in order), tuple(cuts[d] for d in order))
    return x.like(x.local.permute(order), partition)


def exchanged(x: Sharded, a: int, b: int) -> Sharded:
    """Exchanges two dims, as a view."""
    order = list(range(x.dim()))
    a, b = read_dims((a, b), x.dim(), "transpose")
    order[a], order[b] = order[b], order[a]
    return permuted(x, order)


def moved(x: Sharded, source: Sequence[int], destination: Sequence[int]) -> Sharded:
    """Moves the dims ``source`` to ``destination``, the others in order, as a view."""
    origin = dict(zip(destination, source, strict=True))
    if len(origin) != len(source) or len(set(origin.values())) != len(source):
        raise LayoutError(f"movedim: repeated dims among {tuple(source)} or {tuple(destination)}")
    others = iter([d for d in range(x.dim()) if d not in origin.values()])
    return permuted(x, [origin[to] if to in origin else next(others) for to in range(x.dim())])


@register(torch.permute, torch.Tensor.permute, family="views")
def permute(input: Sharded, *dims: Integers, **named: Integers) -> Sharded:
    """Any order of the dims; each cut goes with its dim."""
    return permuted(input, integers(*dims, *named.values()))


@register(torch.channel_shuffle, torch.native_channel_shuffle, family="views")
def channel_shuffle(input: Sharded, groups: int) -> Sharded:
    """Of channels that are not cut: block by block."""
    if input.dim() < 3 or input.shape[1] % groups or input.partition.cuts[1] is not None:
        raise LayoutError(
            f"channel_shuffle in {groups} groups: {input.partition} has to have channels in dim 1 "
            "that are not cut\n    and whose number is a multiple of the groups"
        )
    return input.like(torch.channel_shuffle(input.local, groups))


@register_each("transpose", "swapaxes", "swapdims", family="views")
def transpose(_: Operator, input: Sharded, *dims: int, **named: int) -> Sharded:
    """Two dims exchanged; each cut goes with its dim."""
    a, b = (*dims, *named.values())
    return exchanged(input, a, b)


@register(
    torch.movedim,
    torch.moveaxis,
    torch.Tensor.movedim,
    torch.Tensor.moveaxis,
    family="views",
    dims=["source", "destination"],
)
def movedim(input: Sharded, source: Integers, destination: Integers) -> Sharded:
    """Some dims moved; each cut goes with its dim."""
    return moved(input, integers(source), integers(destination))


def _property_getter(name: str) -> Operator:
    getter: Operator = getattr(torch.Tensor, name).__get__
    return getter


def _transposed(input: Sharded, most: int) -> Sharded:
    if not 2 <= input.dim() <= most:
        raise UnsupportedOp(
            f"a transpose without dims, of {input.partition}\n    use x.transpose(a, b)"
        )
    return exchanged(input, -2, -1)


@register(torch.t, torch.Tensor.t, _property_getter("T"), family="views")
def t(input: Sharded, *_: object) -> Sharded:
    """The last two dims exchanged; each cut goes with its dim."""
    return _transposed(input, 2)


@register(_property_getter("mT"), family="views")
def matrix_transpose(input: Sharded, *_: object) -> Sharded:
    """The last two dims exchanged; each cut goes with its dim."""
    return _transposed(input, sys.maxsize)


@register(_property_getter("H"), family="views")
def conjugate_transpose(input: Sharded, *_: object) -> Sharded:
    """The last two dims exchanged; each cut goes with its dim."""
    return _conjugate(_transposed(input, 2))


@register(torch.adjoint, torch.Tensor.adjoint, _property_getter("mH"), family="views")
def adjoint(input: Sharded, *_: object) -> Sharded:
    """The last two dims exchanged; each cut goes with its dim."""
    return _conjugate(_transposed(input, sys.maxsize))


def _conjugate(x: Sharded) -> Sharded:
    return x.like(x.local.conj()) if x.is_complex() else x
