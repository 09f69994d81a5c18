"""Distributes indexing: square brackets, gather and scatter with their kin.

In reading order: subscripts and assignments to them, which may be put off; gather, index_select,
embedding and one-hot codes along a dim that is not cut; scatter, index_add, index_copy and
index_fill along a dim that is not cut, and sums of values that are cut along it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import EllipsisType, NoneType
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F

from hyperslab.comm import Grid, all_reduce_sum, per_grid
from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.geometry import Cut, Partition
from hyperslab.kernels.memory_format import accumulator
from hyperslab.ops.elementwise import apply_pointwise
from hyperslab.ops.masks import chosen_by_mask, write_where
from hyperslab.ops.operands import (
    aligned_but,
    block_of,
    check_alike_but,
    check_only_reference,
    check_writable,
    is_only_reference,
    other_extents,
    turn_into_cut,
    whole_of,
    without_empty_shards,
)
from hyperslab.ops.overloads import Operator, register_each
from hyperslab.ops.placement import with_whole
from hyperslab.ops.positions import (
    chosen_anywhere,
    chosen_by_cut,
    is_cut,
    rows_of_each,
    write_anywhere,
)
from hyperslab.ops.reductions import group_over
from hyperslab.ops.spatial import rolled
from hyperslab.ops.spectra import Spectrum, can_wait
from hyperslab.ops.views import (
    Part,
    Span,
    crop,
    expanded,
    lay_out_part,
    reshape_to,
    take_part,
)
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe
from hyperslab.tensor.sharded import Policy
from hyperslab.util.torch_internals import EnableTorchFunction

_REMEDY = (
    "    choose with torch.where or masked_fill, take x.full(), or gather the indexed dim with\n"
    "    hyperslab.gather(x, axes) and index it with an ordinary tensor"
)


@dataclass
class Subscript:
    """Describes the contents of square brackets, dim by dim.

    ``spans``: the part of each dim; ``single``: dims that an integer takes away; ``new``: where,
    among the dims of the result before ``single`` are dropped, a ``None`` puts a new one;
    ``positions``: at most one dim chosen by a one-dimensional tensor of positions.
    """

    spans: dict[int, Span] = field(default_factory=dict)
    single: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    positions: tuple[int, torch.Tensor] | None = None

    def take(self, dim: int, item: Any, extent: int) -> None:
        if isinstance(item, slice):
            self.spans[dim] = _span(item, extent)
            return
        position = operator.index(item.block if isinstance(item, Sharded) else item)
        if not -extent <= position < extent:
            raise IndexError(f"index {position} is out of bounds for dim {dim} with size {extent}")
        self.spans[dim] = Span(position % extent, 1)
        self.single.append(dim)


def parse_subscript(x: Sharded, index: object) -> Subscript:
    """Reads a subscript; refuses what no rule covers."""
    items = list(index) if _is_tuple(index) else [index]
    taken = _count_taken(items)
    if any(isinstance(item, bool) for item in items) or taken > x.dim():
        raise refused_subscript(x, index, f"{taken} indices for {x.dim()} dims, or a lone bool")
    found = Subscript()
    for dim, item in _by_dim(items, x.dim()):
        if item is None:
            found.new.append(dim)
        else:
            _add(found, x, dim, item, index)
    return found


def _count_taken(items: Iterable[object]) -> int:
    """Counts the items of a subscript that index a dim each."""
    return sum(item is not None and item is not Ellipsis for item in items)


def _by_dim(items: Sequence[Any], ndim: int) -> Iterator[tuple[int, Any]]:
    """Yields the items of a subscript, each with its dim; a None stands before that one."""
    taken = _count_taken(items)
    dim = 0
    for item in items:
        if item is Ellipsis:
            dim += ndim - taken
        else:
            yield dim, item
            dim += item is not None


def _is_tuple(index: object) -> TypeGuard[Sequence[Any]]:
    """Tells if torch takes it for several indices, as it does a list of more than numbers."""
    several = (slice, torch.Tensor, list, tuple, EllipsisType, NoneType)
    return isinstance(index, tuple) or (
        isinstance(index, list) and any(isinstance(item, several) for item in index)
    )


def _add(found: Subscript, x: Sharded, dim: int, item: Any, index: object) -> None:
    extent = x.shape[dim]
    if isinstance(item, slice) or _is_integer(item):
        found.take(dim, item, extent)
        return
    if isinstance(item, Sharded):
        if is_cut(item):
            raise refused_subscript(
                x, index, "a cut index goes alone, in front: x[0][mask], x.movedim(2, 0)[mask] = 1"
            )
        item = whole_of(item, "positions")
    positions = torch.as_tensor(item, device=x.device)
    if not positions.numel():
        positions = positions.long()  # an empty list is one of numbers
    if positions.dtype == torch.bool and tuple(positions.shape) == (extent,):
        positions = positions.nonzero().squeeze(1)
    if positions.dim() != 1 or positions.dtype in (torch.bool, torch.uint8):
        raise refused_subscript(x, index, "only one-dimensional lists of positions have a rule")
    if found.positions is not None:
        raise refused_subscript(
            x, index, "two dims are indexed by tensors or lists; index one at a time"
        )
    if (cut := x.partition.cuts[dim]) is not None and cut.merged:
        x.gather_merged()
    found.positions = (dim, positions)


def parse_written(x: Sharded, index: object) -> Subscript:
    """Reads a subscript that is assigned to; refuses positions along a cut dim, too."""
    found = parse_subscript(x, index)
    if found.positions is not None and (cut := x.partition.cuts[found.positions[0]]) is not None:
        raise refused_subscript(
            x, index, f"dim {found.positions[0]} is cut; use hyperslab.gather(x, {cut.axis!r})"
        )
    return found


def _span(item: slice, extent: int) -> Span:
    bounds = (None if v is None else operator.index(v) for v in (item.start, item.stop, item.step))
    start, stop, step = slice(*bounds).indices(extent)
    if step < 1:
        raise ValueError("step must be greater than zero")
    return Span(start, max(0, -((start - stop) // step)), step)


def _is_integer(item: Any) -> bool:
    if isinstance(item, torch.Tensor):
        kinds = (torch.bool, torch.uint8)
        return item.dim() == 0 and item.dtype not in kinds
    return hasattr(item, "__index__") and getattr(item, "ndim", 0) == 0


def refused_subscript(x: torch.Tensor, index: object, why: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"indexing of a cut tensor: {why}; nothing was computed\n{describe([x, index])}{_REMEDY}"
    )


@register(torch.Tensor.__getitem__, lazy=True, merged=True)
def getitem(self: torch.Tensor, index: object) -> Sharded:
    """Takes integers, slices, ... and None anywhere; positions; several over uncut dims; masks.

    A dim that is cut is whole while positions along it are taken, and then cut as before.
    """
    if not isinstance(self, Sharded):
        chosen = _by_mask(self, index)
        return _look_up(self, index) if chosen is None else chosen
    key = _plain_subscript(index) if self.pending is None else None
    part = None if key is None else _lay_out_subscript(self.grid, self.partition, key)
    if part is not None:
        return take_part(self, part)
    chosen = _by_mask(self, index)
    chosen = _by_tables(self, index) if chosen is None else chosen
    if chosen is not None:
        return chosen
    found = parse_subscript(self, index)
    y = _fewer_frequencies(self, found)
    if y is None:
        y = crop(self, found.spans)
    if found.positions is not None:
        y = _at(y, *found.positions)
    if found.new or found.single:
        dims = (tuple(found.single), tuple(found.new))
        y = take_part(y, lay_out_part(y.grid, y.partition, (), *dims))
    if y.is_copy and not self.is_copy and found.positions is None and not found.new:
        y.remember_place(self, found, lambda value: _write_back(self, found, value))
    return y


_PlainSubscript = tuple[int | tuple[int | None, int | None, int | None] | EllipsisType | None, ...]


def _plain_subscript(index: object) -> _PlainSubscript | None:
    """Returns slices, integers, ... and None as a key, of slices the bounds; None for all else.

    Of Python's own numbers alone: True and 1.0 are equal to 1, and no such integers.
    """
    key: list[Any] = []
    for item in index if type(index) is tuple else (index,):
        kind = type(item)
        if kind is slice:
            bounds = (item.start, item.stop, item.step)
            for bound in bounds:
                if bound is not None and type(bound) is not int:
                    return None
            key.append(bounds)
        elif kind is int or item is None or item is Ellipsis:
            key.append(item)
        else:
            return None
    return tuple(key)


@per_grid
def _lay_out_subscript(grid: Grid, partition: Partition, key: _PlainSubscript) -> Part | None:
    """Lays out a subscript that leaves all elements on their ranks; None for any other."""
    if _count_taken(key) > partition.ndim or key.count(Ellipsis) > 1:
        return None
    found = Subscript()
    for dim, item in _by_dim(key, partition.ndim):
        if item is None:
            found.new.append(dim)
        else:
            item = slice(*item) if isinstance(item, tuple) else item
            found.take(dim, item, partition.shape[dim])
    spans = tuple(found.spans.items())
    part = lay_out_part(grid, partition, spans, tuple(found.single), tuple(found.new))
    return part if part.exchange is None else None


def _at(x: Sharded, dim: int, positions: torch.Tensor) -> Sharded:
    before = x.partition
    x = with_whole(x, (dim,), "a list of positions")
    where: tuple[slice | torch.Tensor, ...] = (*[slice(None)] * dim, positions)
    y = x.like(x.local[where], x.partition.with_dim(dim, len(positions), None))
    cut = before.cuts[dim]
    if cut is None or len(positions) < cut.parts:
        return y
    again = before.with_dim(dim, len(positions), Cut.balanced(cut.axis, len(positions), cut.parts))
    return y.redistribute(again, "the positions of a list")


def _by_mask(x: torch.Tensor, index: Any) -> Sharded | None:
    """Chooses by a mask that is cut, or of several dims; None for any other subscript.

    Of the other items none may choose anything.
    """
    items = list(index) if _is_tuple(index) else [index]
    kinds = [isinstance(item, torch.Tensor) and item.dtype == torch.bool for item in items]
    if sum(kinds) != 1 or any(
        not (mask or item is Ellipsis or (isinstance(item, slice) and item == slice(None)))
        for item, mask in zip(items, kinds, strict=True)
    ):
        return None
    at = kinds.index(True)
    mask = items[at]
    if mask.dim() < 1 or (mask.dim() == 1 and not is_cut(mask)):
        return None
    before = items[:at]
    first = at if Ellipsis not in before else x.dim() - mask.dim() - (len(items) - at - 1)
    if mask.shape != x.shape[first : first + mask.dim()]:
        shape = x.partition if isinstance(x, Sharded) else tuple(x.shape)
        raise IndexError(f"a mask {tuple(mask.shape)} for {shape}: its extents differ")
    for operand in (x, mask):
        if isinstance(operand, Sharded):
            operand.force()
    return chosen_by_mask(x, mask, first)


def _split_tables(x: Sharded, index: Any) -> tuple[tuple[Any, ...], dict[int, torch.Tensor]]:
    """Splits a subscript: ``:`` stands for tables of positions, which are returned by their dims.

    These are dims of what the rest leaves. No tables are returned where there are none, or masks.
    """
    items = list(index) if _is_tuple(index) else [index]
    taken = sum(item is not None and item is not Ellipsis for item in items)
    tables: dict[int, torch.Tensor] = {}
    dim = 0
    for at, item in enumerate(items):
        if (isinstance(item, list) or hasattr(item, "ndim")) and not _is_integer(item):
            tables[dim] = torch.as_tensor(item, device=x.device)
            items[at] = slice(None)
        dim += x.dim() - taken if item is Ellipsis else not _is_integer(item)
    if any(t.dtype in (torch.bool, torch.uint8) or not t.dim() for t in tables.values()):
        return (), {}
    return tuple(items), tables


def _front(tables: Mapping[int, torch.Tensor]) -> int:
    """Returns where the dims that tables make begin, as in torch: in their place if they adjoin."""
    first, last = min(tables), max(tables)
    return first if last - first < len(tables) else 0


def _write_by_tables(x: Sharded, index: Any, value: torch.Tensor | float) -> bool:
    """Writes at positions in several dims, in tables of several dims, or along a cut dim.

    Returns False for any other subscript.
    """
    items, tables = _split_tables(x, index)
    if not tables or None in items or any(map(is_cut, tables.values())):
        return False
    tables = {dim: whole_of(table, "positions") for dim, table in tables.items()}
    y = getitem(x, items)
    dim, table = next(iter(tables.items()))
    if len(tables) == table.dim() == 1 and y.partition.cuts[dim] is None:
        return False
    check_writable(y, "assignment at positions")
    write_anywhere(y, tables, _front(tables), value)
    x.note_change()
    return True


def _by_tables(x: Sharded, index: Any) -> Sharded | None:
    """Looks up positions in several dims at once, or in tables of several dims.

    Returns None for any other subscript.
    """
    items, tables = _split_tables(x, index)
    lists = [*tables.values()]
    cut_tables = any(map(is_cut, lists))
    if not lists or (lists[0].dim() == len(lists) == 1 and not cut_tables):
        return None
    if not cut_tables:
        tables = {dim: whole_of(table, "positions") for dim, table in tables.items()}
    y = getitem(x, items)
    if any((cut := y.partition.cuts[dim]) is not None and cut.merged for dim in tables):
        y.gather_merged()
    y = without_empty_shards(y, tables)
    axes = [cut.axis for dim in tables if (cut := y.partition.cuts[dim]) is not None]
    kept = rows_of_each(y, tables) if len(axes) == 1 else None
    cuts = [cut for dim, cut in enumerate(y.partition.cuts) if dim not in tables]
    front = _front(tables)
    if cut_tables and kept is None:
        return chosen_by_cut(y, tables, front)
    if axes and kept is None:
        block = chosen_anywhere(y, tables, front)
    else:
        block = y.local[tuple(tables.get(dim, slice(None)) for dim in range(y.dim()))]
    cuts[front:front] = [kept, *[None] * (block.dim() - len(cuts) - 1)]
    extents = [block.shape[d] if cut is None else cut.extent for d, cut in enumerate(cuts)]
    return y.like(block, Partition(tuple(extents), tuple(cuts)), fresh=True)


def _fewer_frequencies(x: Sharded, found: Subscript) -> Sharded | None:
    """Returns a part of a transform that is put off; None where ``x`` is anything else."""
    fewer = x.pending.cropped(found.spans) if isinstance(x.pending, Spectrum) else None
    if fewer is None:
        return None
    y = x.will_be(fewer, fewer.partition)
    y.mark_as_copy(x)
    y.mark_as_crop()
    return y


def _look_up(table: torch.Tensor, index: object) -> Sharded:
    """Looks up a row of an ordinary table for every element of a cut tensor of indices."""
    if not isinstance(index, Sharded) or index.dtype in (torch.bool, torch.uint8):
        raise refused_subscript(table, index, "an ordinary tensor takes one cut tensor of integers")
    whole = Partition.whole(table.shape[1:])
    partition = Partition((*index.shape, *whole.shape), (*index.partition.cuts, *whole.cuts))
    return index.like(table[index.local], partition)


@register(torch.Tensor.__setitem__, lazy=True)
def setitem(self: torch.Tensor, index: object, value: torch.Tensor | float) -> None:
    """Writes in place, each rank its own part; an ordinary tensor with cut values becomes cut."""
    for operand in (index, value):
        if isinstance(operand, Sharded):
            operand.force()
    if not isinstance(self, Sharded):
        items = index if isinstance(index, tuple | list) else (index,)
        if not isinstance(value, Sharded) or any(isinstance(item, Sharded) for item in items):
            raise refused_subscript(
                self, [index, value], "the index into an ordinary tensor is cut"
            )
        if not value.partition.axes:
            self[index] = value.block  # type: ignore[index]
            return
        check_only_reference(self, value, "assignment to a part")
        partition = _cut_for(self, index, value)
        # All ranks decide alike whether a spectrum is to be written there.
        complex_zero = can_wait(value) and self.is_complex()
        if complex_zero and not (value.grid.has_values and bool(self.any())):
            self = _deferred_zeros(value, partition, self.dtype).take_place_of(self)
        else:
            self = turn_into_cut(self, partition, value)
    if isinstance(self.pending, DeferredWrites):
        writes = self.pending.and_(parse_written(self, index), value)
        if writes is not None:
            self.extend(writes)
            return
    self.force()
    check_writable(self, "assignment to a part")
    several = isinstance(index, torch.Tensor) and (index.dim() > 1 or index.dim() == self.dim())
    if isinstance(index, torch.Tensor) and index.dtype == torch.bool and several:
        if index.shape != self.shape[: index.dim()]:
            raise IndexError(f"a mask {tuple(index.shape)} for {self.partition}: use masked_fill_")
        if isinstance(value, torch.Tensor) and value.dim():
            write_where(self, index, value)
            self.note_change()
            return
        rest = [1] * (self.dim() - index.dim())
        with EnableTorchFunction():  # or torch would ask for no rule inside of one
            index = index.view(*index.shape, *rest)
        apply_pointwise(torch.Tensor.masked_fill_, (self, index, value), {})
        return
    if _write_by_tables(self, index, value):
        return
    found = parse_written(self, index)
    if found.new:
        raise refused_subscript(self, index, "None in an assignment; reshape the value instead")
    if isinstance(value, Sharded) and value.is_part_of(self, found):
        return  # the end of `self[index] += 1`, which was written already
    _write_back(self, found, value)


def _write_back(x: Sharded, found: Subscript, value: torch.Tensor | float) -> None:
    write_part(x, found, value)
    x.note_change()


def write_part(x: Sharded, found: Subscript, value: torch.Tensor | float) -> None:
    region = _region(x, found)
    box = region.box(x.grid.coords)
    origin = x.box.lo
    where: list[slice | torch.Tensor] = [slice(None)] * x.dim()
    for dim, span in found.spans.items():
        where[dim] = span.slice(box.interval(dim), origin[dim])
    if found.positions is not None:
        where[found.positions[0]] = found.positions[1]
    part = _own_values(value, region, found.single, x)
    place = tuple(where)
    # Of `x[:, 0] += y` the value is the place itself, which torch knows by the same strides; those
    # of dims of one element may be others.
    if isinstance(part, torch.Tensor) and part.data_ptr() == x.local[place].data_ptr():
        part = part.clone()
    x.local[place] = part


@dataclass(slots=True, eq=False)
class DeferredWrites:
    """Stands for complex zeros into which parts are written, and which may be rolled afterwards.

    A transform of them is one of few frequencies (`hyperslab.ops.fourier`).

    Args:
        partition: the result's.
        grid, policy, dtype, device: of all parts.
        parts: spans of all dims, and what is written there, one after the other.
        turns: by how much each dim is rolled.
    """

    partition: Partition
    grid: Grid
    policy: Policy
    dtype: torch.dtype
    device: torch.device
    parts: tuple[tuple[dict[int, Span], Sharded], ...] = ()
    turns: Mapping[int, int] = field(default_factory=dict)
    with_graph: bool = True

    sources = ()
    recomputable = False

    def and_(self, found: Subscript, value: object) -> DeferredWrites | None:
        """Writes one part more; None where that is not a box of cut values as large."""
        shape = self.partition.shape
        spans = {d: found.spans.get(d, Span(0, extent)) for d, extent in enumerate(shape)}
        plain = not (found.new or found.single or found.positions or self.turns)
        if not plain or not isinstance(value, Sharded):
            return None
        if tuple(span.count for span in spans.values()) != value.partition.shape:
            return None
        if any(span.step != 1 or span.count == 0 for span in spans.values()):
            return None
        block = value.block.to(self.dtype, copy=True)  # the value may change afterwards
        part = value.like(block, fresh=True)
        return replace(self, parts=(*self.parts, (spans, part)))

    def rolled(self, turns: Mapping[int, int]) -> DeferredWrites:
        found = {d: self.turns.get(d, 0) + turns.get(d, 0) for d in {*self.turns, *turns}}
        graph = self.with_graph and torch.is_grad_enabled()
        return replace(self, turns=found, with_graph=graph)

    def only_in(self, dims: Sequence[int]) -> bool:
        """Returns whether there is a part, and nothing is rolled along other dims."""
        return bool(self.parts) and self.turns.keys() <= set(dims)

    def within(
        self, partition: Partition, places: Sequence[Mapping[int, Span]] | None = None
    ) -> Sharded:
        """Writes the parts into zeros that are cut so, by default in their own places."""
        own = partition.box(self.grid.coords).shape
        zeros = torch.zeros(own, dtype=self.dtype, device=self.device)
        y = Sharded.from_local(zeros, partition, self.grid, self.policy)
        for spans, (_, part) in zip(places or [s for s, _ in self.parts], self.parts, strict=True):
            write_part(y, Subscript(dict(spans)), part)
        return y

    def value(self) -> torch.Tensor:
        with torch.set_grad_enabled(self.with_graph):
            y = self.within(self.partition)
            for dim, turn in self.turns.items():
                y = rolled(y, turn, dim)
            return y.block


def _deferred_zeros(like: Sharded, partition: Partition, dtype: torch.dtype) -> Sharded:
    writes = DeferredWrites(partition, like.grid, like.policy, dtype, like.device)
    return like.will_be(writes, partition)


@register(torch.zeros_like, lazy=True, merged=True)
def zeros_like(input: Sharded, **options: object) -> Sharded:
    """Is cut as the other."""
    if can_wait(input) and input.is_complex() and not (options or input.partition.merged):
        return _deferred_zeros(input, input.partition, input.dtype)
    input.force()
    return apply_pointwise(torch.zeros_like, (input,), options)


def _cut_for(ordinary: torch.Tensor, index: object, value: Sharded) -> Partition:
    """Chooses how to cut an ordinary tensor that gets cut values: along the same axes.

    A dim all of which is written is cut as the values are, others in balanced shards.
    """
    x = value.like(ordinary, Partition.whole(ordinary.shape))
    found = parse_subscript(x, index)
    if found.new:
        raise refused_subscript(x, index, "None in an assignment; reshape the value instead")
    region = _region(x, found)
    dims = [dim for dim in range(x.dim()) if dim not in found.single]
    cuts: list[Cut | None] = [None] * x.dim()
    extents = [region.shape[dim] for dim in dims]
    offset = len(dims) - value.dim()
    given = [1] * offset + list(value.shape)
    if len(given) != len(extents) or any(
        a not in (1, b) for a, b in zip(given, extents, strict=True)
    ):
        raise refused_subscript(
            ordinary, value, "a tensor cannot be given a cut value of another shape"
        )
    for dim, cut in enumerate(value.partition.cuts, offset):
        if cut is None or not dim >= 0:
            continue
        target = dims[dim]
        listed = found.positions is not None and found.positions[0] == target
        if region.shape[target] != cut.extent or listed:
            continue
        extent = x.shape[target]
        new = cut if extent == cut.extent else Cut.balanced(cut.axis, extent, cut.parts)
        cuts[target] = None if new.thin else new
    return Partition(tuple(x.shape), tuple(cuts))


def _region(x: Sharded, found: Subscript) -> Partition:
    """Returns the partition of the chosen part, cut as ``x`` is; ranks may have nothing of it."""
    region = x.partition
    for dim, span in found.spans.items():
        cut = region.cuts[dim]
        region = region.with_dim(dim, span.count, cut and span.follow(cut))
    if found.positions is not None:
        region = region.with_dim(found.positions[0], len(found.positions[1]), None)
    return region


def _own_values(
    value: torch.Tensor | float, region: Partition, single: Sequence[int], x: Sharded
) -> torch.Tensor | float:
    """Returns this rank's part of a value that is broadcast to the region."""
    if not isinstance(value, torch.Tensor) or (value.dim() == 0 and type(value) is torch.Tensor):
        return value
    shape = list(value.shape)
    while len(shape) > region.ndim - len(single) and shape[0] == 1:
        del shape[0]
    shape = [1] * (region.ndim - len(single) - len(shape)) + shape
    for dim in single:
        shape.insert(dim, 1)
    fits = len(shape) == region.ndim and all(
        a in (1, b) for a, b in zip(shape, region.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"shape mismatch: {tuple(value.shape)} cannot be assigned to {region}")
    cuts = [c if a == b else None for a, b, c in zip(shape, region.shape, region.cuts, strict=True)]
    wanted = Partition(tuple(shape), tuple(cuts))
    if isinstance(value, Sharded):
        return reshape_to(value, shape).redistribute(wanted, "an assignment to a part").local
    return value.reshape(shape)[wanted.box(x.grid.coords).slices()]


def cropped_to_index(x: torch.Tensor, index: torch.Tensor, dim: int, name: str) -> torch.Tensor:
    """Crops ``x`` to the extents of ``index`` in the other dims."""
    if x.dim() != index.dim():
        raise LayoutError(
            f"{name}: the index has another number of dims\n{describe([x, index])}"
            "    reshape or expand one of them"
        )
    spans = {
        d: Span(0, extent)
        for d, (extent, own) in enumerate(zip(index.shape, x.shape, strict=True))
        if d != dim and extent != own
    }
    if any(span.count > x.shape[d] for d, span in spans.items()):
        raise LayoutError(
            f"{name} along dim {dim}: the index is larger\n{describe([x, index])}    crop the index"
        )
    if isinstance(x, Sharded):
        return crop(x, spans) if spans else x
    return x[tuple(slice(0, spans[d].count) if d in spans else slice(None) for d in range(x.dim()))]


@register(torch.gather, torch.Tensor.gather, dims=["dim"])
def gather_along(
    input: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False
) -> Sharded:
    """Runs along a dim that is not cut; the index is cut as the input, or ordinary."""
    if sparse_grad:
        raise UnsupportedOp("gather(sparse_grad=True) has no rule for a cut tensor")
    x = cropped_to_index(input, index, dim, "torch.gather")
    blocks, cuts, like = aligned_but([x, index], dim, "torch.gather")
    return like.like(torch.gather(blocks[0], dim, blocks[1]), Partition(tuple(index.shape), cuts))


@register(torch.take_along_dim, torch.Tensor.take_along_dim, dims=["dim"])
def take_along_dim(input: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> Sharded:
    """Runs along a dim that is not cut; the other dims are broadcast."""
    if dim is None or input.dim() != indices.dim():
        raise UnsupportedOp(
            "take_along_dim of a cut tensor needs a dim, and as many dims on both sides\n"
            f"{describe([input, indices])}    flatten x.full() to take from all elements"
        )
    common = torch.broadcast_shapes(
        other_extents(input.shape, dim), other_extents(indices.shape, dim)
    )
    shape = (*common[:dim], -1, *common[dim:])
    with EnableTorchFunction():  # or torch would ask for no rule inside of one
        indices = torch.where(indices < 0, indices + input.shape[dim], indices)  # from the end
    return gather_along(expanded(input, shape), dim, expanded(indices, shape))


@register(torch.index_select, torch.Tensor.index_select, dims=["dim"])
def index_select(input: torch.Tensor, dim: int, index: torch.Tensor) -> Sharded:
    """Takes positions along a dim, which becomes whole if it is cut."""
    if not isinstance(input, Sharded):
        raise UnsupportedOp(
            f"index_select has a rule for a cut input\n{describe([input, index])}"
            "    use index.full(), or table[index] to look up rows"
        )
    index = whole_of(index, "the positions of index_select")
    input = with_whole(input, (dim,), "index_select")
    partition = input.partition.with_dim(dim, index.numel(), None)
    return input.like(input.local.index_select(dim, index), partition)


@register(F.embedding)
def embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Sharded:
    """Takes rows of an ordinary table at cut indices; the new dim is not cut."""
    special = max_norm is not None or scale_grad_by_freq or sparse
    if not isinstance(input, Sharded) or isinstance(weight, Sharded) or special:
        raise UnsupportedOp(
            "embedding has a rule for cut indices and an ordinary table, without max_norm, "
            f"scale_grad_by_freq and sparse\n{describe([input, weight])}    use indices.full()"
        )
    rows = F.embedding(input.local, weight, padding_idx)
    return input.like(rows, _with_last(input, weight.shape[1]))


@register(F.one_hot)
def one_hot(input: Sharded, num_classes: int = -1) -> Sharded:
    """Adds a last dim that is not cut; without their number it looks for the largest class."""
    if num_classes < 1:
        if not input.grid.has_values:
            raise UnsupportedOp(
                f"one_hot of {input.partition} looks for the largest class, of which a trace has "
                "none\n    give num_classes"
            )
        with EnableTorchFunction():  # or torch would ask for no rule inside of one
            if not input.numel():
                raise RuntimeError(
                    f"one_hot of {input.partition}, which is empty: give num_classes"
                )
            least, largest = map(int, input.aminmax())
        if least < 0:
            raise RuntimeError(f"one_hot: a class is {least}; classes are counted from 0")
        num_classes = largest + 1
    classes = input.local
    if classes.dtype != torch.int64:
        raise TypeError(f"one_hot takes classes of torch.int64, not {classes.dtype}")
    # Torch's own reads the least and the largest class first, of which a traced step has none;
    # scatter_ refuses others, too.
    codes = classes.new_zeros((*classes.shape, num_classes))
    try:
        codes.scatter_(-1, classes.unsqueeze(-1), 1)
    except RuntimeError as error:
        raise RuntimeError(f"one_hot: a class is not in 0..{num_classes - 1}: {error}") from None
    return input.like(codes, _with_last(input, num_classes))


def _with_last(x: Sharded, extent: int) -> Partition:
    return Partition((*x.partition.shape, extent), (*x.partition.cuts, None))


SCATTER_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "scatter": ("src", "reduce"),
    "scatter_add": ("src",),
    "scatter_reduce": ("src", "reduce"),
    "index_add": ("source",),
    "index_copy": ("source",),
    "index_fill": ("value",),
}
"""Names every operator's arguments after the positions, in this order."""

SUMS = {name: SCATTER_ARGUMENTS[name][0] for name in ("scatter_add", "index_add")}
"""Maps operators that sum the values of one position to their argument of values."""


@register_each(
    *SCATTER_ARGUMENTS, *(f"{name}_" for name in SCATTER_ARGUMENTS), dims=["dim"], merged=True
)
def write_along(
    operator: Operator,
    input: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    *args: object,
    **options: object,
) -> torch.Tensor:
    """Runs along a dim that is not cut; values that are added up may be cut along it."""
    name = operator.__name__.removesuffix("_")
    in_place = operator.__name__ != name
    values = {**dict(zip(SCATTER_ARGUMENTS[name], args, strict=False)), **options}
    if name == "scatter" and "src" in values and not isinstance(values["src"], torch.Tensor):
        values["value"] = values.pop("src")
    if name in SUMS:
        added = _sum_by_position(name, input, dim, index, values)
        if added is not None:
            if in_place and not isinstance(input, Sharded) and added.partition.axes:
                check_only_reference(input, added, operator.__name__)
                input = turn_into_cut(input, added.partition, added)
            with EnableTorchFunction():  # or torch would ask for no rule inside of one
                return input.add_(added) if in_place else input + added
    for operand in (input, index, *values.values()):
        if isinstance(operand, Sharded) and operand.partition.merged:
            operand.gather_merged()
    return _scatter(name, in_place, input, dim, index, values)


def _sum_by_position(
    name: str, input: torch.Tensor, dim: int, index: torch.Tensor, values: Mapping[str, Any]
) -> Sharded | None:
    """Sum values with the same position along a dim along which they are cut, as a histogram does.

    Returns None where neither they nor their positions are cut along it, or the input is.

    Distribution scheme: 1. bring index and source to one cut, of ordinary tensors take this rank's
    part, 2. every rank sums its values, 3. add up the sums of the ranks that share the other dims.
    """
    options = {**values}
    source = options.pop(SUMS[name], None)
    if not isinstance(source, torch.Tensor):
        return None  # torch says what is wrong
    flat = name == "index_add"  # its positions have one dim
    if not flat:
        source = cropped_to_index(source, index, dim, name)
    cut = [x for x in (source, *([] if flat else [index])) if _is_cut_along(x, dim)]
    if not cut or _is_cut_along(input, dim):
        return None
    like = cut[0]
    if source.shape[dim] != index.shape[0 if flat else dim]:
        raise LayoutError(
            f"{name} along dim {dim}: there are more or fewer positions than values\n"
            f"{describe([input, index, source])}    crop one of them"
        )
    check_alike_but([input, source], dim, name)
    own = like.partition
    held = Partition((own.shape[dim],), (own.cuts[dim],)) if flat else own
    what = f"aligning operands of {name}"
    positions = block_of(index, held, like.grid, what)
    block = block_of(source, own, like.grid, what)
    partition = own.with_dim(dim, input.shape[dim], None)
    dtype = input.dtype
    if block.dtype == dtype:  # torch refuses others
        dtype = accumulator(dtype)
        block = block.to(dtype)
    sums = block.new_zeros(partition.box(like.grid.coords).shape, dtype=dtype)
    sums = getattr(sums, name)(dim, positions, block, **options)
    whole = all_reduce_sum(sums, group_over(like, (dim,)), f"the sums of {name}")
    return like.like(whole.to(input.dtype), partition)


def _is_cut_along(x: object, dim: int) -> TypeGuard[Sharded]:
    return isinstance(x, Sharded) and x.partition.cuts[dim] is not None


def _scatter(
    name: str,
    in_place: bool,
    input: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    values: Mapping[str, object],
) -> torch.Tensor:
    """Write at positions along a dim.

    Distribution scheme: 1. bring index and source to the cut of the input (of an ordinary tensor
    take this rank's part), 2. every rank writes into its block. An ordinary tensor that is changed
    in place becomes the cut result.
    """
    flat = name.startswith("index_")
    ordinary = in_place and not isinstance(input, Sharded)
    alone = ordinary and is_only_reference(input)
    if flat:
        index = whole_of(index, f"the positions of {name}")
        if not any(isinstance(value, Sharded) for value in (input, *values.values())):
            return getattr(input, name + "_" * in_place)(dim, index, **values)
    operands: dict[str, Any] = {"input": input, "index": index, **values}
    shaped = [
        key
        for key, value in operands.items()
        if isinstance(value, torch.Tensor) and value.dim() and not (flat and key == "index")
    ]
    if not flat and "src" in shaped:
        operands["src"] = cropped_to_index(operands["src"], index, dim, name)
    fixed = in_place and isinstance(input, Sharded)
    blocks, cuts, like = aligned_but([operands[key] for key in shaped], dim, name, fixed=fixed)
    operands.update(zip(shaped, blocks, strict=True))
    block = operands.pop("input")
    positions = operands.pop("index")
    partition = Partition(tuple(input.shape), cuts)
    if ordinary and not partition.axes:  # every rank has all of it, and changes it
        return getattr(input, f"{name}_")(dim, positions, **operands)
    if ordinary:
        alone = alone or not like.grid.has_values  # in a trace all are views, and share nothing
        if input.requires_grad or not alone:
            raise LayoutError(
                f"{name}_ would make a cut tensor of an ordinary one that has views or a gradient\n"
                f"{describe([input, like])}    use {name}, which returns a new tensor"
            )
        like = turn_into_cut(input, partition, like)
        block = like.block
    if in_place:
        check_writable(like, name)
        getattr(block, f"{name}_")(dim, positions, **operands)
        like.note_change()
        return like
    return like.like(getattr(block, name)(dim, positions, **operands), partition)
