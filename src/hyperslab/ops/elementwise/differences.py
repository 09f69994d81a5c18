"""Differences of neighbours along dims, and the place of values among boundaries."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from hyperslab.errors import LayoutError
from hyperslab.ops.elementwise.pointwise import apply_pointwise
from hyperslab.ops.views.concat import concatenate
from hyperslab.ops.views.slicing import Span, crop
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.signature import read_dims


@register(torch.diff, torch.Tensor.diff, family="elementwise", dims=["dim"])
def diff(
    input: torch.Tensor,
    n: int = 1,
    dim: int = -1,
    prepend: torch.Tensor | None = None,
    append: torch.Tensor | None = None,
) -> Sharded:
    """Along any dim; along a cut dim each rank fetches the neighbour's plane.

    Distribution scheme: ``n`` times 1. the elements without the last one, and without the first
    one, as two crops that are aligned, 2. their difference, block by block.
    """
    if n == 0 and isinstance(input, Sharded):  # torch leaves out what would come beside it
        return input.like(input.local.clone())
    parts = [part for part in (prepend, input, append) if part is not None]
    x = input if len(parts) == 1 else concatenate(parts, dim, "diff")
    if not isinstance(x, Sharded):
        raise LayoutError("diff: the input is cut, or what is put before or behind it")
    subtract = torch.logical_xor if x.dtype == torch.bool else torch.sub
    for _ in range(n):
        last = max(0, x.shape[dim] - 1)
        before, after = (crop(x, {dim: Span(min(at, last), last)}) for at in (0, 1))
        x = apply_pointwise(subtract, (after, before), {})
    return x


@register(torch.gradient, family="elementwise")
def gradient(
    input: Sharded,
    *,
    spacing: float | Sequence[float] = 1.0,
    dim: int | Sequence[int] | None = None,
    edge_order: int = 1,
) -> tuple[Sharded, ...]:
    """Along any dims, at equal distances; along a cut dim ranks exchange planes."""
    given = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    dims = read_dims(given, input.dim(), "gradient")
    distances = _distances(spacing, len(dims))
    if edge_order not in (1, 2):
        raise ValueError(f"gradient: edge_order is 1 or 2, not {edge_order}")
    if len(set(dims)) < len(dims) or any(input.shape[d] <= edge_order for d in dims):
        raise ValueError(
            f"gradient along the dims {dims} of {input.partition}: each of them once, and with "
            f"more than {edge_order} elements"
        )
    if input.dtype in (torch.bool, torch.uint8):
        raise ValueError(f"gradient of {input.dtype}")
    return tuple(_slope(input, d, h, edge_order) for d, h in zip(dims, distances, strict=True))


def _distances(spacing: float | Sequence[float], count: int) -> list[float]:
    """Of neighbours along each of ``count`` dims."""
    numbers = list(spacing) if isinstance(spacing, Sequence) else [spacing] * count
    if any(isinstance(number, torch.Tensor) for number in (spacing, *numbers)):
        raise LayoutError(
            "gradient of a cut tensor knows equal distances only: spacing is a number for each dim"
        )
    if len(numbers) != count:
        raise ValueError(f"gradient: {len(numbers)} distances for {count} dims")
    return numbers


def _slope(x: Sharded, dim: int, distance: float, order: int) -> Sharded:
    """Central differences; at both ends those of first or second order. Rounded as torch's."""
    count = x.shape[dim]

    def part(start: int, length: int = 1) -> Sharded:
        return crop(x, {dim: Span(start, length)})

    def over(y: Sharded, number: float) -> Sharded:
        return apply_pointwise(torch.div, (y, number), {})

    if order == 1:
        begin = apply_pointwise(torch.sub, (part(1), part(0)), {})
        end = apply_pointwise(torch.sub, (part(count - 1), part(count - 2)), {})
    else:
        begin = _sum([(-1.5, part(0)), (2.0, part(1)), (-0.5, part(2))])
        end = _sum([(0.5, part(count - 3)), (-2.0, part(count - 2)), (1.5, part(count - 1))])
    inner = []
    if count > 2:
        across = apply_pointwise(torch.sub, (part(2, count - 2), part(0, count - 2)), {})
        inner = [over(over(across, distance), 2)]
    return concatenate([over(begin, distance), *inner, over(end, distance)], dim, "gradient")


def _sum(terms: Sequence[tuple[float, Sharded]]) -> Sharded:
    products = (apply_pointwise(torch.mul, (x, weight), {}) for weight, x in terms)
    return functools.reduce(lambda a, b: apply_pointwise(torch.add, (a, b), {}), products)


@register(torch.bucketize, family="elementwise")
def bucketize(
    input: Sharded, boundaries: torch.Tensor, *, out_int32: bool = False, right: bool = False
) -> Sharded:
    """Block by block; the boundaries are an ordinary tensor."""
    if isinstance(boundaries, Sharded) or not isinstance(input, Sharded):
        raise LayoutError("bucketize: the input is cut, the boundaries are an ordinary tensor")
    return input.like(torch.bucketize(input.local, boundaries, out_int32=out_int32, right=right))
