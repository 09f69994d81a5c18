"""Distributes norms of vectors, similarities and distances over dims, cut or not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hyperslab.comm.collectives import all_reduce_sum, stack_ranks
from hyperslab.errors import LayoutError
from hyperslab.kernels.memory_format import as_float32
from hyperslab.ops.operands import common_partition, operand_block
from hyperslab.ops.overloads import Operator
from hyperslab.ops.reductions.extrema import extremum
from hyperslab.ops.reductions.sums import (
    Dims,
    group_over,
    reduced_dims,
    sum_over_ranks,
    without_empty_shards,
    wrap_reduced,
)
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import read_dim

Order = float | str | None


def norm_block(
    x: Sharded, ord: float, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None
) -> torch.Tensor:
    """Computes the block of a vector norm over ``dims``.

    Distribution scheme: 1. the norm of the block, 2. the norms of all ranks are stacked, 3. their
    norm; for infinite orders the extremum of the absolute values.
    """
    group = group_over(x, dims)
    if group is None:
        return torch.linalg.vector_norm(x.local, ord, dims, keepdim, dtype=dtype)
    block = as_float32(x.local if dtype is None else x.local.to(dtype))
    if math.isinf(ord):
        kind = torch.amax if ord > 0 else torch.amin
        whole = extremum(x, block.abs(), dims, keepdim, kind)
    else:
        local = torch.linalg.vector_norm(block, ord, dims, keepdim)
        if ord == 0:
            whole = all_reduce_sum(local, group, "a norm over cut dims")
        else:
            stack = stack_ranks(local, group, "a norm over cut dims")
            whole = torch.linalg.vector_norm(stack, ord, 0)
    return whole.to(torch.linalg.vector_norm(x.local.new_zeros(1), dtype=dtype).dtype)


@register(torch.linalg.vector_norm, family="reductions", dims=["dim"])
def vector_norm(
    x: Sharded,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Of any order over any dims."""
    dims = reduced_dims(x, dim)
    x = without_empty_shards(x, dims)
    return wrap_reduced(x, norm_block(x, float(ord), dims, keepdim, dtype), dims, keepdim)


@register(torch.norm, torch.Tensor.norm, family="reductions", dims=["dim"])
def norm(
    input: Sharded,
    p: Order = "fro",
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Vector norms of any order over any dims, Frobenius norms; not nuclear ones."""
    if isinstance(p, str) and p != "fro":
        raise _matrix_norm("norm", p, input)
    return vector_norm(input, _read_order(p), dim, keepdim, dtype=dtype)


@register(torch.linalg.norm, family="reductions", dims=["dim"])
def linalg_norm(
    input: Sharded,
    ord: Order = None,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Vector norms over any dims, Frobenius norms; not other matrix norms."""
    vector = isinstance(dim, int) or (dim is not None and len(dim) == 1)
    if ord is not None and ord != "fro" and not vector and (dim is not None or input.dim() != 1):
        raise _matrix_norm("linalg.norm", ord, input)
    return vector_norm(input, _read_order(ord), dim, keepdim, dtype=dtype)


def _read_order(given: Order) -> float:
    return 2.0 if given is None or given == "fro" else float(given)


def _matrix_norm(name: str, ord: Order, x: Sharded) -> LayoutError:
    return LayoutError(
        f"{name}: the matrix norm {ord!r} has no rule for a cut tensor {x.partition} on {x.grid}\n"
        "    use x.full(), or torch.linalg.vector_norm(x, ord, dim) for the norm of a vector"
    )


def _broadcast_operands(function: Operator, *operands: torch.Tensor) -> list[Sharded]:
    """Cuts operands alike and expands them to their common global shape."""
    target = common_partition(operands, function)
    like = next(value for value in operands if isinstance(value, Sharded))
    shape = target.box(like.grid.coords).shape
    blocks = [operand_block(value, target=target, like=like) for value in operands]
    return [like.like(block.expand(shape), target) for block in blocks]


@register(F.cosine_similarity, family="reductions")
def cosine_similarity(
    x1: torch.Tensor, x2: torch.Tensor, dim: int = 1, eps: float = 1e-8
) -> torch.Tensor:
    """Over one dim, cut or not: the sum of products of what is normalised."""
    a, b = _broadcast_operands(F.cosine_similarity, x1, x2)
    dims = (read_dim(dim, a.dim(), "cosine_similarity"),)
    a = without_empty_shards(a, dims)
    b = without_empty_shards(b, dims)
    if group_over(a, dims) is None:
        return wrap_reduced(a, F.cosine_similarity(a.local, b.local, dims[0], eps), dims, False)
    probes = (value.local.new_zeros(1) for value in (a, b))
    dtype = F.cosine_similarity(next(probes), next(probes), 0).dtype  # autocast may choose another
    first, second = (
        _unit_vector(value.like(as_float32(value.local.to(dtype))), dims, eps) for value in (a, b)
    )
    return sum_over_ranks(a, (first * second).sum(dims), dims, False, dtype)


def _unit_vector(x: Sharded, dims: tuple[int, ...], eps: float) -> torch.Tensor:
    """Divides by the norm, at least ``eps``; as in torch the gradient passes that limit."""
    norm = norm_block(x, 2.0, dims, True, None)
    return x.local / (norm + (norm.clamp_min(eps) - norm).detach())


@register(F.pairwise_distance, family="reductions")
def pairwise_distance(
    x1: torch.Tensor,
    x2: torch.Tensor,
    p: float = 2.0,
    eps: float = 1e-6,
    keepdim: bool = False,
) -> torch.Tensor:
    """Over the last dim, cut or not."""
    a, b = _broadcast_operands(F.pairwise_distance, x1, x2)
    return vector_norm(a.like(a.local - b.local + eps), p, a.dim() - 1, keepdim)


@register(torch.dist, torch.Tensor.dist, family="reductions")
def dist(input: torch.Tensor, other: torch.Tensor, p: float = 2) -> torch.Tensor:
    """Over all dims, cut or not."""
    a, b = _broadcast_operands(torch.dist, input, other)
    return vector_norm(a.like(a.local - b.local), p)
