"""Norms, products and log-sum-exp over dims, cut or not; normalising by a norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.comm.collectives import all_reduce_sum, stack_ranks
from hyperslab.errors import LayoutError
from hyperslab.ops.reductions.extrema import extremum
from hyperslab.ops.reductions.sums import (
    finish,
    group_over,
    reduced_dims,
    reduction,
    wide,
    without_empty_shards,
)
from hyperslab.tensor import Sharded, register


def norm_block(
    x: Sharded, ord: float, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None
) -> torch.Tensor:
    """The block of a vector norm over ``dims``.

    Distribution scheme: 1. the norm of the block, 2. the norms of all ranks are stacked, 3. their
    norm; for infinite orders the extremum of the absolute values.
    """
    group = group_over(x, dims)
    if group is None:
        return torch.linalg.vector_norm(x.local, ord, dims, keepdim, dtype=dtype)
    block = wide(x.local if dtype is None else x.local.to(dtype))
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


def _norm(x: Sharded, ord: float, dim: Any, keepdim: bool, dtype: torch.dtype | None) -> Any:
    dims = reduced_dims(x, dim)
    x = without_empty_shards(x, dims)
    return finish(x, norm_block(x, float(ord), dims, keepdim, dtype), dims, keepdim)


@reduction(torch.linalg.vector_norm)
def vector_norm(
    x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Of any order over any dims."""
    return _norm(x, ord, dim, keepdim, dtype)


@reduction(torch.norm, torch.Tensor.norm)
def norm(
    input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    """Vector norms of any order over any dims, Frobenius norms; not nuclear ones."""
    if isinstance(p, str) and p != "fro":
        raise _matrix_norm("norm", p, input)
    return _norm(input, 2 if p is None or p == "fro" else p, dim, keepdim, dtype)


@reduction(torch.linalg.norm)
def linalg_norm(
    input: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Vector norms over any dims, Frobenius norms; not other matrix norms."""
    vector = isinstance(dim, int) or (dim is not None and len(dim) == 1)
    if ord is not None and ord != "fro" and not vector and (dim is not None or input.dim() != 1):
        raise _matrix_norm("linalg.norm", ord, input)
    return _norm(input, 2 if ord is None or ord == "fro" else ord, dim, keepdim, dtype)


def _matrix_norm(name: str, ord: Any, x: Sharded) -> LayoutError:
    return LayoutError(
        f"{name}: the matrix norm {ord!r} has no rule for a cut tensor {x.partition} on {x.grid}\n"
        "    use x.full(), or torch.linalg.vector_norm(x, ord, dim) for the norm of a vector"
    )


@register(F.normalize, family="normalisation")
def normalize(
    input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None
) -> Sharded:
    """By the norm over any dims, cut or not."""
    if out is not None:
        raise LayoutError("normalize(out=...) has no rule; use its return value")
    dims = reduced_dims(input, dim)
    x = without_empty_shards(input, dims)
    return x.like(x.local / norm_block(x, float(p), dims, True, None).clamp_min(eps))


@reduction(torch.logsumexp, torch.Tensor.logsumexp, torch.special.logsumexp)
def logsumexp(input: Any, dim: Any, keepdim: bool = False) -> Any:
    """Over any dims: the log-sum-exp of all ranks' log-sum-exps."""
    dims = reduced_dims(input, dim)
    x = without_empty_shards(input, dims)
    group = group_over(x, dims)
    if group is None:
        return finish(x, torch.logsumexp(x.local, dims, keepdim), dims, keepdim)
    local = torch.logsumexp(wide(x.local), dims, keepdim)
    whole = torch.logsumexp(stack_ranks(local, group, "a log-sum-exp over cut dims"), 0)
    return finish(x, whole.to(torch.logsumexp(x.local.new_zeros(1), 0).dtype), dims, keepdim)


@reduction(torch.prod, torch.Tensor.prod)
def prod(input: Any, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Over one dim or all: the product of all ranks' products."""
    dims = reduced_dims(input, dim)
    whole = torch.prod(input.local.new_ones(1), dtype=dtype).dtype
    block = wide(input.local.to(whole))
    local = block.prod() if dim is None else block.prod(dims[0], keepdim)
    stack = stack_ranks(local, group_over(input, dims), "a product over cut dims")
    return finish(input, stack.prod(0).to(whole), dims, keepdim)
