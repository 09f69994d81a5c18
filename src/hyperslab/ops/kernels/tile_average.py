"""Average pooling whose windows tile the block: nothing saved, no scatter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class TileAverage(torch.autograd.Function):
    """(B, C, *extents) -> (B, C, *extents / kernel), the mean of every tile.

    Torch's own keeps its input for the backward pass, which needs no more than its shape, and on
    the CPU takes three times as long (torch 2.13). In float32 under autocast, as torch's.
    """

    @staticmethod
    def forward(ctx, x, kernel: Sequence[int]):  # type: ignore[no-untyped-def]
        ctx.kernel, ctx.dtype = tuple(kernel), x.dtype
        total = x
        for dim, k in enumerate(kernel, start=2):
            total = _sum_neighbours(total, dim, k)
        return total / math.prod(kernel)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        *outer, last = ctx.kernel
        part = (gradient / math.prod(ctx.kernel)).to(ctx.dtype)
        part = part.repeat_interleave(last, -1)
        shape = list(part.shape)
        for dim, k in reversed(list(enumerate(outer, start=2))):
            part = part.unsqueeze(dim + 1)
            part = part.expand(*part.shape[: dim + 1], k, *part.shape[dim + 2 :])
            shape[dim] *= k
        return part.reshape(shape), None


def _sum_neighbours(x: torch.Tensor, dim: int, k: int) -> torch.Tensor:
    """Sums of ``k`` neighbours along one dim, in float32 at least."""
    first, *others = (x[(slice(None),) * dim + (slice(i, None, k),)] for i in range(k))
    total = first.to(torch.promote_types(x.dtype, torch.float32))
    for other in others:
        total = total + other
    return total


def tiles(x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether `TileAverage` computes what torch would, in torch's dtype."""
    kind = x.device.type
    autocast = torch.is_autocast_enabled(kind)
    widened = x.dtype == torch.bfloat16 and x.dim() == 5 and autocast  # avg_pool3d only
    return (
        kind == "cpu"
        and (x.dtype in (torch.float32, torch.float64) or widened)
        and x.is_contiguous()
        and list(kernel) == list(stride)
        and all(extent % k == 0 for extent, k in zip(x.shape[2:], kernel, strict=True))
    )
