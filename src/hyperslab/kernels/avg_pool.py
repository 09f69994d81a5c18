"""Averages tiles that cover the block: nothing saved, no scatter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def reference(x: torch.Tensor, kernel: Sequence[int]) -> torch.Tensor:
    """Returns the mean of every tile; autograd has its gradient."""
    for dim, k in zip(range(2, x.dim()), kernel, strict=True):
        x = x.unflatten(dim, (-1, k)).mean(dim + 1)
    return x


class TileAverage(torch.autograd.Function):
    """Averages tiles: (B, C, *extents) -> (B, C, *extents / kernel).

    Torch's own keeps its input for the backward pass, which needs no more than its shape. In
    float32 under autocast, as torch's.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kernel: Sequence[int]) -> torch.Tensor:
        ctx.kernel = tuple(kernel)
        ctx.dtype = x.dtype
        total = x
        for dim, k in enumerate(kernel, start=2):
            total = _sum_neighbours(total, dim, k)
        return total / math.prod(kernel)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
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
    """Adds up ``k`` neighbours along one dim, in float32 at least."""
    first, *others = (x[(slice(None),) * dim + (slice(i, None, k),)] for i in range(k))
    total = first.to(torch.promote_types(x.dtype, torch.float32))
    for other in others:
        total = total + other
    return total
