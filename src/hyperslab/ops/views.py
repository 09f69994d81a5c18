"""Distributes views and copies of elements: reshape, permute, slice, concatenate, repeat.

In reading order: reshapes, where cut dims that stay as they are stay cut and others are
gathered; permutations, where every cut goes with its dim and nothing travels; slices along any
dim (narrow, select, split, chunk and their kin) and windows; concatenation and repetition,
block by block along a dim that is whole, by boxes along a cut one.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsInt

import torch

from hyperslab.comm import ExchangePlan, Grid, fetch, per_grid, plan_exchange
from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.geometry import Cover, Cut, Interval, Partition, Window
from hyperslab.kernels.memory_format import CHANNELS_LAST, memory_format_of
from hyperslab.kernels.registry import device_kind
from hyperslab.ops.operands import (
    LAYOUTS,
    check_uncut,
    check_writable,
    differ_beside,
    other_extents,
    without_empty_shards,
)
from hyperslab.ops.overloads import Integers, Operator, integers, register_each
from hyperslab.ops.placement import reads_nearly_all, with_whole
from hyperslab.ops.slabs import join_channels
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe, read_dim, read_dims
from hyperslab.util.torch_internals import BlockFunction, EnableTorchFunction, meshgrid_of_list


@dataclass(frozen=True, slots=True)
class DimGroup:
    """Pairs adjacent dims ``source`` with the adjacent dims ``target`` that they become."""

    source: range
    target: range


@dataclass(frozen=True, slots=True)
class _Reshape:
    """Holds how the tensor is cut before its block is reshaped, and how the result is then.

    ``last``: how the result is cut at the end. ``carried``: a cut dim has changed. ``single``: some
    shard of that is one element, of which torch takes any stride; or dims merge of a tensor with
    such a shard, between which the cut dim may lie in the memory of the whole.
    """

    first: Partition
    partition: Partition
    last: Partition
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

    Distribution scheme: 1. gather spatial dims that merge with others along their axes (leaving
    space). The first one of several stays cut: its shards are those of the merged dim, which stays
    cut until a rule asks for all of it. If another one is cut instead, the first one takes over the
    cut, in one exchange. A dim that is split stays cut in the same way, between those of its parts
    that lie next to a bound. A batch that comes first stays cut for every rule. 2. reshape the
    block. 3. share a list of windows evenly, if they were not, in one exchange; the dims that it
    is split into again are cut as they were before.
    """
    plan = _lay_out_reshape(x.partition, tuple(shape))
    whole = x.redistribute(plan.first, "the cut before a reshape")
    block = whole.native_local.reshape(x.block_shape(plan.partition))
    # A view on some ranks, a copy on others, as `contiguous`.
    unclear = plan.single or (plan.carried and whole.is_crop)
    y = last = whole.like(block.clone() if unclear else block, plan.partition, consumed=True)
    if plan.last is not plan.partition:
        last = y.redistribute(plan.last, "the cut of windows")
    if whole is not x or unclear or last is not y:
        last.mark_as_copy(x)
    return last


@functools.lru_cache(LAYOUTS)
def _lay_out_reshape(old: Partition, shape: tuple[int, ...]) -> _Reshape:
    """Lays out a reshape to a global shape, which may have a -1."""
    new = resolve_shape(shape, math.prod(old.shape), old.shape)
    groups = dim_groups(old.shape, new)
    given = old
    for group in groups:
        old = _cut_between_parts(group, _cut_in_front(group, old, new), new)
    cuts: list[Cut | None] = [None] * len(new)
    gathered: list[str] = []
    shards: list[Interval] = []
    for group in groups:
        carried = _carried(group, old, new)
        axes = [cut.axis for dim in group.source if (cut := old.cuts[dim]) is not None]
        if carried is not None:
            dim, cut = carried
            cuts[dim] = cut
            axes.remove(cut.axis)
            if not _kept_cut(group, old.shape, new):
                shards += [i for d in group.source if (own := old.cuts[d]) for i in own.intervals]
        gathered += axes
    if "data" in gathered:
        raise LayoutError(
            f"cannot reshape {old} to {new}: the batch dim is cut and would merge with others "
            "before it, or be divided across a cut\n    have it in front of those that it merges "
            "with, or use hyperslab.gather(x, 'data') before"
        )
    single = any(hi - lo < 2 for lo, hi in shards)
    if any(sum(old.shape[dim] != 1 for dim in group.source) > 1 for group in groups):
        thin = (d or c.axis != "data" for d, c in enumerate(old.cuts) if c is not None and c.single)
        single = single or any(thin)
    partition = Partition(new, tuple(cuts))
    last = partition
    for group in groups:
        last = _shared_evenly(group, given, last)
        last = _cut_as_before(group, given, last)
    first = old.without(gathered) if gathered else old
    return _Reshape(first, partition, last, bool(shards), single)


def _shared_evenly(group: DimGroup, given: Partition, new: Partition) -> Partition:
    """Shares a list of windows evenly, and notes which of its dims was cut before, and where.

    Of five windows along a dim one of two ranks has two and the other three: if they are a hundred
    and twenty-five, one of them would wait for a fifth of its time in an attention within windows.
    """
    source = [dim for dim in group.source if given.shape[dim] != 1]
    was = next(((i, c) for i, d in enumerate(source) if (c := given.cuts[d]) is not None), None)
    cut = new.cuts[group.target[0]] if len(group.target) == 1 else None
    if was is None or cut is None or len(cut.merged) < 2 or cut.axis != was[1].axis:
        return new
    if len(source) == 1:
        return new  # a list already
    at, before = was
    bounds = cut.bounds
    if before.merged and 8 * cut.parts * cut.largest > 9 * cut.extent:
        bounds = Cut.balanced(cut.axis, cut.extent, cut.parts).bounds
    if bounds == cut.bounds and (at == 0 or source[0] >= 2):
        return new
    cut = replace(cut, bounds=bounds, before=(at, before.bounds))
    return new.with_dim(group.target[0], cut.extent, cut)


