"""Convolutions as products of matrices, a window in each row.

Where windows tile the volume nothing is there twice, and channels last a kernel of one voxel needs
no copy at all. The gradient of the weight is one product of long rows also where windows overlap
(im2col): of small volumes with many channels that takes a third of oneDNN's time in bfloat16.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from hyperslab.ops.kernels.convolution.layout import in_channels_last
from hyperslab.ops.kernels.convolution.options import Problem

MOST_WINDOWS = 8 << 20
"""[B] Of windows that are there at a time: a voxel is in as many as the kernel has taps."""


def windows_tile(problem: Problem) -> bool:
    """Whether the windows cover the volume without overlap."""
    options = problem.options
    return (
        options.groups == 1
        and set(options.dilation) == {1}
        and problem.kernel == options.stride
        and not any(problem.padding)
        and not any(problem.left_over)
    )


def windows_are_small(problem: Problem) -> bool:
    """Whether windows overlap, and those of a sample take no more than `MOST_WINDOWS`."""
    if problem.options.groups > 1 or math.prod(problem.kernel) == 1:
        return False
    return not windows_tile(problem) and _samples_at_once(problem) > 0


def _samples_at_once(problem: Problem) -> int:
    of_a_sample = math.prod(problem.weight[1:]) * math.prod(problem.y[2:])
    return MOST_WINDOWS // (of_a_sample * problem.dtype.itemsize)


def forward_by_matrix(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    """The convolution."""
    rows = _windows(x, problem)
    matrix = _matrix(weight).t()
    y = rows @ matrix if bias is None else torch.addmm(bias, rows, matrix)
    return in_channels_last(y.view(_voxels_last(problem.y)).movedim(-1, 1))


def input_by_matrix(
    g: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    """From what the convolution makes back to its input."""
    windows = _rows(g) @ _matrix(weight)
    extents = problem.y[2:]
    n = len(extents)
    x = windows.view(problem.y[0], *extents, *problem.kernel, problem.x[1])
    order = [0, *(i for dim in range(1, n + 1) for i in (dim, dim + n)), 2 * n + 1]
    x = x.permute(order).reshape(_voxels_last(problem.x)).movedim(-1, 1)
    x = in_channels_last(x)
    return x if bias is None else x.add_(bias.view(-1, *[1] * n))


def weight_by_matrix(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, with_bias: bool, problem: Problem
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of weight and bias."""
    rows = _rows(g)
    matrix = rows.t() @ _windows(x, problem)
    dw = matrix.view(problem.weight[0], *problem.kernel, problem.weight[1]).movedim(-1, 1)
    return dw, rows.sum(0) if with_bias else None  # whoever keeps it puts it into order


def weight_by_samples(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, with_bias: bool, problem: Problem
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of weight and bias, from some samples at a time; their sum in float32."""
    size = _samples_at_once(problem)
    dw = None
    for some, of_some in zip(x.split(size), g.split(size), strict=True):
        part = replace(problem, x=tuple(some.shape))
        product, _ = weight_by_matrix(some, of_some, weight, False, part)
        dw = product if dw is None else dw.float().add_(product)
    assert dw is not None
    return dw.to(x.dtype), _rows(g).sum(0) if with_bias else None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """One row a voxel, one column a channel."""
    return x.movedim(1, -1).reshape(-1, x.shape[1])


def _windows(x: torch.Tensor, problem: Problem) -> torch.Tensor:
    """One row a window."""
    if any(problem.padding):
        x = F.pad(x, [p for p in reversed(problem.padding) for _ in range(2)])
    windows = x.movedim(1, -1)
    options = problem.options
    steps = zip(problem.kernel, options.stride, options.dilation, strict=True)
    for dim, (taps, stride, dilation) in enumerate(steps, 1):
        span = dilation * (taps - 1) + 1
        windows = windows.unfold(dim, span, stride)[..., ::dilation]
    n = len(problem.kernel)
    return windows.movedim(n + 1, -1).reshape(x.shape[0] * math.prod(problem.y[2:]), -1)


def _matrix(weight: torch.Tensor) -> torch.Tensor:
    """One row an output channel, its columns as those of `_windows`."""
    return weight.movedim(1, -1).reshape(weight.shape[0], -1)


def _voxels_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], *shape[2:], shape[1])
