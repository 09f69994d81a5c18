"""Square brackets: subscripts and assignments to them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hyperslab.errors import UnsupportedOp
from hyperslab.geometry import Cut, Partition
from hyperslab.ops.common.operands import check_writable
from hyperslab.ops.common.ordinary_targets import made_cut
from hyperslab.ops.elementwise.pointwise import apply_pointwise
from hyperslab.ops.views.reshape import reshape_to, unsqueeze
from hyperslab.ops.views.slicing import Span, crop, drop_dim
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe

_REMEDY = (
    "    choose with torch.where or masked_fill, take x.full(), or gather the indexed dim with\n"
    "    hyperslab.gather(x, axes) and index it with an ordinary tensor"
)


@dataclass
class Subscript:
    """What stands in square brackets, dim by dim.

    ``spans``: the part of each dim; ``single``: dims that an integer takes away; ``new``: where,
    among the dims of the result before ``single`` are dropped, a ``None`` puts a new one;
    ``positions``: at most one dim chosen by a one-dimensional tensor of positions.
    """

    spans: dict[int, Span] = field(default_factory=dict)
    single: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    positions: tuple[int, torch.Tensor] | None = None


def parse(x: Sharded, index: object) -> Subscript:
    """Read a subscript; refuse what no rule covers."""
    items = list(index) if isinstance(index, tuple) else [index]
    taken = sum(item is not None and item is not Ellipsis for item in items)
    if any(isinstance(item, bool) for item in items) or taken > x.dim():
        raise refused(x, index, f"{taken} indices for {x.dim()} dims, or a lone bool")
    if not any(item is Ellipsis for item in items):
        items.append(Ellipsis)
    found = Subscript()
    dim = 0
    for item in items:
        if item is Ellipsis:
            dim += x.dim() - taken
        elif item is None:
            found.new.append(dim)
        else:
            _add(found, x, dim, item, index)
            dim += 1
    return found


def _add(found: Subscript, x: Sharded, dim: int, item: Any, index: object) -> None:
    extent = x.shape[dim]
    if isinstance(item, slice):
        found.spans[dim] = _span(item, extent)
        return
    if _is_integer(item):
        position = operator.index(item)
        if not -extent <= position < extent:
            raise IndexError(f"index {position} is out of bounds for dim {dim} with size {extent}")
        found.spans[dim] = Span(position % extent, 1)
        found.single.append(dim)
        return
    if isinstance(item, Sharded):
        raise refused(x, index, "the index is itself cut")
    positions = torch.as_tensor(item, device=x.device)
    if positions.dtype == torch.bool and tuple(positions.shape) == (extent,):
        positions = positions.nonzero().squeeze(1)
    if positions.dim() != 1 or positions.dtype in (torch.bool, torch.uint8):
        raise refused(x, index, "only one-dimensional lists of positions have a rule")
    if found.positions is not None:
        raise refused(x, index, "two dims are indexed by tensors or lists; index one at a time")
    if (cut := x.partition.cuts[dim]) is not None:
        raise refused(x, index, f"dim {dim} is cut; use hyperslab.gather(x, {cut.axis!r})")
    found.positions = (dim, positions)


def _span(item: slice, extent: int) -> Span:
    bounds = (None if v is None else operator.index(v) for v in (item.start, item.stop, item.step))
    start, stop, step = slice(*bounds).indices(extent)
    if step < 1:
        raise ValueError("step must be greater than zero")
    return Span(start, max(0, -((start - stop) // step)), step)


def _is_integer(item: Any) -> bool:
    if isinstance(item, torch.Tensor):
        kinds = (torch.bool, torch.uint8)
        return not isinstance(item, Sharded) and item.dim() == 0 and item.dtype not in kinds
    return hasattr(item, "__index__") and getattr(item, "ndim", 0) == 0


def refused(x: torch.Tensor, index: object, why: str) -> UnsupportedOp:
    """The error for a subscript without a rule."""
    return UnsupportedOp(
        f"indexing of a cut tensor: {why}; nothing was computed\n{describe([x, index])}{_REMEDY}"
    )


@register(torch.Tensor.__getitem__, family="indexing")
def getitem(self: torch.Tensor, index: object) -> Sharded:
    """Integers, slices, ... and None anywhere; a list of positions over a dim that is not cut."""
    if not isinstance(self, Sharded):
        return _look_up(self, index)
    found = parse(self, index)
    y = crop(self, found.spans)
    if found.positions is not None:
        dim, positions = found.positions
        partition = y.partition.with_dim(dim, len(positions), None)
        where: tuple[slice | torch.Tensor, ...] = (*[slice(None)] * dim, positions)
        y = y.like(y.local[where], partition)
    for dim in reversed(found.new):
        y = unsqueeze(y, dim)
    for dim in reversed(found.single):
        y = drop_dim(y, dim + sum(at <= dim for at in found.new))
    return y


def _look_up(table: torch.Tensor, index: object) -> Sharded:
    """Rows of an ordinary table, one for every element of a cut tensor of indices."""
    if not isinstance(index, Sharded) or index.dtype in (torch.bool, torch.uint8):
        raise refused(table, index, "an ordinary tensor takes one cut tensor of integers")
    whole = Partition.whole(table.shape[1:])
    partition = Partition((*index.shape, *whole.shape), (*index.partition.cuts, *whole.cuts))
    return index.like(table[index.local], partition)


@register(torch.Tensor.__setitem__, family="indexing")
def setitem(self: torch.Tensor, index: object, value: torch.Tensor | float) -> None:
    """In place, each rank its own part; an ordinary tensor that gets cut values becomes cut."""
    if not isinstance(self, Sharded):
        if not isinstance(value, Sharded) or _has_cut(index):
            raise refused(self, [index, value], "the index into an ordinary tensor is cut")
        if not value.partition.axes:
            self[index] = value.block  # type: ignore[index]
            return
        self = made_cut(self, _cut_for(self, index, value), value, "assignment to a part")
    check_writable(self, "assignment to a part")
    if isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.dim() == self.dim():
        if isinstance(value, torch.Tensor) and value.dim():
            raise refused(self, index, "a mask takes one number")
        apply_pointwise(torch.Tensor.masked_fill_, (self, index, value), {})
        return
    found = parse(self, index)
    if found.new:
        raise refused(self, index, "None in an assignment; reshape the value instead")
    region = _region(self, found)
    box = region.box(self.grid.coords)
    origin = self.box.lo
    where: list[slice | torch.Tensor] = [slice(None)] * self.dim()
    for dim, span in found.spans.items():
        where[dim] = span.slice(box.interval(dim), origin[dim])
    if found.positions is not None:
        where[found.positions[0]] = found.positions[1]
    part = _part(value, region, found.single, self)
    place = tuple(where)
    # Of `x[:, 0] += y` the value is the place itself, which torch knows by the same strides; those
    # of dims of one element may be others.
    if isinstance(part, torch.Tensor) and part.data_ptr() == self.local[place].data_ptr():
        part = part.clone()
    self.local[place] = part
    self.note_change()


def _has_cut(index: object) -> bool:
    items = index if isinstance(index, tuple | list) else (index,)
    return any(isinstance(item, Sharded) for item in items)


def _cut_for(ordinary: torch.Tensor, index: object, value: Sharded) -> Partition:
    """How an ordinary tensor is to be cut that gets cut values: along the same axes.

    A dim all of which is written is cut as the values are, others in balanced shards.
    """
    x = value.like(ordinary, Partition.whole(ordinary.shape))
    found = parse(x, index)
    if found.new:
        raise refused(x, index, "None in an assignment; reshape the value instead")
    region = _region(x, found)
    dims = [dim for dim in range(x.dim()) if dim not in found.single]
    cuts: list[Cut | None] = [None] * x.dim()
    extents = [region.shape[dim] for dim in dims]
    offset = len(dims) - value.dim()
    given = [1] * offset + list(value.shape)
    if len(given) != len(extents) or any(
        a not in (1, b) for a, b in zip(given, extents, strict=True)
    ):
        raise refused(ordinary, value, "a tensor cannot be given a cut value of another shape")
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
    """The chosen part, cut as ``x`` is; ranks may have nothing of it."""
    region = x.partition
    for dim, span in found.spans.items():
        cut = region.cuts[dim]
        region = region.with_dim(dim, span.count, cut and span.follow(cut))
    if found.positions is not None:
        region = region.with_dim(found.positions[0], len(found.positions[1]), None)
    return region


def _part(
    value: torch.Tensor | float, region: Partition, single: Sequence[int], x: Sharded
) -> torch.Tensor | float:
    """What this rank writes: its part of a value that is broadcast to the region."""
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