def _cut_as_before(group: DimGroup, given: Partition, new: Partition) -> Partition:
    """Cuts the dims of a list that is split into them again as they were before the list."""
    source = [dim for dim in group.source if given.shape[dim] != 1]
    target = [dim for dim in group.target if new.shape[dim] != 1]
    cut = given.cuts[source[0]] if len(source) == 1 else None
    if cut is None or cut.before is None or cut.merged != tuple(new.shape[d] for d in target):
        return new
    at, bounds = cut.before
    if new.cuts[target[0]] is None:  # between its bounds there were no whole parts
        return new
    freed = new.with_dim(target[0], new.shape[target[0]], None)
    return freed.with_dim(target[at], new.shape[target[at]], Cut(cut.axis, bounds))


def _cut_in_front(group: DimGroup, old: Partition, new: tuple[int, ...]) -> Partition:
    """Moves a cut to the first of dims that merge into one, as far as it has none.

    A volume that is cut along its width becomes tokens that stay cut; slices and windows of a
    mini-batch become a list that its samples are cut in, where there are enough of them.
    """
    source = [dim for dim in group.source if old.shape[dim] != 1]
    if not source or len(group.target) != 1 or old.cuts[source[0]] is not None:
        return old
    if source[0] < 2 and (group.target[0] or len(new) < 3):
        return old  # they become channels, or features
    extent = old.shape[source[0]]
    cut, dim = next(((c, d) for d in source if (c := old.cuts[d]) is not None), (None, 0))
    if cut is None or cut.axis == "data" or cut.parts > extent:
        return old
    moved = old.with_dim(dim, old.shape[dim], None)
    return moved.with_dim(source[0], extent, Cut.balanced(cut.axis, extent, cut.parts))


