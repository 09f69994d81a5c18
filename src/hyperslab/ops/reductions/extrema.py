"""Distributes maxima, minima, histograms, sorting and scans.

In reading order: maxima and minima over dims, cut or not (values, global indices and their
gradients); histograms; operators along one dim that must not be cut: sorting, ranks, quantiles,
running sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import torch
from torch.autograd.function import once_differentiable

from hyperslab.comm import Communicator, all_reduce_sum
from hyperslab.comm.collectives import reduce_in_place, stack_ranks
from hyperslab.errors import LayoutError
from hyperslab.kernels.memory_format import as_float32
from hyperslab.ops.elementwise.pointwise import apply_pointwise
from hyperslab.ops.operands import check_uncut
from hyperslab.ops.overloads import Operator, integers, register_each
from hyperslab.ops.reductions.sums import (
    Dims,
    group_over,
    reduced_dims,
    without_empty_shards,
    wrap_reduced,
)
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe, read_dim

LARGEST_INDEX = torch.iinfo(torch.int64).max

_ValuesAndIndices = tuple[torch.Tensor, torch.Tensor]


class _Extremum(torch.autograd.Function):
    """Finds the largest or smallest elements; equal ones share the gradient equally.

    Distribution scheme: 1. the local extremum, 2. the extremum of all ranks' ones. Backward: 1.
    how many elements of the block are equal to it, 2. one all-reduce of the number and of the
    gradient, 3. the block's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dims: Sequence[int],
        group: Communicator,
        kind: Callable[..., torch.Tensor],
        ties_of_nan: bool,
    ) -> torch.Tensor:
        found = stack_ranks(kind(x, dims, keepdim=True), group, "an extremum over cut dims")
        value = kind(found, 0)
        ctx.dims = dims
        ctx.group = group
        ctx.ties_of_nan = ties_of_nan
        ctx.save_for_backward(x, value)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, value = ctx.saved_tensors
        equal = x == value
        if ctx.ties_of_nan:
            equal |= x.isnan() & value.isnan()
        g = as_float32(gradient)
        both = torch.stack([equal.sum(ctx.dims, keepdim=True).to(g.dtype), g])
        number, g = reduce_in_place(both, ctx.group, "the gradient of an extremum")
        return (equal * (g / number)).to(x.dtype), None, None, None, None


def extremum(
    x: Sharded,
    block: torch.Tensor,
    dims: Sequence[int],
    keepdim: bool,
    kind: Callable[..., torch.Tensor],
    *,
    ties_of_nan: bool = False,
) -> torch.Tensor:
    """Applies ``kind`` (torch.amax or torch.amin) over ranks to a block that is cut as ``x``.

    ``ties_of_nan``: whether NaNs that are the result share its gradient, as torch does or not.
    """
    group = group_over(x, dims)
    if group is None:
        return kind(block, dims, keepdim=keepdim)
    value = _Extremum.apply(block, dims, group, kind, ties_of_nan)
    return value if keepdim else value.squeeze(dims)


@register_each("amax", "amin", family="reductions", dims=["dim"])
def values_only(
    operator: Operator, input: Sharded, dim: Dims = None, keepdim: bool = False
) -> torch.Tensor:
    """Over any dims; equal ones share the gradient, on whatever rank they are."""
    dims = reduced_dims(input, dim)
    x = without_empty_shards(input, dims)
    return wrap_reduced(x, extremum(x, x.local, dims, keepdim, operator), dims, keepdim)


@register(torch.aminmax, torch.Tensor.aminmax, family="reductions", dims=["dim"])
def aminmax(input: Sharded, *, dim: int | None = None, keepdim: bool = False) -> _ValuesAndIndices:
    """Over one dim or all; as amin and amax."""
    dims = reduced_dims(input, dim)
    x = without_empty_shards(input, dims)
    smallest = extremum(x, x.local, dims, keepdim, torch.amin)
    largest = extremum(x, x.local, dims, keepdim, torch.amax)
    return torch.return_types.aminmax(
        (wrap_reduced(x, smallest, dims, keepdim), wrap_reduced(x, largest, dims, keepdim))
    )


