"""Distributes what a mask chooses: how many elements that is no rank knows alone.

What is chosen is small beside a volume, mostly, so every rank gets all of it, in the serial order.
In reading order: where a mask is true; reading and writing there, for square brackets; the rules of
torch's own functions.
"""

from __future__ import annotations

from typing import Any

import torch

from hyperslab.comm import Communicator
from hyperslab.comm.collectives import stack_ranks
from hyperslab.errors import UnsupportedOp
from hyperslab.geometry import Partition
from hyperslab.ops.operands import block_of, first_cuts, whole_of
from hyperslab.ops.positions import from_owners
from hyperslab.ops.reductions import group_over
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe
from hyperslab.util.capture import refuse_capture
from hyperslab.util.torch_internals import EnableTorchFunction


def places_of(mask: Sharded) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the flat global positions where a mask is true, and which of them are this rank's.

    Distribution scheme: 1. find the positions in the block, 2. tell all ranks how many they are,
    3. stack the positions of all ranks that share the mask, and sort them.
    """
    what = "the places where a mask is true"
    _check_known(mask, what, "choose with torch.where or masked_fill")
    shape, lo = mask.shape, mask.box.lo
    found = mask.block.nonzero()
    own = found.new_zeros(len(found))
    for dim, extent in enumerate(shape):
        own = own * extent + found[:, dim] + lo[dim]
    group = group_over(mask, range(mask.dim()))
    everywhere = _listed(own, group, what).sort().values
    return everywhere, torch.searchsorted(everywhere, own)


def _check_known(x: Sharded, what: str, remedy: str) -> None:
    """Refuse what has a shape that depends on values, where these are not known."""
    refuse_capture(what, remedy)
    if not x.grid.has_values:
        raise UnsupportedOp(f"{what} are not known to a trace\n{describe([x])}    {remedy}")


def _listed(own: torch.Tensor, group: Communicator | None, what: str) -> torch.Tensor:
    """Joins what the ranks of ``group`` have, each as many numbers as it finds."""
    counts = stack_ranks(torch.full((1,), len(own), device=own.device), group, what).flatten()
    padded = own.new_zeros(max(counts.tolist()))
    padded[: len(own)] = own
    rows = stack_ranks(padded, group, what)
    return torch.cat([row[:count] for row, count in zip(rows, counts.tolist(), strict=True)])


def _aligned(x: torch.Tensor, mask: torch.Tensor, first: int) -> tuple[Sharded, Sharded]:
    """Cuts a tensor, and a mask of its dims from ``first`` on, alike."""
    like = next(v for v in (x, mask) if isinstance(v, Sharded))
    labels = [*enumerate(x.partition.cuts)] if isinstance(x, Sharded) else []
    if isinstance(mask, Sharded):
        labels += enumerate(mask.partition.cuts, first)
    known = first_cuts(labels)
    cuts = tuple(known.get(dim) for dim in range(x.dim()))
    whole = Partition(tuple(x.shape), cuts)
    part = Partition(tuple(mask.shape), cuts[first : first + mask.dim()])
    what = "aligning a mask"
    return (
        like.like(block_of(x, whole, like.grid, what), whole),
        like.like(block_of(mask, part, like.grid, what), part),
    )


def chosen_by_mask(x: torch.Tensor, mask: torch.Tensor, first: int = 0) -> Sharded:
    """Returns the elements of ``x`` where a mask of its dims from ``first`` on is true.

    Distribution scheme: 1. cut both alike, 2. find the places (`places_of`), 3. put this rank's
    elements in their places among all, and sum over the ranks that share the mask.
    """
    x, mask = _aligned(x, mask, first)
    where: tuple[slice | torch.Tensor, ...] = (*[slice(None)] * first, mask.block)
    rows = x.block[where]
    cuts = x.partition.cuts
    if (group := group_over(mask, range(mask.dim()))) is not None:
        everywhere, own = places_of(mask)
        shape = (*rows.shape[:first], len(everywhere), *rows.shape[first + 1 :])
        placed = rows.new_zeros(shape).index_copy(first, own, rows)
        rows = from_owners(placed, group, "what a mask chooses")
    rest = first + mask.dim()
    extents = (*x.shape[:first], rows.shape[first], *x.shape[rest:])
    partition = Partition(extents, (*cuts[:first], None, *cuts[rest:]))
    return x.like(rows, partition)


def write_where(x: Sharded, mask: torch.Tensor, value: torch.Tensor) -> None:
    """Writes into the elements of ``x`` where a mask of its first dims is true, in place.

    ``value`` is broadcast to what the mask chooses; every rank takes its part of it.
    """
    partition = Partition(tuple(mask.shape), x.partition.cuts[: mask.dim()])
    part = x.like(block_of(mask, partition, x.grid, "aligning a mask"), partition)
    everywhere, own = places_of(part)
    chosen = (len(everywhere), *x.shape[mask.dim() :])
    rows = whole_of(value, "what is written by a mask").expand(chosen)
    place: tuple[slice | torch.Tensor, ...] = (own, *x.box.slices()[mask.dim() :])
    x.local[part.block] = rows[place].to(x.dtype)


@register(torch.masked_select, torch.Tensor.masked_select, merged=True)
def masked_select(input: torch.Tensor, mask: torch.Tensor) -> Sharded:
    """Chooses elements by a mask, cut or not; every rank gets all that are chosen."""
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    with EnableTorchFunction():  # or torch would ask for no rule inside of one
        return chosen_by_mask(input.expand(shape), mask.expand(shape))


@register(
    torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere,
    merged=True,
)  # fmt: skip
def nonzero(input: Sharded, *, as_tuple: bool = False) -> Any:
    """Finds the global positions, ordinary tensors equal on all ranks."""
    everywhere, _ = places_of(input)
    places = torch.unravel_index(everywhere, input.shape) if input.dim() else ()
    if as_tuple:
        return places
    return torch.stack(places, 1) if places else everywhere.new_empty(len(everywhere), 0)


@register(torch.unique, torch.Tensor.unique, family="masks", merged=True)
def unique(
    input: Sharded,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """Lists the values, and how often each comes: ordinary tensors equal on all ranks."""
    what = "the values of a tensor"
    if return_inverse or dim is not None:
        raise UnsupportedOp(
            f"unique of a cut tensor lists values and counts alone\n{describe([input])}"
            "    leave return_inverse= and dim= out, or use x.full()"
        )
    _check_known(input, what, "compare with each value that there may be")
    group = group_over(input, range(input.dim()))
    own, counts = torch.unique(input.block, return_counts=True)
    values, places = torch.unique(_listed(own, group, what), return_inverse=True)
    if not return_counts:
        return values
    total = counts.new_zeros(len(values)).index_add(0, places, _listed(counts, group, what))
    return values, total
