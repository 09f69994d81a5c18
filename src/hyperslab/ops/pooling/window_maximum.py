"""Maximum pooling of windows that overlap, by the fused kernel, with its graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hyperslab.memory_format import memory_format_of
from hyperslab.ops.kernels import windows as _windows  # noqa: F401 - registers the operators
from hyperslab.ops.kernels.windows.reference import window_maximum_backward

_run = torch.ops.hyperslab


@dataclass(frozen=True, slots=True)
class WindowGrid:
    """Where the windows of a block lie; ``extents`` is how many there are along each dim."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    extents: tuple[int, ...]


class WindowMaximum(torch.autograd.Function):
    """The maximum of every window, in ``dtype``; kept is one byte an element of the result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grid: WindowGrid, dtype: torch.dtype) -> torch.Tensor:
        ctx.grid = grid
        ctx.shape = tuple(x.shape)
        ctx.dtype = x.dtype
        ctx.channels_last = memory_format_of(x) is not torch.contiguous_format
        mark = ctx.needs_input_grad[0]
        y, winners = _run.window_maximum(
            x, grid.kernel, grid.stride, grid.padding, grid.extents, mark, dtype
        )
        ctx.save_for_backward(winners if mark else None)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (winners,) = ctx.saved_tensors
        grid = ctx.grid
        differentiable = torch.is_grad_enabled()
        run = window_maximum_backward if differentiable else _run.window_maximum_backward
        dx = run(
            gradient,
            winners,
            grid.kernel,
            grid.stride,
            grid.padding,
            ctx.shape,
            ctx.channels_last,
            ctx.dtype,
        )
        return dx, None, None
