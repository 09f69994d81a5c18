"""Distributes reductions over dims, cut or not.

In reading order: what all reductions share (their dims, the ranks that take part, the result's
partition); sums, means, products, counts and variances; maxima and minima (values, global
indices and their gradients) and histograms; norms of vectors, similarities and distances; softmax,
its logarithm and log-sum-exp.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex, cast

import torch
import torch.nn.functional as F

from hyperslab.comm import Communicator, Grid, all_reduce_sum, per_grid, stack_ranks
from hyperslab.comm.grid import warn_of_updated_metric
from hyperslab.errors import LayoutError
from hyperslab.geometry import Partition
from hyperslab.kernels.memory_format import accumulator, as_float32, as_result
from hyperslab.ops.elementwise import apply_pointwise
from hyperslab.ops.fusion import Population, adds_up_moments, moments_over_ranks
from hyperslab.ops.operands import (
    LAYOUTS,
    block_of,
    common_partition,
    operand_block,
    without_empty_shards,
)
from hyperslab.ops.overloads import Operator, integers, register_each, run_composed
from hyperslab.ops.placement import with_whole
from hyperslab.ops.views import without_dims
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe, read_dim
from hyperslab.util.torch_internals import BlockFunction, EnableTorchFunction, are_all_true

Dims = int | tuple[int, ...] | None
"""Types dims counted from the front, as the dispatcher passes them; None means all of them."""


def reduced_dims(x: Sharded, dim: Dims) -> tuple[int, ...]:
    """Returns the dims that a reduction takes away, in order; none named means all."""
    if isinstance(dim, int):
        return (dim,)
    return tuple(sorted(dim)) if dim else tuple(range(x.dim()))


def wrap_reduced(
    x: Sharded, block: torch.Tensor, dims: Sequence[int], keepdim: bool
) -> torch.Tensor:
    """Wrap a reduction's result, a new tensor; ordinary without batch where nothing is cut."""
    partition = _reduced_partition(x.partition, tuple(dims), keepdim)
    if 0 in dims and not partition.axes:
        look_for_metrics(x)
        return block
    return x.like(block, partition, consumed=True)


def look_for_metrics(x: Sharded) -> None:
    """Have a metric of torchmetrics say so that would add up what all ranks get of ``x``."""
    if "torchmetrics" in sys.modules and x.grid.size > 1:
        warn_of_updated_metric(x.grid)


@functools.lru_cache(LAYOUTS)
def _reduced_partition(partition: Partition, dims: tuple[int, ...], keepdim: bool) -> Partition:
    if not keepdim:
        return without_dims(partition, dims)
    shape = [1 if d in dims else extent for d, extent in enumerate(partition.shape)]
    cuts = [None if d in dims else cut for d, cut in enumerate(partition.cuts)]
    return Partition(tuple(shape), tuple(cuts))


def group_over(x: Sharded, dims: Iterable[int]) -> Communicator | None:
    """Returns the ranks over which ``dims`` are cut; ``None`` where this rank holds all of them."""
    partition = x.partition
    if not partition.axes:
        return None
    return x.grid.group([cut.axis for d in dims if (cut := partition.cuts[d]) is not None])


