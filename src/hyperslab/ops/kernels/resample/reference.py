"""Linear maps along the spatial dims by torch's single operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.ops.kernels.fused.layout import format_of


def resample_by_dims(
    x: torch.Tensor, maps: Sequence[torch.Tensor], extents: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """See the schema: one dim after the other, each element to the results that it is a part of."""
    check_maps(x, maps, extents)
    y = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    for dim, extent in enumerate(extents, start=2):
        begin, source, weight = maps[3 * dim - 6 : 3 * dim - 3]
        result = torch.arange(extent, device=x.device).repeat_interleave(begin.diff())
        along = [-1 if d == dim else 1 for d in range(x.dim())]
        parts = y.index_select(dim, source) * weight.to(y.dtype).view(along)
        shape = [*y.shape[:dim], extent, *y.shape[dim + 1 :]]
        y = y.new_zeros(shape).index_add_(dim, result, parts)
    return torch.empty(y.shape, dtype=dtype, device=x.device, memory_format=format_of(x)).copy_(y)


def check_maps(x: torch.Tensor, maps: Sequence[torch.Tensor], extents: Sequence[int]) -> None:
    """There is one of three tensors for every spatial dim, with so many results.

    Raises:
        ValueError: there is not.
    """
    begins = [len(begin) - 1 for begin in maps[::3]]
    if len(maps) != 3 * (x.dim() - 2) or begins != list(extents):
        raise ValueError(f"maps with {begins} results for a block {tuple(x.shape)} and {extents}")
