"""Operators along one dim that must not be cut: sorting, ranks, quantiles, running sums."""

from __future__ import annotations

import torch

from hyperslab.errors import LayoutError
from hyperslab.ops.common.forms import Operator, register_each
from hyperslab.ops.common.operands import check_uncut
from hyperslab.ops.reductions.base import Dims, finish, reduced_dims
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe

Results = torch.Tensor | tuple[torch.Tensor, ...]
"""A tensor, or torch's named tuple of values and indices."""


def _finish(x: Sharded, found: Results, dim: int | None, keepdim: bool = True) -> Results:
    """Wrap blocks whose extent along ``dim`` may have changed, or that have lost it."""
    if not isinstance(found, torch.Tensor):
        named = type(found)
        return named([_finish_one(x, part, dim, keepdim) for part in found])
    return _finish_one(x, found, dim, keepdim)


def _finish_one(x: Sharded, block: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
    if dim is None:
        return finish(x, block, range(x.dim()), False)
    if keepdim:
        return x.like(block, x.partition.with_dim(dim, block.shape[dim], None))
    return finish(x, block, (dim,), False)


@register_each("sort", "argsort", family="reductions", dims=["dim"])
def sort(
    operator: Operator,
    input: Sharded,
    dim: int = -1,
    descending: bool = False,
    stable: bool = False,
) -> Results:
    """Along a dim that is not cut; otherwise refused."""
    check_uncut(input, (dim,), f"{operator.__name__} needs all of")
    return _finish(input, operator(input.local, dim=dim, descending=descending, stable=stable), dim)


@register(torch.msort, torch.Tensor.msort, family="reductions")
def msort(input: Sharded) -> Results:
    """Along a dim that is not cut; otherwise refused."""
    check_uncut(input, (0,), "msort needs all of")
    return _finish(input, torch.msort(input.local), 0)


@register_each("mode", "median", "nanmedian", family="reductions", dims=["dim"])
def middle(
    operator: Operator, input: Sharded, dim: int | None = None, keepdim: bool = False
) -> Results:
    """Along a dim that is not cut; otherwise refused."""
    name = operator.__name__
    if dim is None and name == "mode":
        dim = input.dim() - 1
    check_uncut(input, reduced_dims(input, dim), f"{name} needs all of")
    if dim is None:
        return _finish(input, operator(input.local), None)
    return _finish(input, operator(input.local, dim, keepdim), dim, keepdim)


@register(torch.topk, torch.Tensor.topk, family="reductions", dims=["dim"])
def topk(
    input: Sharded, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Results:
    """Along a dim that is not cut; otherwise refused."""
    check_uncut(input, (dim,), "topk needs all of")
    return _finish(input, torch.topk(input.local, k, dim, largest, sorted), dim)


@register(torch.kthvalue, torch.Tensor.kthvalue, family="reductions", dims=["dim"])
def kthvalue(input: Sharded, k: int, dim: int = -1, keepdim: bool = False) -> Results:
    """Along a dim that is not cut; otherwise refused."""
    check_uncut(input, (dim,), "kthvalue needs all of")
    return _finish(input, torch.kthvalue(input.local, k, dim, keepdim), dim, keepdim)


@register_each(
    "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", family="reductions", dims=["dim"]
)
def cumulative(operator: Operator, input: Sharded, dim: int, **options: object) -> Results:
    """Along a dim that is not cut; otherwise refused."""
    check_uncut(input, (dim,), f"{operator.__name__} needs all of")
    return _finish(input, operator(input.local, dim, **options), dim)


@register_each("quantile", "nanquantile", family="reductions", dims=["dim"])
def quantile(
    operator: Operator,
    input: Sharded,
    q: float | torch.Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    **options: object,
) -> torch.Tensor:
    """One quantile along a dim that is not cut; otherwise refused."""
    name = operator.__name__
    if isinstance(q, Sharded) or (isinstance(q, torch.Tensor) and q.dim() > 0):
        raise LayoutError(
            f"{name} of a cut tensor takes one q at a time, a number\n{describe([input, q])}"
            "    call it for each q, or use x.full()"
        )
    dims = reduced_dims(input, dim)
    check_uncut(input, dims, f"{name} needs all of")
    return finish(input, operator(input.local, q, dim, keepdim, **options), dims, keepdim)
