"""Looks positions up in several dims at once, or in tables of several dims, where dims are cut.

A *table* holds the positions along one dim, and is broadcast with those of other dims. In reading
order: tables that have a row for each sample, of which each rank takes its own; tables that are
cut; ordinary ones, whose positions may lie on any rank.
"""

from __future__ import annotations

import torch

from hyperslab.comm import Communicator, log_once
from hyperslab.comm.collectives import all_reduce_sum
from hyperslab.geometry import Cut, Partition
from hyperslab.kernels.memory_format import accumulator
from hyperslab.ops.operands import block_of, common_partition, operand_block, whole_of
from hyperslab.ops.reductions import group_over
from hyperslab.tensor import Sharded, gather


def is_cut(x: torch.Tensor) -> bool:
    return isinstance(x, Sharded) and bool(x.partition.axes)


def rows_of_each(x: Sharded, tables: dict[int, torch.Tensor]) -> Cut | None:
    """Takes this rank's rows of tables that have one for each sample: ``x[arange(n)[:, None], i]``.

    Returns the cut that the rows are in, or None where they are in any other order.
    """
    dim, cut = next((d, c) for d in tables if (c := x.partition.cuts[d]) is not None)
    dims = max(table.dim() for table in tables.values())
    each = torch.arange(cut.extent, device=x.device).view(-1, *[1] * (dims - 1))
    # One row may stand for many.
    if tables[dim].shape != each.shape or cut.extent == 1 or is_cut(tables[dim]):
        return None
    if x.grid.has_values and not bool((tables[dim] == each).all()):
        return None
    own = x.box.interval(dim)
    for other, table in tables.items():
        if table.dim() == dims and len(table) == cut.extent:
            rows = Partition(tuple(table.shape), (cut, *[None] * (dims - 1)))
            part = block_of(table, rows, x.grid, "positions of each sample")
            tables[other] = part - (own[0] if other == dim else 0)
        else:
            tables[other] = whole_of(table, "positions")
    return cut


def chosen_by_cut(x: Sharded, tables: dict[int, torch.Tensor], front: int) -> Sharded:
    """Looks up positions that are cut; what they choose is cut as they are.

    ``front``: the first of the dims that the tables make.

    Distribution scheme: 1. gather along the axes that cut the tables, or dims that they choose
    from, 2. every rank looks up its own positions.
    """
    chosen = common_partition([*tables.values()], torch.Tensor.__getitem__)
    held = {cut.axis for dim in tables if (cut := x.partition.cuts[dim]) is not None}
    axes = [axis for axis in x.partition.axes if axis in held or axis in chosen.axes]
    if axes:
        log_once(
            x.grid,
            f"positions that are cut, in {x.partition}: it is gathered along {', '.join(axes)}, "
            "and every rank looks up its own",
        )
    x = gather(x, axes)
    own = {dim: operand_block(t, target=chosen, like=x) for dim, t in tables.items()}
    block = x.local[tuple(own.get(dim, slice(None)) for dim in range(x.dim()))]
    rest = [(x.shape[d], cut) for d, cut in enumerate(x.partition.cuts) if d not in tables]
    rest[front:front] = zip(chosen.shape, chosen.cuts, strict=True)
    return x.like(block, Partition(*(tuple(part) for part in zip(*rest, strict=True))), fresh=True)


def chosen_anywhere(x: Sharded, tables: dict[int, torch.Tensor], front: int) -> torch.Tensor:
    """Looks up positions along cut dims: each rank those that it has, which are added up.

    ``front``: the first of the dims that the tables make.
    """
    own, places = _own_places(x, tables)
    block = x.local[tuple(places.get(dim, slice(None)) for dim in range(x.dim()))]
    own = own.view(*own.shape, *[1] * (block.dim() - front - own.dim()))
    group = group_over(x, tables)
    return from_owners(block.masked_fill(~own, 0), group, "positions along cut dims")


def write_anywhere(
    x: Sharded, tables: dict[int, torch.Tensor], front: int, value: torch.Tensor | float
) -> None:
    """Writes at positions, in place: each rank at those that it has."""
    own, places = _own_places(x, tables)
    place = tuple(
        places[dim].expand(own.shape)[own] if dim in places else slice(None)
        for dim in range(x.dim())
    )
    if isinstance(value, torch.Tensor):
        rest = [dim for dim in range(x.dim()) if dim not in tables]
        shape = [x.shape[dim] for dim in rest]
        box: list[slice | torch.Tensor] = [x.box.slices()[dim] for dim in rest]
        shape[front:front] = own.shape
        box[front:front] = own.nonzero(as_tuple=True)
        value = whole_of(value, "values at positions").expand(shape)[tuple(box)].to(x.dtype)
    x.local[place] = value


def _own_places(
    x: Sharded, tables: dict[int, torch.Tensor]
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Returns which positions lie on this rank, and the places of all in its block, or any there.

    Tables are ordinary, and no shard is empty.
    """
    own = torch.ones((), dtype=torch.bool, device=x.device)
    places = {}
    for dim, table in tables.items():
        extent = x.shape[dim]
        if x.grid.has_values and bool(((table < -extent) | (table >= extent)).any()):
            raise IndexError(f"a position is out of bounds for dim {dim} with size {extent}")
        lo, hi = x.box.interval(dim)
        place = torch.where(table < 0, table + extent, table) - lo
        own = own & (place >= 0) & (place < hi - lo)
        places[dim] = place.clamp(0, hi - lo - 1)
    return own, places


def from_owners(x: torch.Tensor, group: Communicator | None, what: str) -> torch.Tensor:
    """Returns elements of any type that are zero on all ranks of ``group`` but their owner."""
    wide = x.to(torch.uint8 if x.dtype == torch.bool else accumulator(x.dtype))
    return all_reduce_sum(wide, group, what).to(x.dtype)
