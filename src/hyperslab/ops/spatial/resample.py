"""Linear maps along all spatial dims of a block in one pass, with their graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hyperslab.memory_format import memory_format_of
from hyperslab.ops.kernels import fused, resample
from hyperslab.ops.kernels.resample.maps import SparseMap

assert fused  # registers the operator reorder
assert resample  # and resample


@dataclass(frozen=True, slots=True, eq=False)
class Resampling:
    """A map for every spatial dim, and their adjoints; with ``tensors`` as the operator takes them.

    ``results``: the extents of what it makes of a block.
    """

    maps: tuple[SparseMap, ...]
    adjoints: tuple[SparseMap, ...]
    tensors: list[torch.Tensor]
    results: tuple[int, ...]

    @staticmethod
    def of(maps: Sequence[SparseMap], adjoints: Sequence[SparseMap]) -> Resampling:
        """Those of each dim."""
        tensors = [tensor for one in maps for tensor in one.tensors]
        return Resampling(tuple(maps), tuple(adjoints), tensors, tuple(m.results for m in maps))

    @property
    def adjoint(self) -> Resampling:
        """From the gradient of the results to that of the block."""
        return Resampling.of(self.adjoints, self.maps)


class Resample(torch.autograd.Function):
    """A block's results in ``dtype``; nothing is kept of either, and the adjoint is another one."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, resampling: Resampling, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.resampling = resampling
        ctx.dtype = x.dtype
        ctx.format = memory_format_of(x)
        return torch.ops.hyperslab.resample(x, resampling.tensors, resampling.results, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            gradient = gradient.contiguous(memory_format=ctx.format)
        elif not gradient.is_contiguous(memory_format=ctx.format):
            last = ctx.format is not torch.contiguous_format
            gradient = torch.ops.hyperslab.reorder(gradient, last, gradient.dtype)
        return Resample.apply(gradient, ctx.resampling.adjoint, ctx.dtype), None, None