def sum_over_ranks(
    x: Sharded, block: torch.Tensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Sums a block whose ``dims`` are reduced already over ranks, as ``dtype``."""
    whole = all_reduce_sum(block, group_over(x, dims), "a sum over cut dims")
    return wrap_reduced(x, whole.to(dtype), dims, keepdim)


@register_each(
    {
        "sum": "Sums any dims; "
        "is an ordinary tensor if they include the batch and nothing stays cut.",
        "nansum": "Runs over any dims; NaN counts as zero.",
    },
    dims=["dim"],
)
def sum_of(
    operator: Operator,
    input: Sharded,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Sums the block over ``dims``, in a type that does not overflow, and then over ranks."""
    dims = reduced_dims(input, dim)
    own = input.dtype
    whole = dtype or (own if own.is_floating_point or own.is_complex else torch.int64)
    block = operator(input.native, dims, keepdim=keepdim, dtype=accumulator(whole))
    return sum_over_ranks(input, block, dims, keepdim, whole)


@register(torch.mean, torch.Tensor.mean, dims=["dim"])
def mean(
    input: Sharded, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Averages any dims; is an ordinary tensor if they include the batch and nothing stays cut."""
    dims = reduced_dims(input, dim)
    whole = dtype or input.dtype
    x = without_empty_shards(input, dims)
    # The local mean times the share of elements: sums of half precision would overflow.
    block = torch.mean(x.native, dims, keepdim=keepdim, dtype=accumulator(whole))
    share = _own_share(x.grid, x.partition, dims)
    return sum_over_ranks(x, block if share == 1 else block * share, dims, keepdim, whole)


@per_grid
def _own_share(grid: Grid, partition: Partition, dims: tuple[int, ...]) -> float:
    count = math.prod(partition.shape[d] for d in dims)
    own = partition.box(grid.coords).shape
    return math.prod(own[d] for d in dims) / count if count else 1


@register(torch.nanmean, torch.Tensor.nanmean, dims=["dim"])
def nanmean(
    input: Sharded, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Runs over any dims; NaN does not count."""
    whole = dtype or input.dtype
    sums = sum_of(torch.nansum, input, dim, keepdim, dtype=accumulator(whole))
    numbers = sum_of(torch.sum, input.like(~input.block.isnan()), dim, keepdim)
    with EnableTorchFunction():  # or torch would ask for no rule inside of one
        return (sums / numbers).to(whole)


@register(torch.prod, torch.Tensor.prod, dims=["dim"])
def prod(
    input: Sharded,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Runs over one dim or all: multiplies all ranks' products."""
    dims = reduced_dims(input, dim)
    whole = torch.prod(input.block.new_ones(1), dtype=dtype).dtype
    block = as_float32(input.block.to(whole))
    local = block.prod() if dim is None else block.prod(dims[0], keepdim)
    stack = stack_ranks(local, group_over(input, dims), "a product over cut dims")
    return wrap_reduced(input, stack.prod(0).to(whole), dims, keepdim)


@register(torch.count_nonzero, torch.Tensor.count_nonzero, dims=["dim"])
def count_nonzero(input: Sharded, dim: Dims = None) -> torch.Tensor:
    """Runs over any dims."""
    return sum_of(torch.sum, input.like(input.block != 0), dim)


@register_each(
    {
        name: f"Runs over any dims; ``bool(x.{name}())`` "
        "is the same on all ranks if all dims are reduced."
        for name in ("any", "all")
    },
    dims=["dim"],
)
def any_or_all(
    operator: Operator, input: Sharded, dim: Dims = None, keepdim: bool = False
) -> torch.Tensor:
    """Tells if any rank has a hit, or negates that: all means no zero anywhere."""
    dims = () if dim == () else reduced_dims(input, dim)
    if dims and group_over(input, dims) is None:
        return wrap_reduced(input, operator(input.native, dims, keepdim), dims, keepdim)
    negate = operator is torch.all
    hits = (input.block == 0) if negate else (input.block != 0)
    number = hits.sum(dims, keepdim=keepdim) if dims or dim is None else hits
    found = all_reduce_sum(number, group_over(input, dims), "any or all over cut dims") != 0
    result = ~found if negate else found
    result = result.to(torch.uint8) if input.dtype == torch.uint8 else result
    return wrap_reduced(input, result, dims, keepdim)


@register(are_all_true)
def all_true(input: Sharded) -> torch.Tensor:
    """Is ``all``, as ``torch.distributions`` check their arguments."""
    return any_or_all(torch.all, input)


@register(torch.equal, torch.Tensor.equal)
def equal(input: torch.Tensor, other: torch.Tensor) -> bool:
    """Compares global shapes and all elements; the answer is the same on all ranks."""
    if input.shape != other.shape:
        return False
    return bool(any_or_all(torch.all, apply_pointwise(torch.eq, (input, other), {})))


@register(torch.allclose, torch.Tensor.allclose)
def allclose(input: torch.Tensor, other: torch.Tensor, *args: Any, **options: Any) -> bool:
    """Compares all elements, as ``isclose``; the answer is the same on all ranks."""
    close = apply_pointwise(torch.isclose, (input, other, *args), options)
    return bool(any_or_all(torch.all, close))


@register_each("var", "std", "var_mean", "std_mean", dims=["dim"])
def variance(
    operator: Operator,
    input: Sharded,
    dim: Dims | bool = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Runs over any dims, around the global mean; uneven shards have their true counts.

    Distribution scheme: 1. compute local mean and variance, 2. all-reduce them in one message (two
    in float64).
    """
    if isinstance(dim, bool):  # var(x, unbiased)
        unbiased = dim
        dim = None
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    dims = reduced_dims(input, dim)
    x = without_empty_shards(input, dims)
    name = operator.__name__
    group = group_over(x, dims) if x.numel() else None
    if group is None and not adds_up_moments(x.local, dims):
        found = operator(x.local, dims, correction=correction, keepdim=keepdim)
        blocks = found if isinstance(found, tuple) else (found,)
    elif x.dtype.is_complex:
        raise LayoutError(
            f"the variance of complex numbers over dims that are cut has no rule: {x.partition}\n"
            "    use hyperslab.gather(x, axes) before it"
        )
    else:
        count = math.prod(x.shape[d] for d in dims)
        mean, var = moments_over_ranks(as_float32(x.local), dims, Population(count, group))
        left = count - correction
        var = var * (count / left if left > 0 else math.inf)
        blocks = (_square_root(var) if name.startswith("std") else var,)
        # Programs may change the mean in place, which the backward pass needs as it is.
        blocks += (mean.clone(),) if name.endswith("_mean") else ()
        blocks = tuple(block.to(x.dtype) for block in blocks)
        blocks = blocks if keepdim else tuple(block.squeeze(dims) for block in blocks)
    results = tuple(wrap_reduced(x, block, dims, keepdim) for block in blocks)
    return results if len(results) > 1 else results[0]


def _square_root(var: torch.Tensor) -> torch.Tensor:
    """Takes the square root; its gradient at zero is zero, as that of torch's deviation."""
    positive = var > 0
    return torch.where(positive, torch.where(positive, var, 1).sqrt(), var)


LARGEST_INDEX = torch.iinfo(torch.int64).max

_ValuesAndIndices = tuple[torch.Tensor, torch.Tensor]


class _Extremum(BlockFunction):
    """Finds the largest or smallest elements; equal ones share the gradient equally.

    Distribution scheme: 1. find the local extremum, 2. find the extremum over all ranks. Backward:
    1. count the elements of the block that are equal to it, 2. all-reduce the count and the
    gradient in one message, 3. compute the block's gradient.
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
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, value = ctx.saved_tensors
        equal = x == value
        if ctx.ties_of_nan:
            equal |= x.isnan() & value.isnan()
        g = as_float32(gradient)
        both = torch.stack([equal.sum(ctx.dims, keepdim=True).to(g.dtype), g])
        number, g = all_reduce_sum(both, ctx.group, "the gradient of an extremum")
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


@register_each("amax", "amin", dims=["dim"])
def values_only(
    operator: Operator, input: Sharded, dim: Dims = None, keepdim: bool = False
) -> torch.Tensor:
    """Runs over any dims; equal elements on all ranks share the gradient."""
    dims = reduced_dims(input, dim)
    x = without_empty_shards(input, dims)
    return wrap_reduced(x, extremum(x, x.local, dims, keepdim, operator), dims, keepdim)


@register(torch.aminmax, torch.Tensor.aminmax, dims=["dim"])
def aminmax(input: Sharded, *, dim: int | None = None, keepdim: bool = False) -> _ValuesAndIndices:
    """Runs over one dim or all, as amin and amax."""
    found = (values_only(kind, input, dim, keepdim) for kind in (torch.amin, torch.amax))
    return torch.return_types.aminmax(tuple(found))


@register_each("max", "min", dims=["dim"])
def values_with_indices(
    operator: Operator,
    input: Sharded,
    second: int | torch.Tensor | None = None,
    keepdim: bool = False,
    *,
    dim: SupportsIndex | None = None,
    other: torch.Tensor | None = None,
) -> torch.Tensor | _ValuesAndIndices:
    """Runs over all dims, or over one with global indices, or of two tensors.

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
        dim = read_dim(given, input.dim(), operator.__name__)
    dims = reduced_dims(input, dim)
    x = without_empty_shards(input, dims)
    if dim is not None:
        results = _with_indices(operator, x, dim, keepdim)
        wrapped = [wrap_reduced(x, result, dims, keepdim) for result in results]
        return cast(_ValuesAndIndices, getattr(torch.return_types, operator.__name__)(wrapped))
    if group_over(x, dims) is None:
        return wrap_reduced(x, operator(x.local), dims, False)
    kind = torch.amax if operator is torch.max else torch.amin
    value = extremum(x, x.local, dims, False, kind, ties_of_nan=True)
    return wrap_reduced(x, value, dims, False)


def _with_indices(operator: Operator, x: Sharded, dim: int, keepdim: bool) -> _ValuesAndIndices:
    """Finds extrema and global indices along ``dim``; the first of equal ones has the gradient.

    Distribution scheme: 1. find the local values and indices, 2. stack both from all ranks, in the
    order of their shards, 3. choose among them with the same operator.
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


@register_each("argmax", "argmin", dims=["dim"])
def indices_only(
    operator: Operator, input: Sharded, dim: int | None = None, keepdim: bool = False
) -> torch.Tensor:
    """Returns global indices over one dim or all, of equal elements the first."""
    dims = reduced_dims(input, dim)
    x = without_empty_shards(input, dims)
    if group_over(x, dims) is None:
        indices = operator(x.native, dim, keepdim)
    elif dim is not None:
        choose = torch.max if operator is torch.argmax else torch.min
        _, indices = _with_indices(choose, x.like(x.local.detach()), dim, keepdim)
    else:
        # The index in the flattened global tensor; ranks' boxes are not in its order.
        block = x.local.detach()
        local = operator(block)
        index = torch.zeros_like(local)
        at = torch.unravel_index(local, block.shape)
        for extent, position, lo in zip(x.shape, at, x.box.lo, strict=True):
            index = index * extent + position + lo
        group = group_over(x, dims)
        values = stack_ranks(block.reshape(-1)[local], group, "the index of an extremum")
        indices = stack_ranks(index, group, "the index of an extremum")
        best = values[operator(values)]
        others = (values != best) & ~(values.isnan() & best.isnan())
        indices = indices.masked_fill(others, LARGEST_INDEX).min()
        indices = indices.view([1] * x.dim()) if keepdim else indices
    return wrap_reduced(x, indices, dims, keepdim)


@register(torch.histc, torch.Tensor.histc)
def histc(input: Sharded, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Counts all elements, into an ordinary tensor.

    Distribution scheme: 1. without limits, find the smallest and the largest element of all ranks,
    2. count the elements of the block, 3. sum the counts.
    """
    look_for_metrics(input)
    with torch.no_grad():
        if min == max and input.numel():
            low, high = aminmax(input)
            min = low.item()
            max = high.item()
        counts = torch.histc(input.block, bins, min, max)
        return all_reduce_sum(counts, group_over(input, range(input.dim())), "the sum of histc")


@register(torch.bincount, torch.Tensor.bincount, merged=True)
def bincount(
    input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor:
    """Counts all elements, or adds up their weights, into an ordinary tensor.

    Distribution scheme: 1. find the limits of the elements of all ranks, 2. count the elements of
    the block, or add up its weights, which are cut alike, 3. sum the counts.
    """
    if input.dim() != 1 or (weights is not None and weights.shape != input.shape):
        raise LayoutError(
            f"bincount takes one dim, and as many weights\n{describe([input, weights])}"
            "    use x.flatten()"
        )
    if input.dtype == torch.bool or input.is_floating_point() or input.is_complex():
        raise LayoutError(  # of no elements torch takes any
            f"bincount takes whole numbers, not {input.dtype}\n{describe([input])}    use x.long()"
        )
    like = input if isinstance(input, Sharded) else weights
    assert isinstance(like, Sharded)
    look_for_metrics(like)
    what = "aligning operands of bincount"
    with torch.no_grad():
        block = block_of(input, like.partition, like.grid, what)
        group = group_over(like, (0,))
        if input.numel() and like.grid.has_values:
            ends = block.long() if block.numel() else block.new_zeros(1).long()
            limits = torch.stack([ends.max(), -ends.min()])
            most, below = stack_ranks(limits, group, "the limits of bincount").amax(0).tolist()
            if below > 0:
                raise LayoutError(f"bincount of negative numbers, of which the least is {-below}")
            if minlength >= 0:  # torch refuses others
                minlength = max(minlength, most + 1)
        scales = None
        if weights is not None:
            scales = block_of(weights, like.partition, like.grid, what)
        counts = torch.bincount(block, scales, minlength)
        if scales is not None and input.numel():  # torch counts nothing by integers
            single = scales.dtype == torch.float32
            counts = counts.to(torch.float32 if single else torch.float64)
        return all_reduce_sum(counts, group, "the sum of bincount")


Order = float | str | None


def norm_block(
    x: Sharded, ord: float, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None
) -> torch.Tensor:
    """Computes the block of a vector norm over ``dims``.

    Distribution scheme: 1. compute the norm of the block, 2. stack the norms of all ranks, 3.
    compute their norm; for infinite orders, find the extremum of the absolute values.
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


@register(torch.linalg.vector_norm, dims=["dim"])
def vector_norm(
    x: Sharded,
    ord: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Takes any order over any dims."""
    dims = reduced_dims(x, dim)
    x = without_empty_shards(x, dims)
    return wrap_reduced(x, norm_block(x, float(ord), dims, keepdim, dtype), dims, keepdim)


@register(torch.norm, torch.Tensor.norm, dims=["dim"])
def norm(
    input: Sharded,
    p: Order = "fro",
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Takes vector norms of any order over any dims and Frobenius norms; refuses nuclear ones."""
    if isinstance(p, str) and p != "fro":
        raise _matrix_norm("norm", p, input)
    return vector_norm(input, _read_order(p), dim, keepdim, dtype=dtype)


@register(torch.linalg.norm, dims=["dim"])
def linalg_norm(
    input: Sharded,
    ord: Order = None,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Takes vector norms over any dims and Frobenius norms; refuses other matrix norms."""
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


@register(F.cosine_similarity)
def cosine_similarity(
    x1: torch.Tensor, x2: torch.Tensor, dim: int = 1, eps: float = 1e-8
) -> torch.Tensor:
    """Sums the products of normalised inputs over one dim, cut or not."""
    with EnableTorchFunction():  # or torch would ask for no rule inside of one
        x1, x2 = torch.broadcast_tensors(x1, x2)
    target = common_partition((x1, x2), F.cosine_similarity)
    like = next(value for value in (x1, x2) if isinstance(value, Sharded))
    a, b = (like.like(operand_block(value, target=target, like=like), target) for value in (x1, x2))
    dims = (read_dim(dim, a.dim(), "cosine_similarity"),) if a.dim() else ()
    a = without_empty_shards(a, dims)
    b = without_empty_shards(b, dims)
    if group_over(a, dims) is None:
        return wrap_reduced(a, F.cosine_similarity(a.local, b.local, dim, eps), dims, False)
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


@register(F.pairwise_distance)
def pairwise_distance(
    x1: torch.Tensor,
    x2: torch.Tensor,
    p: float = 2.0,
    eps: float = 1e-6,
    keepdim: bool = False,
) -> torch.Tensor:
    """Runs over the last dim, cut or not."""
    with EnableTorchFunction():  # or torch would ask for no rule inside of one
        return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


@register(torch.dist, torch.Tensor.dist)
def dist(input: torch.Tensor, other: torch.Tensor, p: float = 2) -> torch.Tensor:
    """Runs over all dims, cut or not."""
    with EnableTorchFunction():  # as above
        return torch.linalg.vector_norm(input - other, p)


class _Softmax(BlockFunction):
    """Computes softmax over a cut dim, or its logarithm; saves its output, as torch does.

    Distribution scheme: 1. find the local maximum, and the local sum of exponentials relative to
    it, 2. stack both from all ranks, 3. compute the block. Backward: 1. compute the local sum, 2.
    all-reduce it, 3. compute the block's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, group: Communicator, log: bool
    ) -> torch.Tensor:
        own = x.amax(dim, keepdim=True)
        # A shard of -inf alone adds nothing; if all are, the result is NaN, as it is in torch.
        sums = (x - own.masked_fill(own == -torch.inf, 0)).exp_().sum(dim, keepdim=True)
        stack = stack_ranks(torch.stack([own, sums]), group, "softmax over a cut dim")
        all_largest, all_sums = stack.unbind(1)
        largest = all_largest.amax(0)
        sums = (all_sums * (all_largest - largest).exp_()).sum(0)
        y = x - largest
        y = y.sub_(sums.log_()) if log else y.exp_().div_(sums)
        ctx.dim = dim
        ctx.group = group
        ctx.log = log
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        part = gradient if ctx.log else gradient * y
        total = all_reduce_sum(
            part.sum(ctx.dim, keepdim=True), ctx.group, "the gradient of softmax"
        )
        dx = gradient - y.exp() * total if ctx.log else (gradient - total) * y
        return dx, None, None, None


@register_each("softmax", "log_softmax", dims=["dim"], merged=True)
def softmax(
    operator: Operator,
    input: Sharded,
    dim: int | None = None,
    *args: int | torch.dtype | None,
    dtype: torch.dtype | None = None,
    **_: object,
) -> Sharded:
    """Runs over one dim, cut or not."""
    # The third argument is a type, or a ``_stacklevel`` in torch.nn.functional.
    dtype = next((arg for arg in args if isinstance(arg, torch.dtype)), dtype)
    if dim is None:
        dim = 0 if input.dim() in (0, 1, 3) else 1
    x = without_empty_shards(input, [dim])
    group = group_over(x, [dim])
    if group is None:
        return x.like(operator(x.native_local, dim, dtype=dtype), consumed=True)
    whole = operator(x.local.new_zeros(1), 0, dtype=dtype).dtype  # autocast may choose one
    log = operator.__name__ == "log_softmax"
    y = _Softmax.apply(as_float32(as_result(x.local).to(whole)), dim, group, log)
    return x.like(y.to(whole), fresh=True)


@register(F.softmin)
def softmin(*args: Any, **options: Any) -> Sharded:
    """Runs over one dim, cut or not."""
    return cast(Sharded, run_composed(F.softmin, *args, **options))


@register(F.gumbel_softmax)
def gumbel_softmax(
    logits: Sharded, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Sharded:
    """Makes one dim whole if it is cut; draws the same on every grid, as rand_like."""
    dim = read_dim(dim, logits.dim(), "gumbel_softmax")
    logits = with_whole(logits, (dim,), "gumbel_softmax")
    return cast(Sharded, run_composed(F.gumbel_softmax, logits, tau, hard, eps, dim))


@register_each("logsumexp", dims=["dim"])
def logsumexp(_: Operator, input: Sharded, dim: Dims, keepdim: bool = False) -> torch.Tensor:
    """Runs over any dims: takes the log-sum-exp of all ranks' log-sum-exps."""
    dims = reduced_dims(input, dim)
    x = without_empty_shards(input, dims)
    group = group_over(x, dims)
    if group is None:
        return wrap_reduced(x, torch.logsumexp(x.local, dims, keepdim), dims, keepdim)
    local = torch.logsumexp(as_float32(x.local), dims, keepdim)
    whole = torch.logsumexp(stack_ranks(local, group, "a log-sum-exp over cut dims"), 0)
    return wrap_reduced(x, whole.to(torch.logsumexp(x.local.new_zeros(1), 0).dtype), dims, keepdim)
