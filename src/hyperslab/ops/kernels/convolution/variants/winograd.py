"""The weight's gradient of windows of 3³ voxels, see `hyperslab.ops.kernels.winograd`."""

from __future__ import annotations

import torch

from hyperslab.ops.kernels.convolution.options import Problem
from hyperslab.ops.kernels.winograd import compiled, reference

LEAST_CHANNELS = 8
"""Of either volume: the kernel works on eight or sixteen at a time."""

ROOM_FOR_SUMS = 32 << 20
"""[B] Of 64 kinds of products and 27 taps, which each thread keeps; channels not filled up."""


def fits_winograd(problem: Problem) -> bool:
    """In steps of one voxel, on a processor that has the instructions."""
    options = problem.options
    channels = problem.x[1], problem.y[1]
    return (
        problem.dtype in compiled.WINOGRAD_DTYPES
        and options.groups == 1
        and set(options.stride) == set(options.dilation) == {1}
        and problem.kernel == reference.KERNEL
        and min(channels) >= LEAST_CHANNELS
        and 4 * (64 + 27) * channels[0] * channels[1] <= ROOM_FOR_SUMS
        and compiled.winograd_is_known()
    )


def weight_by_winograd(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, with_bias: bool, problem: Problem
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of weight and bias."""
    dw, db = torch.ops.hyperslab.winograd_gradient(x, g, problem.padding, with_bias)
    return dw, db if with_bias else None
