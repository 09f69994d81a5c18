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
    numbers = [spacing] * len(dims) if isinstance(spacing, int | float) else list(spacing)
    if any(isinstance(number, torch.Tensor) for number in [spacing, *numbers]):
        raise LayoutError(
            "gradient of a cut tensor knows equal distances only: spacing is a number for each dim"
        )
    if len(numbers) != len(dims) or edge_order not in (1, 2):
        raise ValueError(
            f"gradient: {len(numbers)} distances for {len(dims)} dims, edge_order {edge_order}"
        )
    least = min(input.shape[d] for d in dims)
    if least <= edge_order:
        raise ValueError(f"gradient: each dim has to have more than {edge_order} elements")
    return tuple(_slope(input, d, h, edge_order) for d, h in zip(dims, numbers, strict=True))


def _slope(x: Sharded, dim: int, distance: float, order: int) -> Sharded:
    """Central differences; at both ends those of first or second order."""
    count = x.shape[dim]

    def combine(weights: Sequence[float], starts: Sequence[int], length: int) -> Sharded:
        parts = (
            apply_pointwise(torch.mul, (crop(x, {dim: Span(at, length)}), w / distance), {})
            for w, at in zip(weights, starts, strict=True)
        )
        return functools.reduce(lambda a, b: apply_pointwise(torch.add, (a, b), {}), parts)

    inner = [combine((-0.5, 0.5), (0, 2), count - 2)] if count > 2 else []
    first = (-1.0, 1.0) if order == 1 else (-1.5, 2.0, -0.5)
    steps = range(len(first))
    begin = combine(first, steps, 1)
    end = combine([-w for w in first], [count - 1 - at for at in steps], 1)
    return concatenate([begin, *inner, end], dim, "gradient")


@register(torch.bucketize, family="elementwise")
def bucketize(
    input: Sharded, boundaries: torch.Tensor, *, out_int32: bool = False, right: bool = False
) -> Sharded:
    """Block by block; the boundaries are an ordinary tensor."""
    if isinstance(boundaries, Sharded) or not isinstance(input, Sharded):
        raise LayoutError("bucketize: the input is cut, the boundaries are an ordinary tensor")
    return input.like(torch.bucketize(input.local, boundaries, out_int32=out_int32, right=right))
