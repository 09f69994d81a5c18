"""Sums, means, products and counts over dims, cut or not."""

from __future__ import annotations

import math

import torch

from hyperslab.comm import all_reduce_sum
from hyperslab.comm.collectives import stack_ranks
from hyperslab.ops.common.half_precision import accumulator, wide
from hyperslab.ops.reductions.base import (
    Dims,
    finish,
    group_over,
    reduced_dims,
    total,
    without_empty_shards,
)
from hyperslab.tensor import Sharded, register


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
    return total(input, block, dims, keepdim, whole)


@register(torch.nansum, torch.Tensor.nansum, family="reductions", dims=["dim"])
def nansum(
    input: Sharded, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Over any dims, NaN counting as zero."""
    dims = reduced_dims(input, dim)
    whole = _sum_type(input, dtype)
    block = torch.nansum(input.block, dims, keepdim=keepdim, dtype=accumulator(whole))
    return total(input, block, dims, keepdim, whole)


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
    return total(x, block if share == 1 else block * share, dims, keepdim, whole)


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
    return finish(input, (sums / numbers).to(whole), dims, keepdim)


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
    block = wide(input.block.to(whole))
    local = block.prod() if dim is None else block.prod(dims[0], keepdim)
    stack = stack_ranks(local, group_over(input, dims), "a product over cut dims")
    return finish(input, stack.prod(0).to(whole), dims, keepdim)


@register(torch.count_nonzero, torch.Tensor.count_nonzero, family="reductions", dims=["dim"])
def count_nonzero(input: Sharded, dim: Dims = None) -> torch.Tensor:
    """Over any dims."""
    dims = reduced_dims(input, dim)
    return total(input, torch.count_nonzero(input.block, dims), dims, False, torch.int64)


@register(torch.any, torch.Tensor.any, family="reductions", dims=["dim"])
def any_(input: Sharded, dim: Dims = None, keepdim: bool = False) -> torch.Tensor:
    """Over any dims; ``bool(x.any())`` is the same on all ranks where all dims are reduced."""
    return _any(input, input.block != 0, dim, keepdim, negate=False)


@register(torch.all, torch.Tensor.all, family="reductions", dims=["dim"])
def all_(input: Sharded, dim: Dims = None, keepdim: bool = False) -> torch.Tensor:
    """Over any dims; ``bool(x.all())`` is the same on all ranks where all dims are reduced."""
    return _any(input, input.block == 0, dim, keepdim, negate=True)


def _any(x: Sharded, hits: torch.Tensor, dim: Dims, keepdim: bool, *, negate: bool) -> torch.Tensor:
    """Whether there is any hit on any rank, or its negation: all is no zero anywhere."""
    dims = () if dim == () else reduced_dims(x, dim)
    number = hits.sum(dims, keepdim=keepdim) if dims or dim is None else hits
    found = all_reduce_sum(number, group_over(x, dims), "any or all over cut dims") != 0
    result = ~found if negate else found
    return finish(x, result.to(torch.uint8) if x.dtype == torch.uint8 else result, dims, keepdim)
