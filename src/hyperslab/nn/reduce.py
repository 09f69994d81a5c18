"""Sums and means over cut dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hyperslab.comm import all_reduce_sum
from hyperslab.geometry import Partition
from hyperslab.tensor import Sharded, register


def reduced_dims(x: Sharded, dim: Any) -> tuple[int, ...]:
    """The dims that a reduction takes away, sorted and non-negative; none named means all."""
    if dim is None or dim == () or dim == []:
        return tuple(range(x.dim()))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    for d in dims:
        if not -x.dim() <= d < x.dim():
            raise IndexError(f"dim {d} of a tensor of {x.dim()} dims")
    return tuple(sorted(d % x.dim() for d in dims))


def finish(x: Sharded, local: torch.Tensor, dims: Sequence[int], keepdim: bool) -> Any:
    """Wrap a reduction's result; ordinary once the batch dim is gone and nothing is cut."""
    shape, cuts = [], []
    for d, (extent, cut) in enumerate(zip(x.partition.shape, x.partition.cuts, strict=True)):
        if d not in dims:
            shape.append(extent)
            cuts.append(cut)
        elif keepdim:
            shape.append(1)
            cuts.append(None)
    if 0 in dims and not any(cuts):
        return local
    return x.like(local, Partition(tuple(shape), tuple(cuts)))


def total(x: Sharded, block: torch.Tensor, dims: Sequence[int], keepdim: bool, what: str) -> Any:
    """The sum over ranks of a block whose ``dims`` are reduced already."""
    axes = [cut.axis for d in dims if (cut := x.partition.cuts[d]) is not None]
    return finish(x, all_reduce_sum(block, x.grid.group(axes), what), dims, keepdim)


@register(torch.sum, torch.Tensor.sum, family="reduction")
def sum(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Over any dims; an ordinary tensor when the batch is summed too and nothing stays cut."""
    dims = reduced_dims(input, dim)
    block = torch.sum(input.local, dims, keepdim=keepdim, dtype=dtype)
    return total(input, block, dims, keepdim, "sum")


@register(torch.mean, torch.Tensor.mean, family="reduction")
def mean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Over any dims; an ordinary tensor when the batch is averaged too and nothing stays cut."""
    dims = reduced_dims(input, dim)
    # The local mean times the share of elements: sums of half precision would overflow.
    block = torch.mean(input.local, dims, keepdim=keepdim, dtype=dtype)
    count = math.prod(input.shape[d] for d in dims)
    share = math.prod(input.local.shape[d] for d in dims) / count
    return total(input, block if share == 1 else block * share, dims, keepdim, "mean")