@register_each("max", "min", family="reductions")
def values_with_indices(
    operator: Operator,
    input: Sharded,
    second: int | torch.Tensor | None = None,
    keepdim: bool = False,
    *,
    dim: SupportsIndex | None = None,
    other: torch.Tensor | None = None,
) -> torch.Tensor | _ValuesAndIndices:
    """Over all dims, or over one with global indices, or of two tensors.

    The second argument is a dim or the other tensor; by its name a dim may be a tensor, too.
    """
    if isinstance(second, torch.Tensor):
        other = second
    elif second is not None:
        dim = second
    if other is not None:
        elementwise = torch.maximum if operator is torch.max else torch.minimum
        return apply_pointwise(elementwise, (input, other), {})
    if dim is not None:
        (given,) = integers(dim)
        dim = read_dim(given, input.dim() or 1, operator.__name__)
    dims = reduced_dims(input, dim)
    x = without_empty_shards(input, dims)
    if dim is not None:
        results = _with_indices(operator, x, dim, keepdim)
        named = getattr(torch.return_types, operator.__name__)
        pair: _ValuesAndIndices = named(
            [wrap_reduced(x, result, dims, keepdim) for result in results]
        )
        return pair
    if group_over(x, dims) is None:
        return wrap_reduced(x, operator(x.local), dims, False)
    kind = torch.amax if operator is torch.max else torch.amin
    value = extremum(x, x.local, dims, False, kind, ties_of_nan=True)
    return wrap_reduced(x, value, dims, False)


def _with_indices(operator: Operator, x: Sharded, dim: int, keepdim: bool) -> _ValuesAndIndices:
    """Finds extrema and global indices along ``dim``; the first of equal ones has the gradient.

    Distribution scheme: 1. the local values and indices, 2. both are stacked from all ranks, in
    the order of their shards, 3. the same operator chooses among them.
    """
    values, indices = operator(x.local, dim, keepdim)
    group = group_over(x, [dim])
    if group is None:
        return values, indices
    first, _ = x.box.interval(dim)
    what = f"{operator.__name__} over a cut dim"
    chosen, rank = operator(stack_ranks(values, group, what), 0)
    everywhere = stack_ranks(indices + first, group, what)
    return chosen, everywhere.gather(0, rank.unsqueeze(0)).squeeze(0)


@register_each("argmax", "argmin", family="reductions", dims=["dim"])
def indices_only(
    operator: Operator, input: Sharded, dim: int | None = None, keepdim: bool = False
) -> torch.Tensor:
    """Over one dim or all; global indices, of equal elements the first."""
    dims = reduced_dims(input, dim)
    x = without_empty_shards(input, dims)
    if dim is not None:
        choose = torch.max if operator is torch.argmax else torch.min
        _, indices = _with_indices(choose, x.like(x.local.detach()), dim, keepdim)
    else:
        indices = _flat_index(operator, x, group_over(x, dims))
        indices = indices.view([1] * x.dim()) if keepdim else indices
    return wrap_reduced(x, indices, dims, keepdim)


def _flat_index(operator: Operator, x: Sharded, group: Communicator | None) -> torch.Tensor:
    """Finds the index in the flattened global tensor; ranks' boxes are not in its order."""
    block = x.local.detach()
    local = operator(block)
    value = block.reshape(-1)[local]
    index = torch.zeros_like(local)
    at = torch.unravel_index(local, block.shape)
    for extent, position, lo in zip(x.shape, at, x.box.lo, strict=True):
        index = index * extent + position + lo
    values = stack_ranks(value, group, "the index of an extremum")
    indices = stack_ranks(index, group, "the index of an extremum")
    best = values[operator(values)]
    others = (values != best) & ~(values.isnan() & best.isnan())
    return indices.masked_fill(others, LARGEST_INDEX).min()


