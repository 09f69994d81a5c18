"""Sums and means over cut dims."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

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


def group_over(x: Sharded, dims: Iterable[int]) -> dist.ProcessGroup | None:
    """The ranks over which ``dims`` are cut; ``None`` where this rank holds all of them."""
    return x.grid.group([cut.axis for d in dims if (cut := x.partition.cuts[d]) is not None])


def total(
    x: Sharded, block: torch.Tensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype
) -> Any:
    """The sum over ranks of a block whose ``dims`` are reduced already, as ``dtype``."""
    whole = all_reduce_sum(block, group_over(x, dims), "a sum over cut dims")
    return finish(x, whole.to(dtype), dims, keepdim)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """Partial sums of half precision are kept in float32: one of them may overflow."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@register(torch.sum, torch.Tensor.sum, family="reduction")
def sum(
    input: Any,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
    axis: Any = None,
    keepdims: bool = False,
) -> Any:
    """Over any dims; an ordinary tensor when the batch is summed too and nothing stays cut."""
    dims, keep = reduced_dims(input, dim if axis is None else axis), keepdim or keepdims
    whole = dtype or (input.dtype if _is_inexact(input.dtype) else torch.int64)
    block = torch.sum(input.local, dims, keepdim=keep, dtype=_accumulator(whole))
    return total(input, block, dims, keep, whole)


@register(torch.mean, torch.Tensor.mean, family="reduction")
def mean(
    input: Any,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
    axis: Any = None,
    keepdims: bool = False,
) -> Any:
    """Over any dims; an ordinary tensor when the batch is averaged too and nothing stays cut."""
    dims, keep = reduced_dims(input, dim if axis is None else axis), keepdim or keepdims
    whole = dtype or input.dtype
    # The local mean times the share of elements: sums of half precision would overflow.
    block = torch.mean(input.local, dims, keepdim=keep, dtype=_accumulator(whole))
    count = math.prod(input.shape[d] for d in dims)
    share = math.prod(input.local.shape[d] for d in dims) / count
    return total(input, block if share == 1 else block * share, dims, keep, whole)


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
