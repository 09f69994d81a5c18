"""Distributes operators that go along whole lines of a tensor: running sums, sorting, quantiles.

Along a dim that is cut a running sum takes one small message, the totals of the ranks before.
Whatever has to see a line at once gets it by one exchange: the axis that cuts the dim cuts another
one meanwhile, so that no rank ever holds more than its part of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, cast

import torch

from hyperslab.comm import log_once, stack_ranks
from hyperslab.errors import LayoutError
from hyperslab.geometry import Partition
from hyperslab.kernels.memory_format import accumulator, as_float32
from hyperslab.ops.elementwise import apply_pointwise
from hyperslab.ops.operands import LAYOUTS, check_uncut, without_empty_shards
from hyperslab.ops.overloads import Operator, register_each
from hyperslab.ops.placement import cut_elsewhere, cut_of_result
from hyperslab.ops.reductions import Dims, group_over, reduced_dims
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe
from hyperslab.util.torch_internals import EnableTorchFunction

Results = torch.Tensor | tuple[torch.Tensor, ...]
"""Types a tensor, or torch's named tuple of values and indices."""


def along_lines(
    name: str, x: Sharded, dims: Sequence[int], run: Callable[[torch.Tensor], Results]
) -> Results:
    """Runs an operator on blocks that are whole in ``dims``.

    Distribution scheme: 1. in one exchange, each axis that cuts one of the dims cuts another dim
    instead (`cut_elsewhere`), 2. run the operator on the block, 3. in a second exchange, cut the
    result like the input, as far as it has that dim. An axis that no other dim can take over cuts
    nothing meanwhile: its ranks repeat the work.

    Args:
        name: of the operator, for messages.
        x: the tensor.
        dims: along which a line must be whole.
        run: the operator on one block; its results have lost ``dims``, or other extents there.
    """
    partition, gathered = cut_elsewhere(x.partition, dims, dims)
    if gathered:
        log_once(
            x.grid,
            f"{name} along dim {', '.join(map(str, dims))} of {x.partition}: no other dim can be "
            f"cut along {', '.join(gathered)}; gathered there, its ranks repeat the work meanwhile",
        )
    moved = x.redistribute(partition, f"whole lines for {name}")
    return _cut_as(x, moved, run(moved.local), dims, name)


def _cut_as(x: Sharded, moved: Sharded, found: Results, dims: Sequence[int], name: str) -> Results:
    """Wraps results on blocks of ``moved``, cut where ``x`` is."""
    if not isinstance(found, torch.Tensor):
        named: Any = type(found)
        return named([_cut_as(x, moved, part, dims, name) for part in found])
    reduced = found.dim() < x.dim()
    extents = None if reduced else tuple([found.shape[dim] for dim in dims])
    now, back = _lay_out_way_back(moved.partition, x.partition, tuple(dims), extents)
    if reduced and 0 in dims and not back.axes and now == back:
        return found
    y = moved.like(found, now, consumed=True).redistribute(back, f"the way back from {name}")
    return y.local if reduced and 0 in dims and not back.axes else y


@lru_cache(LAYOUTS)
def _lay_out_way_back(
    moved: Partition, given: Partition, dims: tuple[int, ...], extents: tuple[int, ...] | None
) -> tuple[Partition, Partition]:
    """Returns how a result is cut at first, and how in the end; ``extents``: None if without dims.

    One that is not moved on is cut by one object.
    """
    now, back = moved, given
    for at in sorted(range(len(dims)), key=lambda at: dims[at], reverse=True):
        dim = dims[at]
        if extents is None:
            now, back = now.without_dim(dim), back.without_dim(dim)
        else:
            now = now.with_dim(dim, extents[at], None)
            cut = cut_of_result(back.cuts[dim], extents[at])
            back = back.with_dim(dim, extents[at], cut)
    return (back, back) if now == back else (now, back)


@register_each("sort", "argsort", dims=["dim"])
def sort(
    operator: Operator,
    input: Sharded,
    dim: int = -1,
    descending: bool = False,
    stable: bool = False,
) -> Results:
    """Runs along any dim; a cut one becomes whole while another one is cut, and back."""
    run = partial(operator, dim=dim, descending=descending, stable=stable)
    return along_lines(operator.__name__, input, (dim,), run)


@register(torch.msort, torch.Tensor.msort)
def msort(input: Sharded) -> Results:
    """Runs along dim 0; if it is cut, it becomes whole while another one is cut, and back."""
    return along_lines("msort", input, (0,), torch.msort)


@register_each("mode", "median", "nanmedian", dims=["dim"])
def middle_value(
    operator: Operator, input: Sharded, dim: int | None = None, keepdim: bool = False
) -> Results:
    """Runs along any dim, as sort; over all elements every rank has them meanwhile."""
    name = operator.__name__
    if dim is None and name == "mode":
        dim = input.dim() - 1
    if dim is None:
        return along_lines(name, input, range(input.dim()), operator)
    return along_lines(name, input, (dim,), lambda block: operator(block, dim, keepdim))


@register_each("topk", "kthvalue", dims=["dim"])
def ranked(
    operator: Operator, input: Sharded, k: int, dim: int = -1, *args: bool, **options: bool
) -> Results:
    """Runs along any dim, as sort."""
    name = operator.__name__
    return along_lines(name, input, (dim,), lambda x: operator(x, k, dim, *args, **options))


