"""Averages windows one dim after the other: nothing saved, no pass over the window's volume.

The sum over a box is a sum over its depth, then its height, then its width, each over what the one
before has left. Torch's own adds up k³ elements for every result, one by one.

Legend: along one dim, window o begins at o * stride - padding, and a *tap* is an element of the
window; what lies beyond the block counts as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hyperslab.kernels.memory_format import compute_dtype, memory_format_by_strides
from hyperslab.util.torch_internals import BlockFunction


class Line(NamedTuple):
    """Describes the windows along one dim; ``outputs`` counts them."""

    kernel: int
    stride: int
    padding: int
    outputs: int


class WindowAverage(BlockFunction):
    """Sums windows over ``divisor``: (B, C, *extents) -> (B, C, *outputs), in x's memory format.

    Torch's own keeps its input for the backward pass, which needs no more than its shape. In
    float32 under autocast, as torch's.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lines: Sequence[Line], divisor: int) -> torch.Tensor:
        ctx.lines = tuple(lines)
        ctx.divisor = divisor
        ctx.shape = tuple(x.shape)
        ctx.dtype = x.dtype
        ctx.format = memory_format_by_strides(x)
        total = x.to(compute_dtype(x))
        for dim, line in enumerate(lines, start=2):
            total = _sum_along(total, dim, line, ctx.format)
        return total / divisor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        part = gradient.contiguous(memory_format=ctx.format) / ctx.divisor
        # The last dim first: the larger the tensor, the longer the rows that are copied.
        for dim, line in reversed(list(enumerate(ctx.lines, start=2))):
            part = _spread_along(part, dim, line, ctx.shape[dim], ctx.format)
        return part.to(ctx.dtype), None, None


def _sum_along(
    x: torch.Tensor, dim: int, line: Line, memory_format: torch.memory_format
) -> torch.Tensor:
    extent = x.shape[dim]
    if line == (1, 1, 0, extent):
        return x
    met = [_windows_with(line, tap, extent) for tap in range(line.kernel)]
    taps = [_elements(x, dim, line, tap, windows) for tap, windows in enumerate(met)]
    whole = [tap for tap, windows in enumerate(met) if len(windows) == line.outputs][:2]
    total = _empty(x, dim, line.outputs, memory_format)
    match whole:
        case [one, other]:  # a pass for both
            torch.add(taps[one], taps[other], out=total)
        case [one]:
            total.copy_(taps[one])
        case _:
            total.zero_()
    for tap, windows in enumerate(met):
        if windows and tap not in whole:
            total.narrow(dim, windows.start, len(windows)).add_(taps[tap])
    return total


def _spread_along(
    g: torch.Tensor, dim: int, line: Line, extent: int, memory_format: torch.memory_format
) -> torch.Tensor:
    """Gives every element along one dim, ``extent`` in all, the sum of its windows' gradients."""
    if line == (1, 1, 0, extent):
        return g
    dx = _empty(g, dim, extent, memory_format)
    tiles = line == (line.stride, line.stride, 0, extent // line.stride)
    if tiles and extent % line.stride == 0 and dx.stride(dim) > 1:  # one pass, in long rows
        dx.unflatten(dim, (-1, line.stride)).copy_(g.unsqueeze(dim + 1))
        return dx
    for remainder in range(min(line.stride, extent)):  # those of one are met by the same taps
        slots = dx[(*[slice(None)] * dim, slice(remainder, None, line.stride))]
        first_tap = (remainder + line.padding) % line.stride
        written = False
        for tap in range(first_tap, line.kernel, line.stride):
            windows = _windows_with(line, tap, extent)
            if not windows:
                continue
            values = g.narrow(dim, windows.start, len(windows))
            begin = (windows.start * line.stride - line.padding + tap) // line.stride
            end = begin + len(windows)
            met = slots.narrow(dim, begin, len(windows))
            if written:
                met.add_(values)
                continue
            written = True
            met.copy_(values)
            slots.narrow(dim, 0, begin).zero_()
            slots.narrow(dim, end, slots.shape[dim] - end).zero_()
        if not written:
            slots.zero_()
    return dx


def _windows_with(line: Line, tap: int, extent: int) -> range:
    """Finds the windows whose ``tap`` lies in the block."""
    first = -(-(line.padding - tap) // line.stride)
    end = -(-(extent + line.padding - tap) // line.stride)
    return range(max(0, first), min(line.outputs, end))


def _elements(x: torch.Tensor, dim: int, line: Line, tap: int, windows: range) -> torch.Tensor:
    """Returns a view of the elements at ``tap`` of some windows."""
    begin = windows.start * line.stride - line.padding + tap
    end = begin + len(windows) * line.stride
    return x[(*[slice(None)] * dim, slice(begin, end, line.stride))]


def _empty(
    like: torch.Tensor, dim: int, extent: int, memory_format: torch.memory_format
) -> torch.Tensor:
    shape = [*like.shape]
    shape[dim] = extent
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=memory_format)
