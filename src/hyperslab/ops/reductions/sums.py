"""Distributes sums, means, products, counts and variances over dims, cut or not.

First what all reductions share: their dims, the ranks that take part, the result's partition.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence

import torch

from hyperslab.comm import AXES, Communicator, all_reduce_sum
from hyperslab.comm.collectives import stack_ranks
from hyperslab.errors import LayoutError
from hyperslab.geometry import Partition
from hyperslab.kernels.memory_format import accumulator, as_float32
from hyperslab.ops.operands import device_constant
from hyperslab.ops.overloads import Operator, register_each
from hyperslab.tensor import Sharded, gather, register

Dims = int | tuple[int, ...] | None
"""Types dims counted from the front, as the dispatcher passes them; None means all of them."""

_LAYOUTS = 4096  # that are remembered, of reductions of one partition each


def reduced_dims(x: Sharded, dim: Dims) -> tuple[int, ...]:
    """Returns the dims that a reduction takes away, in order; none named means all."""
    if isinstance(dim, int):
        return (dim,)
    return tuple(sorted(dim)) if dim else tuple(range(x.dim()))


def wrap_reduced(
    x: Sharded, block: torch.Tensor, dims: Sequence[int], keepdim: bool
) -> torch.Tensor:
    """Wrap a reduction's result; ordinary once the batch dim is gone and nothing is cut."""
    partition = _reduced_partition(x.partition, tuple(dims), keepdim)
    if 0 in dims and not partition.axes:
        return block
    return x.like(block, partition)


@functools.lru_cache(_LAYOUTS)
def _reduced_partition(partition: Partition, dims: tuple[int, ...], keepdim: bool) -> Partition:
    """Returns the partition of a result whose ``dims`` are reduced."""
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
    """Returns the ranks over which ``dims`` are cut; ``None`` where this rank holds all of them."""
    return x.grid.group([cut.axis for d in dims if (cut := x.partition.cuts[d]) is not None])


def without_empty_shards(x: Sharded, dims: Iterable[int]) -> Sharded:
    """Gathers ``x`` where some rank has nothing of ``dims``, which has no mean and no maximum."""
    cuts = [x.partition.cuts[d] for d in dims]
    thin = [cut.axis for cut in cuts if cut is not None and cut.thin]
    return gather(x, thin) if thin else x


