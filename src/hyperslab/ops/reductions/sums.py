"""Sums, means and counts over dims, cut or not, and what all reductions share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hyperslab.comm import all_reduce_sum
from hyperslab.errors import LayoutError
from hyperslab.geometry import Partition
from hyperslab.tensor import Sharded, gather, register

HALF = (torch.float16, torch.bfloat16)

NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim"}
"""What torch takes instead of its own names."""


def reduction(*functions: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the decorated function is the rule of these reductions."""

    def add(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def rule(*args: Any, **kwargs: Any) -> Any:
            if kwargs.pop("out", None) is not None:
                name = functions[0].__name__
                raise LayoutError(f"{name}(out=...) has no rule; use its return value")
            return run(*args, **{NUMPY_NAMES.get(key, key): v for key, v in kwargs.items()})

        return register(*functions, family="reduction")(rule)

    return add


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


def without_empty_shards(x: Sharded, dims: Iterable[int]) -> Sharded:
    """Gathered where some rank has nothing of ``dims``, which has no mean and no maximum."""
    cuts = [x.partition.cuts[d] for d in dims]
    thin = [cut.axis for cut in cuts if cut is not None and cut.thin]
    return gather(x, thin) if thin else x


def wide(block: torch.Tensor) -> torch.Tensor:
    """Half precision as float32: partial results may overflow, and are rounded once more."""
    return block.float() if block.dtype in HALF else block


def total(
    x: Sharded, block: torch.Tensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype
) -> Any:
    """The sum over ranks of a block whose ``dims`` are reduced already, as ``dtype``."""
    whole = all_reduce_sum(block, group_over(x, dims), "a sum over cut dims")
    return finish(x, whole.to(dtype), dims, keepdim)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """Partial sums of half precision are kept in float32: one of them may overflow."""
    return torch.float32 if dtype in HALF else dtype


def _sum_type(x: Sharded, dtype: torch.dtype | None) -> torch.dtype:
    inexact = x.dtype.is_floating_point or x.dtype.is_complex
    return dtype or (x.dtype if inexact else torch.int64)


@reduction(torch.sum, torch.Tensor.sum)
def sum(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Over any dims; an ordinary tensor when the batch is summed too and nothing stays cut."""
    dims, whole = reduced_dims(input, dim), _sum_type(input, dtype)
    block = torch.sum(input.local, dims, keepdim=keepdim, dtype=_accumulator(whole))
    return total(input, block, dims, keepdim, whole)


@reduction(torch.nansum, torch.Tensor.nansum)
def nansum(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Over any dims, NaN counting as zero."""
    dims, whole = reduced_dims(input, dim), _sum_type(input, dtype)
    block = torch.nansum(input.local, dims, keepdim=keepdim, dtype=_accumulator(whole))
    return total(input, block, dims, keepdim, whole)


@reduction(torch.mean, torch.Tensor.mean)
def mean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Over any dims; an ordinary tensor when the batch is averaged too and nothing stays cut."""
    dims, whole = reduced_dims(input, dim), dtype or input.dtype
    x = without_empty_shards(input, dims)
    # The local mean times the share of elements: sums of half precision would overflow.
    block = torch.mean(x.local, dims, keepdim=keepdim, dtype=_accumulator(whole))
    count = math.prod(x.shape[d] for d in dims)
    share = math.prod(x.local.shape[d] for d in dims) / count if count else 1
    return total(x, block if share == 1 else block * share, dims, keepdim, whole)


@reduction(torch.nanmean, torch.Tensor.nanmean)
def nanmean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Over any dims, of what is not NaN."""
    dims, whole = reduced_dims(input, dim), dtype or input.dtype
    block = torch.nansum(input.local, dims, keepdim=keepdim, dtype=_accumulator(whole))
    number = input.local.isnan().logical_not_().sum(dims, keepdim=keepdim)
    group = group_over(input, dims)
    sums = all_reduce_sum(block, group, "a mean over cut dims")
    numbers = all_reduce_sum(number, group, "a mean over cut dims")
    return finish(input, (sums / numbers).to(whole), dims, keepdim)


@reduction(torch.count_nonzero, torch.Tensor.count_nonzero)
def count_nonzero(input: Any, dim: Any = None) -> Any:
    """Over any dims."""
    dims = reduced_dims(input, dim)
    return total(input, torch.count_nonzero(input.local, dims), dims, False, torch.int64)


@reduction(torch.any, torch.Tensor.any)
def any_(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Over any dims; ``bool(x.any())`` is the same on all ranks where all dims are reduced."""
    return _any(input, input.local != 0, dim, keepdim, negate=False)


@reduction(torch.all, torch.Tensor.all)
def all_(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Over any dims; ``bool(x.all())`` is the same on all ranks where all dims are reduced."""
    return _any(input, input.local == 0, dim, keepdim, negate=True)


def _any(x: Sharded, hits: torch.Tensor, dim: Any, keepdim: bool, *, negate: bool) -> Any:
    """Whether there is any hit on any rank, or its negation: all is no zero anywhere."""
    dims = () if dim == () or dim == [] else reduced_dims(x, dim)
    number = hits.sum(dims, keepdim=keepdim) if dims or dim is None else hits
    found = all_reduce_sum(number, group_over(x, dims), "any or all over cut dims") != 0
    result = ~found if negate else found
    return finish(x, result.to(torch.uint8) if x.dtype == torch.uint8 else result, dims, keepdim)
