"""Norms of vectors over dims, cut or not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hyperslab.comm.collectives import all_reduce_sum, stack_ranks
from hyperslab.errors import LayoutError
from hyperslab.ops.common.half_precision import wide
from hyperslab.ops.reductions.base import (
    Dims,
    finish,
    group_over,
    reduced_dims,
    without_empty_shards,
)
from hyperslab.ops.reductions.extrema import extremum
from hyperslab.tensor import Sharded, register

Order = float | str | None


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
    return finish(x, norm_block(x, float(ord), dims, keepdim, dtype), dims, keepdim)


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
    return vector_norm(input, _order(p), dim, keepdim, dtype=dtype)


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
    return vector_norm(input, _order(ord), dim, keepdim, dtype=dtype)


def _order(given: Order) -> float:
    return 2.0 if given is None or given == "fro" else float(given)


def _matrix_norm(name: str, ord: Order, x: Sharded) -> LayoutError:
    return LayoutError(
        f"{name}: the matrix norm {ord!r} has no rule for a cut tensor {x.partition} on {x.grid}\n"
        "    use x.full(), or torch.linalg.vector_norm(x, ord, dim) for the norm of a vector"
    )