def sum_over_ranks(
    x: Sharded, block: torch.Tensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Sums a block whose ``dims`` are reduced already over ranks, as ``dtype``."""
    whole = all_reduce_sum(block, group_over(x, dims), "a sum over cut dims")
    return wrap_reduced(x, whole.to(dtype), dims, keepdim)


def _sum_type(x: Sharded, dtype: torch.dtype | None) -> torch.dtype:
    inexact = x.dtype.is_floating_point or x.dtype.is_complex
    return dtype or (x.dtype if inexact else torch.int64)


@register(torch.sum, torch.Tensor.sum, family="reductions", dims=["dim"])
def sum(
    input: Sharded, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Over any dims; an ordinary tensor when the batch is summed too and nothing stays cut."""
    dims = reduced_dims(input, dim)
    whole = _sum_type(input, dtype)
    block = torch.sum(input.block, dims, keepdim=keepdim, dtype=accumulator(whole))
    return sum_over_ranks(input, block, dims, keepdim, whole)


@register(torch.nansum, torch.Tensor.nansum, family="reductions", dims=["dim"])
def nansum(
    input: Sharded, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Over any dims, NaN counting as zero."""
    dims = reduced_dims(input, dim)
    whole = _sum_type(input, dtype)
    block = torch.nansum(input.block, dims, keepdim=keepdim, dtype=accumulator(whole))
    return sum_over_ranks(input, block, dims, keepdim, whole)


@register(torch.mean, torch.Tensor.mean, family="reductions", dims=["dim"])
def mean(
    input: Sharded, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Over any dims; an ordinary tensor when the batch is averaged too and nothing stays cut."""
    dims = reduced_dims(input, dim)
    whole = dtype or input.dtype
    x = without_empty_shards(input, dims)
    # The local mean times the share of elements: sums of half precision would overflow.
    block = torch.mean(x.block, dims, keepdim=keepdim, dtype=accumulator(whole))
    count = math.prod(x.shape[d] for d in dims)
    share = math.prod(x.block.shape[d] for d in dims) / count if count else 1
    return sum_over_ranks(x, block if share == 1 else block * share, dims, keepdim, whole)


@register(torch.nanmean, torch.Tensor.nanmean, family="reductions", dims=["dim"])
def nanmean(
    input: Sharded, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Over any dims, of what is not NaN."""
    dims = reduced_dims(input, dim)
    whole = dtype or input.dtype
    block = torch.nansum(input.block, dims, keepdim=keepdim, dtype=accumulator(whole))
    number = input.block.isnan().logical_not_().sum(dims, keepdim=keepdim)
    group = group_over(input, dims)
    sums = all_reduce_sum(block, group, "a mean over cut dims")
    numbers = all_reduce_sum(number, group, "a mean over cut dims")
    return wrap_reduced(input, (sums / numbers).to(whole), dims, keepdim)


@register(torch.prod, torch.Tensor.prod, family="reductions", dims=["dim"])
def prod(
    input: Sharded,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Over one dim or all: the product of all ranks' products."""
    dims = reduced_dims(input, dim)
    whole = torch.prod(input.block.new_ones(1), dtype=dtype).dtype
    block = as_float32(input.block.to(whole))
    local = block.prod() if dim is None else block.prod(dims[0], keepdim)
    stack = stack_ranks(local, group_over(input, dims), "a product over cut dims")
    return wrap_reduced(input, stack.prod(0).to(whole), dims, keepdim)


@register(torch.count_nonzero, torch.Tensor.count_nonzero, family="reductions", dims=["dim"])
def count_nonzero(input: Sharded, dim: Dims = None) -> torch.Tensor:
    """Over any dims."""
    dims = reduced_dims(input, dim)
    return sum_over_ranks(input, torch.count_nonzero(input.block, dims), dims, False, torch.int64)


@register(torch.any, torch.Tensor.any, family="reductions", dims=["dim"])
def any_(input: Sharded, dim: Dims = None, keepdim: bool = False) -> torch.Tensor:
    """Over any dims; ``bool(x.any())`` is the same on all ranks where all dims are reduced."""
    return _any(input, input.block != 0, dim, keepdim, negate=False)


@register(torch.all, torch.Tensor.all, family="reductions", dims=["dim"])
def all_(input: Sharded, dim: Dims = None, keepdim: bool = False) -> torch.Tensor:
    """Over any dims; ``bool(x.all())`` is the same on all ranks where all dims are reduced."""
    return _any(input, input.block == 0, dim, keepdim, negate=True)


def _any(x: Sharded, hits: torch.Tensor, dim: Dims, keepdim: bool, *, negate: bool) -> torch.Tensor:
    """Tells if any rank has a hit, or negates that: all means no zero anywhere."""
    dims = () if dim == () else reduced_dims(x, dim)
    number = hits.sum(dims, keepdim=keepdim) if dims or dim is None else hits
    found = all_reduce_sum(number, group_over(x, dims), "any or all over cut dims") != 0
    result = ~found if negate else found
    return wrap_reduced(
        x, result.to(torch.uint8) if x.dtype == torch.uint8 else result, dims, keepdim
    )


@register_each("var", "std", "var_mean", "std_mean", family="reductions", dims=["dim"])
def variance(
    operator: Operator,
    input: Sharded,
    dim: Dims | bool = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Over any dims, around the global mean; true counts where shards are uneven.

    Distribution scheme: 1. local mean and variance, 2. they are stacked from all ranks in one
    message, 3. each rank combines them (Chan et al. 1979), differentiably.
    """
    if isinstance(dim, bool):  # var(x, unbiased)
        unbiased = dim
        dim = None
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    dims = reduced_dims(input, dim)
    x = without_empty_shards(input, dims)
    name = operator.__name__
    if group_over(x, dims) is None:
        found = operator(x.local, dims, correction=correction, keepdim=keepdim)
        blocks = found if isinstance(found, tuple) else (found,)
    else:
        var, mean = _global_moments(x, dims, correction, keepdim)
        first = _square_root(var) if name.startswith("std") else var
        blocks = (first, mean) if name.endswith("_mean") else (first,)
    results = tuple(wrap_reduced(x, block.to(x.dtype), dims, keepdim) for block in blocks)
    return results if len(results) > 1 else results[0]


def _global_moments(
    x: Sharded, dims: Sequence[int], correction: float, keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes global variance and mean."""
    if x.dtype.is_complex:
        raise LayoutError(
            f"the variance of complex numbers over dims that are cut has no rule: {x.partition}\n"
            "    use hyperslab.gather(x, axes) before it"
        )
    local = torch.var_mean(as_float32(x.local), tuple(dims), correction=0, keepdim=keepdim)
    stack = stack_ranks(torch.stack(local), group_over(x, dims), "a variance over cut dims")
    variances, means = stack.unbind(1)
    count = math.prod(x.shape[d] for d in dims)
    shares = device_constant(_counts_by_rank(x, dims), means.device, means.dtype) / count
    shares = shares.view(-1, *[1] * (means.dim() - 1))
    mean = (means * shares).sum(0)
    var = ((variances + (means - mean).square()) * shares).sum(0)
    left = count - correction
    return var * (count / left if left > 0 else math.inf), mean


def _counts_by_rank(x: Sharded, dims: Sequence[int]) -> list[int]:
    """Counts the elements of ``dims`` that each rank of `group_over` holds, in rank order."""
    cuts = [cut for d in dims if (cut := x.partition.cuts[d]) is not None]
    cuts.sort(key=lambda cut: AXES.index(cut.axis))
    uncut = math.prod(x.shape[d] for d in dims if x.partition.cuts[d] is None)
    boxes = itertools.product(*(cut.intervals for cut in cuts))
    return [uncut * math.prod(hi - lo for lo, hi in box) for box in boxes]


def _square_root(var: torch.Tensor) -> torch.Tensor:
    """Takes the square root; its gradient at zero is zero, as that of torch's deviation."""
    positive = var > 0
    return torch.where(positive, torch.where(positive, var, 1).sqrt(), var)