@register_each("quantile", "nanquantile", dims=["dim"])
def quantile(
    operator: Operator,
    input: Sharded,
    q: float | torch.Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    **options: object,
) -> Results:
    """Takes quantiles along any dim, as sort; over all elements every rank has them meanwhile."""
    name = operator.__name__
    if isinstance(q, Sharded):
        raise LayoutError(
            f"{name}: the quantiles that are sought are a number or an ordinary tensor\n"
            f"{describe([input, q])}    use q.full()"
        )
    several = isinstance(q, torch.Tensor) and q.dim() > 0
    if isinstance(q, torch.Tensor) and not q.numel():
        raise LayoutError(f"{name}: no quantile is sought of {input.partition}; give one")

    def run(block: torch.Tensor) -> Results:
        found = operator(block, q, dim, keepdim, **options)
        return found.unbind(0) if several else found

    found = along_lines(name, input, reduced_dims(input, dim), run)
    with EnableTorchFunction():  # or torch would ask for no rule inside of one
        return torch.stack(list(found)) if several else found


@register_each("cumsum", "cumprod", "logcumsumexp", dims=["dim"])
def running_total(
    operator: Operator, input: Sharded, dim: int, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Runs along any dim; if it is cut, the ranks' totals travel.

    Distribution scheme: 1. compute the running total of the block, 2. send the last ones of all
    ranks, in one small message, 3. add, multiply or combine those of the previous ranks, and apply
    the result to every element of the block.
    """
    options = {} if operator is torch.logcumsumexp else {"dtype": dtype}
    if input.partition.cuts[dim] is None:
        return input.like(operator(input.local, dim, **options))
    if operator is torch.logcumsumexp and input.dtype.is_complex:
        # Logarithms of totals that are joined may lie on another branch, by 2 pi i.
        check_uncut(input, (dim,), "logcumsumexp of complex numbers needs all of")
    input = without_empty_shards(input, (dim,))
    exact = not (input.dtype.is_floating_point or input.dtype.is_complex)
    result = dtype or (torch.int64 if exact else input.dtype)
    block = as_float32(input.local) if dtype is None else input.local.to(accumulator(dtype))
    totals = operator(block, dim)
    parts = _last_of_each_rank(input, totals, dim, operator.__name__)
    neutral, join, both = _TOTALS[operator.__name__]
    rank = torch.arange(len(parts), device=parts.device).view(-1, *[1] * (parts.dim() - 1))
    before = torch.where(rank < _index_along(input, dim), parts, neutral)
    return input.like(both(totals, join(before)).to(result))


@register_each("cumsum_", "cumprod_", dims=["dim"])
def running_total_in_place(
    operator: Operator, input: Sharded, dim: int, *, dtype: torch.dtype | None = None
) -> Sharded:
    """Runs as the operator without _, and writes into the tensor."""
    before = input.like(input.local.clone())  # which a gradient of products reads
    with EnableTorchFunction():  # or torch would ask for no rule inside of one
        total = getattr(torch, operator.__name__[:-1])(before, dim, dtype=dtype)
    return cast(Sharded, apply_pointwise(torch.Tensor.copy_, (input, total), {}))


_TOTALS: dict[str, tuple[float, Operator, Operator]] = {
    "cumsum": (0, lambda before: before.sum(0), torch.add),
    "cumprod": (1, lambda before: before.prod(0), torch.mul),
    "logcumsumexp": (-torch.inf, lambda before: before.logsumexp(0), torch.logaddexp),
}
"""Lists what adds nothing, how totals are joined to one, and how this is joined to a block's."""


@register_each("cummax", "cummin", dims=["dim"])
def running_extremum(operator: Operator, input: Sharded, dim: int) -> Results:
    """Runs along any dim; if it is cut, the ranks' extrema and their indices travel.

    Distribution scheme: 1. compute the running extremum of the block, 2. send the last ones of all
    ranks with their global indices, in two small messages, 3. replace the elements that the
    extremum of the previous ranks exceeds. As in a serial run, the last one of equal elements
    counts, and NaN exceeds all numbers.
    """
    if input.partition.cuts[dim] is None:
        found = operator(input.local, dim)
        return type(found)(map(input.like, found))  # type: ignore[no-any-return]
    input = without_empty_shards(input, (dim,))
    found = operator(input.local, dim)
    values, indices = found
    indices = indices + input.box.lo[dim]
    name = operator.__name__
    parts = _last_of_each_rank(input, values, dim, name)
    places = _last_of_each_rank(input, indices, dim, name)
    index = _index_along(input, dim)
    # The first rank, too, has the message in its graph, for its backward pass is one of all ranks.
    extremum, of_rank = operator(parts[: max(index, 1)], 0)
    before = extremum[-1]
    place = places.gather(0, of_rank[-1:])[0]
    own = values >= before if operator is torch.cummax else values <= before
    if values.dtype.is_floating_point:
        own = values.isnan() | (own & ~before.isnan())
    if index == 0:
        own = torch.ones_like(own)
    results = torch.where(own, values, before), torch.where(own, indices, place)
    return type(found)(map(input.like, results))  # type: ignore[no-any-return]


def _last_of_each_rank(x: Sharded, found: torch.Tensor, dim: int, name: str) -> torch.Tensor:
    """Stacks the last elements along ``dim`` of all ranks that share a line, as planes of one."""
    last = found.narrow(dim, found.shape[dim] - 1, 1)
    return stack_ranks(last, group_over(x, (dim,)), f"the totals of {name}")


def _index_along(x: Sharded, dim: int) -> int:
    """Returns how many ranks hold earlier parts of a line; 0 where the dim is not cut."""
    cut = x.partition.cuts[dim]
    return 0 if cut is None else x.grid.coords[cut.axis]