@register(torch.histc, torch.Tensor.histc, family="reductions")
def histc(input: Sharded, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Of all elements: an ordinary tensor of counts.

    Distribution scheme: 1. without limits the smallest and the largest element of all ranks, 2. the
    counts of the block, 3. their sum.
    """
    with torch.no_grad():
        if min == max and input.numel():
            low, high = aminmax(input)
            min = low.item()
            max = high.item()
        counts = torch.histc(input.block, bins, min, max)
        return all_reduce_sum(counts, group_over(input, range(input.dim())), "the sum of histc")


ScanResults = torch.Tensor | tuple[torch.Tensor, ...]
"""Types a tensor, or torch's named tuple of values and indices."""


def _wrap_results(
    x: Sharded, found: ScanResults, dim: int | None, keepdim: bool = True
) -> ScanResults:
    """Wrap blocks whose extent along ``dim`` may have changed, or that have lost it."""
    if not isinstance(found, torch.Tensor):
        named = type(found)
        return named([_wrap_result(x, part, dim, keepdim) for part in found])
    return _wrap_result(x, found, dim, keepdim)


def _wrap_result(x: Sharded, block: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
    if dim is None:
        return wrap_reduced(x, block, range(x.dim()), False)
    if keepdim:
        return x.like(block, x.partition.with_dim(dim, block.shape[dim], None))
    return wrap_reduced(x, block, (dim,), False)


@register_each("sort", "argsort", family="reductions", dims=["dim"])
def sort(
    operator: Operator,
    input: Sharded,
    dim: int = -1,
    descending: bool = False,
    stable: bool = False,
) -> ScanResults:
    """Along a dim that is not cut; otherwise refused."""
    check_uncut(input, (dim,), f"{operator.__name__} needs all of")
    return _wrap_results(
        input, operator(input.local, dim=dim, descending=descending, stable=stable), dim
    )


@register(torch.msort, torch.Tensor.msort, family="reductions")
def msort(input: Sharded) -> ScanResults:
    """Along a dim that is not cut; otherwise refused."""
    check_uncut(input, (0,), "msort needs all of")
    return _wrap_results(input, torch.msort(input.local), 0)


@register_each("mode", "median", "nanmedian", family="reductions", dims=["dim"])
def middle_value(
    operator: Operator, input: Sharded, dim: int | None = None, keepdim: bool = False
) -> ScanResults:
    """Along a dim that is not cut; otherwise refused."""
    name = operator.__name__
    if dim is None and name == "mode":
        dim = input.dim() - 1
    check_uncut(input, reduced_dims(input, dim), f"{name} needs all of")
    if dim is None:
        return _wrap_results(input, operator(input.local), None)
    return _wrap_results(input, operator(input.local, dim, keepdim), dim, keepdim)


@register(torch.topk, torch.Tensor.topk, family="reductions", dims=["dim"])
def topk(
    input: Sharded, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> ScanResults:
    """Along a dim that is not cut; otherwise refused."""
    check_uncut(input, (dim,), "topk needs all of")
    return _wrap_results(input, torch.topk(input.local, k, dim, largest, sorted), dim)


@register(torch.kthvalue, torch.Tensor.kthvalue, family="reductions", dims=["dim"])
def kthvalue(input: Sharded, k: int, dim: int = -1, keepdim: bool = False) -> ScanResults:
    """Along a dim that is not cut; otherwise refused."""
    check_uncut(input, (dim,), "kthvalue needs all of")
    return _wrap_results(input, torch.kthvalue(input.local, k, dim, keepdim), dim, keepdim)


@register_each(
    "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", family="reductions", dims=["dim"]
)
def cumulative(operator: Operator, input: Sharded, dim: int, **options: object) -> ScanResults:
    """Along a dim that is not cut; otherwise refused."""
    check_uncut(input, (dim,), f"{operator.__name__} needs all of")
    return _wrap_results(input, operator(input.local, dim, **options), dim)


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
    return wrap_reduced(input, operator(input.local, q, dim, keepdim, **options), dims, keepdim)
