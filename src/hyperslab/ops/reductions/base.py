"""What all reductions share: their dims, the ranks that take part, and the result's partition."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from hyperslab.comm import Communicator, all_reduce_sum
from hyperslab.geometry import Partition
from hyperslab.tensor import Sharded, gather

Dims = int | tuple[int, ...] | None
"""Dims counted from the front, as the dispatcher hands them to a rule; None means all of them."""

_LAYOUTS = 4096  # that are remembered, of reductions of one partition each


def reduced_dims(x: Sharded, dim: Dims) -> tuple[int, ...]:
    """The dims that a reduction takes away, in their order; none named means all."""
    if isinstance(dim, int):
        return (dim,)
    return tuple(sorted(dim)) if dim else tuple(range(x.dim()))


def finish(x: Sharded, block: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    """Wrap a reduction's result; ordinary once the batch dim is gone and nothing is cut."""
    partition = _reduced(x.partition, tuple(dims), keepdim)
    if 0 in dims and not partition.axes:
        return block
    return x.like(block, partition)


@functools.lru_cache(_LAYOUTS)
def _reduced(partition: Partition, dims: tuple[int, ...], keepdim: bool) -> Partition:
    """How a result is cut of which ``dims`` are reduced."""
    shape = []
    cuts = []
    for d, (extent, cut) in enumerate(zip(partition.shape, partition.cuts, strict=True)):
        if d not in dims:
            shape.append(extent)
            cuts.append(cut)
        elif keepdim:
            shape.append(1)
            cuts.append(None)
    return Partition(tuple(shape), tuple(cuts))


def group_over(x: Sharded, dims: Iterable[int]) -> Communicator | None:
    """The ranks over which ``dims`` are cut; ``None`` where this rank holds all of them."""
    return x.grid.group([cut.axis for d in dims if (cut := x.partition.cuts[d]) is not None])


def without_empty_shards(x: Sharded, dims: Iterable[int]) -> Sharded:
    """Gathered where some rank has nothing of ``dims``, which has no mean and no maximum."""
    cuts = [x.partition.cuts[d] for d in dims]
    thin = [cut.axis for cut in cuts if cut is not None and cut.thin]
    return gather(x, thin) if thin else x


def total(
    x: Sharded, block: torch.Tensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype
) -> torch.Tensor:
    """The sum over ranks of a block whose ``dims`` are reduced already, as ``dtype``."""
    whole = all_reduce_sum(block, group_over(x, dims), "a sum over cut dims")
    return finish(x, whole.to(dtype), dims, keepdim)
