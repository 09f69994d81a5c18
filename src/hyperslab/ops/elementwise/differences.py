"""Differences of neighbours along a dim, and the place of values among boundaries."""

from __future__ import annotations

import torch

from hyperslab.errors import LayoutError
from hyperslab.ops.elementwise.pointwise import apply_pointwise
from hyperslab.ops.views.concat import concatenate
from hyperslab.ops.views.slicing import Span, crop
from hyperslab.tensor import Sharded, register


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


@register(torch.bucketize, family="elementwise")
def bucketize(
    input: Sharded, boundaries: torch.Tensor, *, out_int32: bool = False, right: bool = False
) -> Sharded:
    """Block by block; the boundaries are an ordinary tensor."""
    if isinstance(boundaries, Sharded) or not isinstance(input, Sharded):
        raise LayoutError("bucketize: the input is cut, the boundaries are an ordinary tensor")
    return input.like(torch.bucketize(input.local, boundaries, out_int32=out_int32, right=right))