def _cut_between_parts(group: DimGroup, old: Partition, new: tuple[int, ...]) -> Partition:
    """Moves the bounds of a dim that is split, into windows say, to the nearest whole parts."""
    source = [dim for dim in group.source if old.shape[dim] != 1]
    target = [new[dim] for dim in group.target if new[dim] != 1]
    cut = old.cuts[source[0]] if len(source) == 1 else None
    if cut is None or cut.axis == "data" or len(target) < 2:
        return old
    part = math.prod(target[1:])
    bounds = tuple((bound + part // 2) // part * part for bound in cut.bounds[:-1])
    if cut.before is not None and cut.merged == tuple(target) and cut.before[0] == 0:
        bounds = tuple(bound * part for bound in cut.before[1][:-1])
    moved = Cut(cut.axis, (*bounds, cut.extent), cut.merged)
    return old if moved.thin else old.with_dim(source[0], cut.extent, moved)


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
    if len(source) == 1:  # a rule that wants all of it gets that, as of merged dims
        return target[0], Cut(cut.axis, bounds, (new[target[0]],))
    return None


def _kept_cut(group: DimGroup, old: Sequence[int], new: Sequence[int]) -> bool:
    return (
        len(group.source) == 1 == len(group.target) and old[group.source[0]] == new[group.target[0]]
    )


@register(torch.reshape, torch.Tensor.reshape, torch.Tensor.view, merged=True)
def reshape(
    input: Sharded, *shape: Integers | torch.dtype, **named: Integers | torch.dtype
) -> Sharded:
    """Takes the global shape; of cut dims that merge the first may stay cut, such as the batch."""
    given = (*shape, *named.values())
    if any(isinstance(value, torch.dtype) for value in given):
        raise LayoutError("view(dtype) of a cut tensor has no rule; use x.to(dtype)")
    return reshape_to(input, integers(*given))  # type: ignore[arg-type]


@register(torch.Tensor.view_as, torch.Tensor.reshape_as, merged=True)
def reshape_as(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Takes the global shape of the other tensor."""
    if not isinstance(input, Sharded):
        return input.reshape(other.shape)
    return reshape_to(input, tuple(other.shape))


@register_each("flatten", dims=["start_dim", "end_dim"], merged=True)
def flatten(_: Operator, input: Sharded, start_dim: int = 0, end_dim: int = -1) -> Sharded:
    """Gathers along the cut dims that merge; the batch dim stays cut."""
    shape = input.partition.shape
    end = end_dim + 1
    return reshape_to(input, (*shape[:start_dim], math.prod(shape[start_dim:end]), *shape[end:]))


@register(torch.ravel, torch.Tensor.ravel)
def ravel(input: Sharded) -> Sharded:
    """Gathers as flatten."""
    return reshape_to(input, (input.numel(),))


@register(torch.unflatten, torch.Tensor.unflatten, dims=["dim"], merged=True)
def unflatten(input: Sharded, dim: int, sizes: Sequence[int]) -> Sharded:
    """Splits a dim that is not cut."""
    shape = input.partition.shape
    extents = resolve_shape(integers(*sizes), shape[dim], (shape[dim],))
    return reshape_to(input, (*shape[:dim], *extents, *shape[dim + 1 :]))


@register(torch.unsqueeze, torch.Tensor.unsqueeze, merged=True)
def unsqueeze(input: Sharded, dim: int) -> Sharded:
    """Adds a dim anywhere; each cut goes with its dim."""
    d = read_dim(dim, input.dim() + 1, "unsqueeze")
    longer = with_new_dims(input.partition, (d,))
    return input.like(input.native_local.unsqueeze(d), longer, consumed=True)


@functools.lru_cache(LAYOUTS)
def with_new_dims(partition: Partition, dims: tuple[int, ...]) -> Partition:
    """Adds dims of extent 1; each of ``dims`` is counted as if those after it were not added."""
    shape, cuts = list(partition.shape), list(partition.cuts)
    for dim in reversed(dims):
        shape.insert(dim, 1)
        cuts.insert(dim, None)
    return Partition(tuple(shape), tuple(cuts))


@register(torch.squeeze, torch.Tensor.squeeze, dims=["dim"], merged=True)
def squeeze(input: Sharded, dim: Integers | None = None) -> Sharded:
    """Drops dims of global extent 1; each cut goes with its dim."""
    shape = input.partition.shape
    dims = range(len(shape)) if dim is None else integers(dim)
    drop = tuple([d for d in dims if shape[d] == 1])
    held = without_empty_shards(input, drop)  # one sample that one rank has
    fewer = without_dims(held.partition, drop)
    # Where there is none to drop, torch makes a view, too.
    y = held.like(held.native_local.squeeze(drop), fewer, consumed=True)
    if held is not input:
        y.mark_as_copy(input)
    return y


@functools.lru_cache(LAYOUTS)
def without_dims(partition: Partition, dims: tuple[int, ...]) -> Partition:
    keep = [d for d in range(partition.ndim) if d not in dims]
    shape, cuts = partition.shape, partition.cuts
    return Partition(tuple(shape[d] for d in keep), tuple(cuts[d] for d in keep))


def permuted(x: Sharded, dims: Sequence[int]) -> Sharded:
    """Permutes the dims: dim ``i`` of the view is dim ``dims[i]`` of ``x``."""
    order, partition = _lay_out_permutation(x.partition, tuple(dims))
    return x.like(x.native_local.permute(order), partition, consumed=True)


@functools.lru_cache(LAYOUTS)
def _lay_out_permutation(
    partition: Partition, dims: tuple[int, ...]
) -> tuple[tuple[int, ...], Partition]:
    """Counts an order of the dims from the front, and takes every cut with its dim."""
    n = partition.ndim
    order = tuple(d % n if -n <= d < n else n for d in dims)
    if sorted(order) != list(range(n)):
        raise LayoutError(f"permute: {dims} is not an order of the dims of {partition}")
    shape, cuts = partition.shape, partition.cuts
    return order, Partition(tuple(shape[d] for d in order), tuple(cuts[d] for d in order))


def exchanged(x: Sharded, a: int, b: int) -> Sharded:
    # As of narrow.
    return permuted(x, _order_of_exchange(x.dim(), operator.index(a), operator.index(b)))


@functools.lru_cache(LAYOUTS)
def _order_of_exchange(ndim: int, a: int, b: int) -> tuple[int, ...]:
    order = list(range(ndim))
    a, b = read_dims((a, b), ndim, "transpose")
    order[a], order[b] = order[b], order[a]
    return tuple(order)


@register(torch.permute, torch.Tensor.permute, merged=True)
def permute(input: Sharded, *dims: Integers, **named: Integers) -> Sharded:
    """Takes any order of the dims; each cut goes with its dim."""
    return permuted(input, integers(*dims, *named.values()))


@register(torch.channel_shuffle, torch.native_channel_shuffle)
def channel_shuffle(input: Sharded, groups: int) -> Sharded:
    """Runs block by block; the channels are not cut."""
    if input.dim() < 3 or input.shape[1] % groups or input.partition.cuts[1] is not None:
        raise LayoutError(
            f"channel_shuffle in {groups} groups: {input.partition} has to have channels in dim 1 "
            "that are not cut\n    and whose number is a multiple of the groups"
        )
    return input.like(torch.channel_shuffle(input.local, groups))


@register(torch.diagonal, torch.Tensor.diagonal, dims=["dim1", "dim2"])
def diagonal(input: Sharded, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Sharded:
    """Takes the diagonal of two dims that are not cut, as a view."""
    check_uncut(input, (dim1, dim2), "diagonal of")
    block = input.local.diagonal(offset, dim1, dim2)
    rest = [d for d in range(input.dim()) if d not in (dim1, dim2)]
    shape = (*(input.shape[d] for d in rest), block.shape[-1])
    return input.like(block, Partition(shape, (*(input.partition.cuts[d] for d in rest), None)))


@register(torch.diag_embed, torch.Tensor.diag_embed)
def diag_embed(input: Sharded, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Sharded:
    """Makes the last dim, whole if it is cut, diagonals of two new dims; other cuts stay."""
    input = with_whole(input, (input.dim() - 1,), "diag_embed")
    block = torch.diag_embed(input.block, offset, dim1, dim2)
    new = read_dims((dim1, dim2), block.dim(), "diag_embed")
    partition = input.partition.without_dim(input.dim() - 1)
    rest = iter(zip(partition.shape, partition.cuts, strict=True))
    dims = [(extent, None) if d in new else next(rest) for d, extent in enumerate(block.shape)]
    shape, cuts = zip(*dims, strict=True)
    return input.like(block, Partition(shape, cuts), fresh=True)


@register(torch.diag, torch.Tensor.diag)
def diag(input: Sharded, diagonal: int = 0) -> Sharded:
    """Copies the diagonal of a matrix that is not cut, or makes a matrix of one."""
    if input.dim() == 1:
        return diag_embed(input, diagonal)
    if input.dim() != 2:
        raise LayoutError(f"diag takes one dim or two: {input.partition}\n    use torch.diagonal")
    check_uncut(input, (0, 1), "diagonal of")
    block = input.block.diag(diagonal)
    return input.like(block, Partition(block.shape, (None,)), fresh=True)


@register_each("tril", "triu")
def triangle(operator: Operator, input: Sharded, diagonal: int = 0) -> Sharded:
    """Runs block by block, at the place that the diagonal has in the block."""
    rows, columns = input.box.lo[-2:] if input.dim() > 1 else (0, 0)
    return input.like(operator(input.block, diagonal + rows - columns), fresh=True)


@register_each("atleast_1d", "atleast_2d", "atleast_3d")
def at_least(operator: Operator, *tensors: torch.Tensor) -> Any:
    """Adds dims of extent 1, where torch does, to tensors that have fewer."""
    if len(tensors) > 1:
        return tuple(at_least(operator, x) for x in tensors)
    (x,) = tensors
    if not isinstance(x, Sharded):
        return operator(x)
    return reshape_to(x, operator(torch.empty(x.shape, device="meta")).shape)


@register_each("transpose", "swapaxes", "swapdims", merged=True)
def transpose(_: Operator, input: Sharded, *dims: int, **named: int) -> Sharded:
    """Exchanges two dims; each cut goes with its dim."""
    a, b = (*dims, *named.values())
    return exchanged(input, a, b)


@register_each("movedim", "moveaxis", dims=["source", "destination"], merged=True)
def movedim(_: Operator, input: Sharded, source: Integers, destination: Integers) -> Sharded:
    """Moves some dims; each cut goes with its dim."""
    given, wanted = integers(source), integers(destination)
    origin = dict(zip(wanted, given, strict=True))
    if len(origin) != len(given) or len(set(origin.values())) != len(given):
        raise LayoutError(f"movedim: repeated dims among {given} or {wanted}")
    n = input.dim()
    others = iter([d for d in range(n) if d not in origin.values()])
    return permuted(input, [origin[to] if to in origin else next(others) for to in range(n)])


_T, _MT, _H, _MH = (getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH"))


@register_each(
    (torch.t, torch.Tensor.t, _T), _MT, _H, (torch.adjoint, torch.Tensor.adjoint, _MH), merged=True
)
def transpose_last(operator: Operator, input: Sharded, *_: object) -> Sharded:
    """Exchanges the last two dims; each cut goes with its dim."""
    matrix = operator in (torch.t, _H)
    if input.dim() < 2 or (matrix and input.dim() > 2):
        raise UnsupportedOp(
            f"a transpose without dims, of {input.partition}\n    use x.transpose(a, b)"
        )
    y = exchanged(input, -2, -1)
    conjugate = operator in (torch.adjoint, _H) and y.is_complex()
    return y.like(y.local.conj()) if conjugate else y


@register_each(
    *("unsqueeze_", "squeeze_", "transpose_", "swapaxes_", "swapdims_", "t_"), merged=True
)
def view_in_place(operator: Operator, input: Sharded, *args: Any, **options: Any) -> Sharded:
    """Makes the tensor itself the view that the operator without _ returns."""
    if input.requires_grad and input.is_leaf and torch.is_grad_enabled():
        raise RuntimeError(
            f"{operator.__name__}: a leaf that requires grad is used in an in-place operation"
        )
    if input.requires_grad and not torch.is_grad_enabled():
        raise LayoutError(
            f"{operator.__name__} without a graph, of a tensor that has one: its gradient would "
            f"have other dims than it\n{describe([input])}    use {operator.__name__[:-1]}"
        )
    with EnableTorchFunction():  # or torch would ask for no rule inside of one
        view = getattr(input, operator.__name__[:-1])(*args, **options)
    if not input.is_copy:
        check_writable(view, operator.__name__)
    input.forget_places()
    return input.become(view)


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

    Distribution scheme: 1. leave chosen elements on the ranks that own them, so that the result is
    a view; 2. if a rank would have none, cut that dim in balanced shards, or not at all if there
    are fewer elements than ranks, and every rank fetches its own.
    """
    return take_part(x, lay_out_part(x.grid, x.partition, tuple(spans.items())))


Spans = tuple[tuple[int, Span], ...]
"""Types what is taken of some dims; of the others it is all."""


@dataclass(frozen=True, slots=True)
class Part:
    """Holds how a rank takes its elements of a part of a tensor.

    ``index``: in its block, or in what an exchange brings. ``partition``: of the result.
    ``exchange``: None where all elements stay on their ranks. ``leaves``: whether elements of a cut
    dim are left away.
    """

    index: tuple[slice | int | None, ...]
    partition: Partition
    exchange: ExchangePlan | None
    leaves: bool


def take_part(x: Sharded, part: Part) -> Sharded:
    """Takes a part, as a view where its elements stay on their ranks."""
    if part.exchange is None:
        y = x.like(x.native_local[part.index], part.partition, consumed=True)
        if part.leaves:
            y.mark_as_crop()
        return y
    block = fetch(x.local, part.exchange, what="a crop")
    y = x.like(block[part.index], part.partition, consumed=True)
    y.mark_as_copy(x)
    return y


@per_grid
def lay_out_part(
    grid: Grid,
    partition: Partition,
    spans: Spans,
    single: tuple[int, ...] = (),
    new: tuple[int, ...] = (),
) -> Part:
    """Lays out what this rank takes.

    ``single``: dims of one element that are dropped; ``new``: as `with_new_dims`, before that.
    """
    given = dict(spans)
    chosen = tuple(given.get(d, Span(0, extent)) for d, extent in enumerate(partition.shape))
    stay, target, cover = _lay_out_slices(partition, chosen)
    origin = (partition if stay else cover).box(grid.coords)
    box = target.box(grid.coords)
    slices = [s.slice(box.interval(d), origin.lo[d]) for d, s in enumerate(chosen)]
    index = [own.start if d in single else own for d, own in enumerate(slices)]
    for dim in reversed(new):
        index.insert(dim, None)
    dropped = tuple(dim + sum(at <= dim for at in new) for dim in single)
    leaves = any(
        cut and span.count != cut.extent for cut, span in zip(partition.cuts, chosen, strict=True)
    )
    return Part(
        tuple(index),
        without_dims(with_new_dims(target, new), dropped),
        None if stay else plan_exchange(partition, cover, grid),
        leaves,
    )


@functools.lru_cache(LAYOUTS)
def _lay_out_slices(
    partition: Partition, chosen: tuple[Span, ...]
) -> tuple[bool, Partition, Cover]:
    """Returns if all elements stay where they are, the result's partition, and what it reads."""
    cuts = []
    stay = True
    for extent, cut, span in zip(partition.shape, partition.cuts, chosen, strict=True):
        new = cut if span == Span(0, extent) else cut and span.follow(cut)
        if new is not None and new.thin:
            stay = False
            new = Cut.balanced(new.axis, span.count, new.parts)
        if new is not None and cut is not None and cut.merged and new is not cut:
            new = replace(new, merged=(span.count,))
        cuts.append(None if new is None or new.thin else new)
    target = Partition(tuple(s.count for s in chosen), tuple(cuts))
    reads = [
        tuple(span.reads(out) for out in outs)
        for span, outs in zip(chosen, target.cover.intervals, strict=True)
    ]
    return stay, target, Cover(target.cover.axes, tuple(reads))


def partition_of_crop(partition: Partition, spans: Mapping[int, Span]) -> Partition:
    chosen = tuple(spans.get(d, Span(0, extent)) for d, extent in enumerate(partition.shape))
    return _lay_out_slices(partition, chosen)[1]


@register(torch.narrow, torch.Tensor.narrow, dims=["dim"], merged=True)
def narrow(input: Sharded, dim: int, start: SupportsInt, length: int) -> Sharded:
    """Takes any dim; elements stay on their ranks unless that leaves a rank without any."""
    first = int(start)
    length = operator.index(length)  # a tensor may be another number at the next call
    extent = input.shape[dim]
    if not (-extent <= first <= extent and 0 <= length <= extent - first % (extent + 1)):
        raise IndexError(f"narrow: {length} elements from {first} of dim {dim}, {input.partition}")
    return crop(input, {dim: Span(first + extent * (first < 0), length)})


@register(torch.select, torch.Tensor.select, dims=["dim"], merged=True)
def select(input: Sharded, dim: int, index: SupportsInt) -> Sharded:
    """Takes any dim, the batch too; along a cut dim every rank fetches the slice."""
    position = int(index)
    extent = input.shape[dim]
    if not -extent <= position < extent:
        raise IndexError(f"index {position} is out of bounds for dim {dim} with size {extent}")
    spans = ((dim, Span(position % extent, 1)),)
    return take_part(input, lay_out_part(input.grid, input.partition, spans, (dim,)))


@register(torch.unbind, torch.Tensor.unbind, dims=["dim"], merged=True)
def unbind(input: Sharded, dim: int = 0) -> tuple[Sharded, ...]:
    """Returns every slice of a dim, as select."""
    parts = _lay_out_slices_of(input.grid, input.partition, operator.index(dim))
    return tuple([take_part(input, part) for part in parts])


@per_grid
def _lay_out_slices_of(grid: Grid, partition: Partition, dim: int) -> tuple[Part, ...]:
    spans = [((dim, Span(at, 1)),) for at in range(partition.shape[dim])]
    return tuple(lay_out_part(grid, partition, span, (dim,)) for span in spans)


DIM_OF_SPLIT = {"vsplit": 0, "hsplit": 1, "dsplit": 2}


@register_each(
    dict.fromkeys(
        ("split", "split_with_sizes", "chunk", "tensor_split"),
        "Splits any dim; each part is as of narrow.",
    ),
    dict.fromkeys(DIM_OF_SPLIT, "Splits as tensor_split along its dim."),
    dims=["dim"],
    merged=True,
)
def split(
    operator: Operator, input: torch.Tensor, how: Any = None, dim: int = 0, **named: Any
) -> tuple[torch.Tensor, ...]:
    """Splits where torch does, by sizes, by positions or into so many parts: ``how`` or by name."""
    if named:
        (how,) = named.values()
    if isinstance(how, torch.Tensor):
        how = (how.full() if isinstance(how, Sharded) else how).tolist()
    if not isinstance(how, int) and isinstance(how, Sequence):
        # As of narrow.
        how = tuple([n.item() if isinstance(n, torch.Tensor) else n for n in how])
    name = operator.__name__
    if not isinstance(input, Sharded):  # positions were a cut tensor
        return operator(input, how, dim)
    arguments: tuple[Any, ...] = (how, dim)
    if name in DIM_OF_SPLIT:
        dim = min(DIM_OF_SPLIT[name], max(0, input.dim() - 1))  # hsplit of a row
        arguments = (how,)
    parts = _lay_out_split(input.grid, operator, input.partition, dim, *arguments)
    return tuple([take_part(input, part) for part in parts])


@per_grid
def _lay_out_split(
    grid: Grid, operator: Operator, partition: Partition, dim: int, *arguments: Any
) -> tuple[Part, ...]:
    """Asks torch for the parts of a tensor of the global shape."""
    whole = torch.empty(partition.shape, device="meta")
    try:
        parts = operator(whole, *arguments)
    except (RuntimeError, TypeError) as error:
        raise LayoutError(f"{operator.__name__} of {partition}: {error}") from error
    step = whole.stride(dim)
    spans = [Span(part.storage_offset() // step, part.shape[dim]) for part in parts]
    return tuple(lay_out_part(grid, partition, ((dim, span),)) for span in spans)


@register(torch.Tensor.unfold, dims=["dimension"])
def unfold(self: Sharded, dimension: int, size: int, step: int) -> Sharded:
    """Takes any dim; windows that lie within their rank's block are views of it.

    Distribution scheme: 1. place every window on the rank that owns its centre; if a rank would
    have none, cut that dim in balanced shards, or not at all if there are fewer windows than ranks,
    2. every rank fetches the inputs of its windows, 3. and returns views of them.
    """
    dim = dimension  # as torch calls it
    size, step = operator.index(size), operator.index(step)  # as of narrow
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


@functools.lru_cache(LAYOUTS)
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


Section = tuple[torch.Tensor, Interval]
"""Names a part of a source along the joined dim; ordinary sources are global."""


def join(
    sections: Sequence[Section], dim: int, target: Partition, like: Sharded, what: str
) -> Sharded:
    """Concatenate sections along ``dim``, into a tensor that is cut as ``target``.

    Distribution scheme: 1. fetch the part of every section that lies in this rank's box of the
    target (nothing travels if the section is cut like the target), 2. concatenate the parts.
    """
    sources, intervals = zip(*sections, strict=True)
    held = tuple(s.partition if isinstance(s, Sharded) else None for s in sources)
    ways = _lay_out_join(like.grid, held, intervals, dim, target)
    return like.like(_joined(sources, ways, dim, what), target, fresh=True)


def _joined(
    sources: Sequence[torch.Tensor], ways: Sequence[Any], dim: int, what: str
) -> torch.Tensor:
    """Concatenates this rank's part of each source; see `_lay_out_join`."""
    graph = torch.is_grad_enabled()
    parts = []
    for source, way in zip(sources, ways, strict=True):
        if not isinstance(source, Sharded):
            parts.append(source[way])
        elif way is None:
            parts.append(source.block if graph else source.native)
        else:
            parts.append(fetch(source.block, way, what=what))
    return _cat(parts, dim) if graph else torch.cat(parts, dim)


@per_grid
def _lay_out_join(
    grid: Grid,
    held: tuple[Partition | None, ...],
    intervals: tuple[Interval, ...],
    dim: int,
    target: Partition,
) -> list[Any]:
    """Plans the exchange of each section, None where a rank has it; slices of an ordinary one."""
    ways: list[Any] = []
    offset = 0
    for partition, interval in zip(held, intervals, strict=True):
        cover = _wanted_boxes(target, dim, offset, interval)
        offset += interval[1] - interval[0]
        if partition is None:
            ways.append(cover.box(grid.coords).slices())
        else:
            plan = plan_exchange(partition, cover, grid)
            ways.append(None if plan.in_place and plan.own == plan.wanted else plan)
    return ways


def _cat(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    if dim == 1 and any(part.requires_grad for part in parts):
        alike = len({part.dtype for part in parts}) == 1
        if alike and all(memory_format_of(p) is not torch.contiguous_format for p in parts):
            return _JoinedChannels.apply(*parts)
    return torch.cat(parts, dim)


class _JoinedChannels(BlockFunction):
    """Concatenates channels, which are last in memory.

    Torch hands views of the gradient on. On the CPU adding another one to such a view takes seven
    times as long as to a tensor of its own, and a convolution copies it anyway (2.13, bfloat16). On
    a GPU the sum reads a view as fast, and a copy of each would be all of the traffic.
    """

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> torch.Tensor:
        ctx.extents = [part.shape[1] for part in parts]
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pieces = zip(gradient.split(ctx.extents, 1), ctx.needs_input_grad, strict=True)
        if device_kind(gradient) == "cuda":
            return tuple(piece if wanted else None for piece, wanted in pieces)
        order = CHANNELS_LAST[gradient.dim()]
        return tuple(p.contiguous(memory_format=order) if wanted else None for p, wanted in pieces)


def _wanted_boxes(target: Partition, dim: int, offset: int, interval: Interval) -> Cover:
    """Finds each rank's wanted box of a source whose section begins at ``offset`` of the target."""
    lo, hi = interval
    shift = lo - offset
    cover = target.cover
    spans = [(max(a + shift, lo), min(b + shift, hi)) for a, b in cover.intervals[dim]]
    intervals = list(cover.intervals)
    intervals[dim] = tuple((min(a, hi), max(min(a, hi), b)) for a, b in spans)
    return Cover(cover.axes, tuple(intervals))


@dataclass(frozen=True, slots=True)
class _Joining:
    """Holds which tensors are joined, along which dim, on which ways, and how the result is cut."""

    kept: tuple[int, ...]
    dim: int
    ways: list[Any]
    partition: Partition


@per_grid
def _lay_out_cat(
    grid: Grid, held: tuple[Partition | torch.Size, ...], dim: int, name: str
) -> _Joining | None:
    """Cuts what is joined of cut tensors and ordinary ones, and plans the exchange of each.

    None where other dims differ.
    """
    whole = [each if isinstance(each, Partition) else Partition.whole(each) for each in held]
    ndim = max(each.ndim for each in whole)
    dim = read_dim(dim, ndim, name)
    # Torch skips one-dimensional empty tensors, with which old code begins its lists.
    kept = tuple(i for i, each in enumerate(whole) if ndim == 1 or each.shape != (0,))
    joined = [whole[i] for i in kept]
    if len({(each.ndim, other_extents(each.shape, dim)) for each in joined}) > 1:
        return None
    cut = tuple(each for i in kept if isinstance(each := held[i], Partition))
    target = cut_of_joined(grid, cut or (joined[0],), joined, dim)
    sections = tuple((0, each.shape[dim]) for each in joined)
    ways = [each if isinstance(each := held[i], Partition) else None for i in kept]
    return _Joining(kept, dim, _lay_out_join(grid, tuple(ways), sections, dim, target), target)


def cut_of_joined(
    grid: Grid, cut: tuple[Partition, ...], held: Sequence[Partition], dim: int
) -> Partition:
    """Cuts the joined tensor like that operand for which the fewest elements travel.

    Along ``dim``, where that operand is cut there, in balanced shards. But where one of them is
    whole in dims that are thin, the joined tensor is, too: see `_gathered_once`.

    Args:
        cut: how the cut operands are.
        held: how all are, ordinary ones too.
        dim: along which they are joined.
    """
    extent = sum(partition.shape[dim] for partition in held)
    candidates = dict.fromkeys(
        each.with_dim(dim, extent, (own := each.cuts[dim]) and own.rebalanced(extent))
        for each in cut
    )
    for target in candidates:
        others = [other for other in candidates if other != target]
        if all(_gathered_once(target, other, dim) for other in others):
            return target
    return min(candidates, key=lambda target: _moved_elements(held, dim, target, grid))


_NEXT_WINDOW = Window(3, 1, 1, 1, 1)
"""Stands for the convolution that follows."""


def _gathered_once(whole: Partition, cut: Partition, dim: int) -> bool:
    """Returns if ``whole`` is ``cut`` but for spatial dims that the next convolution would gather.

    One operand has been gathered there for such a convolution. In a densely connected network every
    layer would gather once more what joining has cut again, and sum its norms over the ranks.
    """
    for at, (a, b) in enumerate(zip(whole.cuts, cut.cuts, strict=True)):
        if a == b:
            continue
        thin = b is not None and reads_nearly_all(_NEXT_WINDOW, b, cut.shape[at])
        if a is not None or not thin or at < 2 or at == dim:
            return False
    return True


def _moved_elements(held: Sequence[Partition], dim: int, target: Partition, grid: Grid) -> int:
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
    like = next(t for t in tensors if isinstance(t, Sharded))
    held = tuple([t.partition if isinstance(t, Sharded) else t.shape for t in tensors])
    plan = _lay_out_cat(like.grid, held, operator.index(dim), name)
    if plan is None:
        dim = read_dim(dim, max(t.dim() for t in tensors), name)
        raise differ_beside(tensors, dim, name, "crop, pad or interpolate")
    kept = [tensors[i] for i in plan.kept]
    joined = like.like(_joined(kept, plan.ways, plan.dim, name), plan.partition, fresh=True)
    if len(kept) == len(tensors):
        return joined
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    return like.like(joined.block.to(dtype), plan.partition)


@register(torch.cat, torch.concat, torch.concatenate, lazy=True)
def cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Sharded:
    """Joins any dim, cut or not; operands that are cut otherwise are aligned the cheapest way."""
    joined = join_channels(tensors, dim, functools.partial(_cat, dim=1))
    if joined is not None:
        return joined
    for tensor in tensors:
        if isinstance(tensor, Sharded) and (tensor.pending is not None or tensor.readers):
            tensor.force()
    return concatenate(tensors, dim, "cat")


@register(torch.stack)
def stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> Sharded:
    """Adds a dim anywhere that is not cut; operands are aligned as by cat."""
    like = next(t for t in tensors if isinstance(t, Sharded))
    new = read_dim(dim, like.dim() + 1, "stack")
    held = like.partition
    blocks = [t.native_local for t in tensors if isinstance(t, Sharded) and t.partition is held]
    if len(blocks) == len(tensors):  # nearly always they are cut alike
        joined = _lay_out_stack(held, new, len(tensors))
        return like.like(torch.stack(blocks, new), joined, fresh=True)
    longer = [unsqueeze(t, new) if isinstance(t, Sharded) else t.unsqueeze(new) for t in tensors]
    return concatenate(longer, new, "stack")


@functools.lru_cache(LAYOUTS)
def _lay_out_stack(partition: Partition, dim: int, count: int) -> Partition:
    return with_new_dims(partition, (dim,)).with_dim(dim, count, None)


DIM_OF_STACK = {"vstack": 0, "row_stack": 0, "hstack": 1, "dstack": 2}


@register_each(*DIM_OF_STACK)
def stack_along(operator: Operator, tensors: Sequence[torch.Tensor]) -> Sharded:
    """Joins as cat along its dim, if the tensors have that dim already."""
    name = operator.__name__
    dim = DIM_OF_STACK[name]
    least = max(2, dim + 1)  # torch gives a dim more to tensors that have fewer
    if any(t.dim() < least for t in tensors):
        raise LayoutError(f"{name} of tensors with fewer than {least} dims; use stack")
    return concatenate(tensors, dim, name)


def expanded(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Expands dims of extent 1 to a global shape, as a view; -1 keeps a dim."""
    if not isinstance(x, Sharded):
        return x.expand(shape)
    partition = _lay_out_expansion(x.partition, tuple(shape))
    block = x.native_local.expand(x.block_shape(partition))
    return x.like(block, partition, consumed=True)


@functools.lru_cache(LAYOUTS)
def _lay_out_expansion(partition: Partition, shape: tuple[int, ...]) -> Partition:
    """Returns the partition of an expanded tensor."""
    front = len(shape) - partition.ndim
    own = (*[1] * front, *partition.shape)
    found = [b if a == -1 else a for a, b in zip(shape, own, strict=front >= 0)]
    fits = all(b in (1, a) for a, b in zip(found, own, strict=front >= 0))
    if front < 0 or -1 in shape[:front] or not fits:
        raise LayoutError(
            f"expand: {partition} cannot be expanded to {shape}\n"
            "    shapes of a cut tensor are global"
        )
    cuts = (*[None] * front, *partition.cuts)
    kept = tuple(cut if a == b else None for a, b, cut in zip(found, own, cuts, strict=True))
    return Partition(tuple(found), kept)


@functools.lru_cache(LAYOUTS)
def _lay_out_repetition(
    held: Partition, counts: tuple[int, ...]
) -> tuple[tuple[int, ...], Partition]:
    """Returns how often a block is repeated along dims that are not cut, and its partition then."""
    local = tuple(1 if cut else count for cut, count in zip(held.cuts, counts, strict=True))
    shape = tuple(extent * count for extent, count in zip(held.shape, local, strict=True))
    return local, Partition(shape, held.cuts)


@register(torch.Tensor.expand)
def expand_to_sizes(self: Sharded, *sizes: Integers, size: Integers | None = None) -> torch.Tensor:
    """Expands dims of extent 1 and new ones in front, by global shape, as a view."""
    return expanded(self, integers(*sizes) if size is None else integers(size))


@register(torch.Tensor.expand_as)
def expand_as(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Expands to the global shape of the other tensor, as a view."""
    return expanded(self, tuple(other.shape))


@register(torch.broadcast_to, torch.Tensor.broadcast_to)
def broadcast_to(input: Sharded, size: Sequence[int]) -> torch.Tensor:
    """Expands as expand."""
    return expanded(input, integers(*size))


@register(torch.broadcast_tensors)
def broadcast_tensors(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Expands each tensor and keeps its cut; ordinary ones stay whole."""
    shape = torch.broadcast_shapes(*(tuple(t.shape) for t in tensors))
    return tuple(expanded(t, shape) for t in tensors)


@register(torch.meshgrid, meshgrid_of_list)
def meshgrid(*vectors: Any, indexing: str | None = None) -> tuple[torch.Tensor, ...]:
    """Expands each vector along a dim of its own, and keeps its cut; ordinary ones stay whole."""
    if len(vectors) == 1 and isinstance(vectors[0], list | tuple):
        (vectors,) = vectors
    places = list(range(len(vectors)))
    if indexing == "xy":
        places[:2] = places[1::-1]
    lines = []
    for place, vector in zip(places, vectors, strict=True):
        shape = [1] * len(vectors)
        shape[place] = vector.numel()
        lines.append(
            reshape_to(vector, shape) if isinstance(vector, Sharded) else vector.view(shape)
        )
    return broadcast_tensors(*lines)


@register_each(torch.Tensor.repeat, (torch.tile, torch.Tensor.tile))
def repeat(operator: Operator, input: Sharded, *counts: Integers, **named: Integers) -> Sharded:
    """Repeats any dims; along a cut dim as cat of the tensor with itself.

    Distribution scheme: 1. repeat the block along dims that are not cut, new ones in front, 2.
    along each cut dim, join the tensor with itself, like cat.
    """
    times = integers(*counts, *named.values())
    name = operator.__name__
    if name == "tile":
        times = (*[1] * (input.dim() - len(times)), *times)
    front = len(times) - input.dim()
    if front < 0:
        raise LayoutError(f"{name}: {len(times)} numbers for {input.partition}")
    held = with_new_dims(input.partition, (0,) * front)
    local, partition = _lay_out_repetition(held, times)
    y = input.like(input.native_local.repeat(local), partition, consumed=True)
    for dim in held.cut_dims:
        if times[dim] != 1:
            parts = [y] * times[dim] or [crop(y, {dim: Span(0, 0)})]
            y = concatenate(parts, dim, name)
    return y


@register(torch.repeat_interleave, torch.Tensor.repeat_interleave, dims=["dim"])
def repeat_interleave(
    input: torch.Tensor,
    repeats: int | torch.Tensor,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> Sharded:
    """Repeats by a number, or one for each element; copies stay on the rank of their element.

    Distribution scheme: 1. repeat the block, 2. cut the result anew if a rank is left without
    elements.
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
    spread = partition.with_dim(dim, ends[-1], new.rebalanced(ends[-1]))
    return y.redistribute(spread, "repeat_interleave")
