"""All passes of convolutions of few channels in bfloat16, see `hyperslab.ops.kernels.direct`."""

from __future__ import annotations

import math

import torch

from hyperslab.ops.kernels.convolution.options import Problem
from hyperslab.ops.kernels.direct import compiled

FEW_CHANNELS = 32
"""Channels of either volume up to which it may be faster than oneDNN, which fills up 16."""

ROOM = 32 << 20
"""[B] Planes that the kernel may keep beside the volumes."""


def fits_registers(problem: Problem) -> bool:
    """In steps of one voxel, on a processor that has the instructions."""
    options = problem.options
    volumes = (problem.x, problem.y)
    return (
        problem.dtype == torch.bfloat16
        and options.groups == 1
        and set(options.stride) == set(options.dilation) == {1}
        and max(volume[1] for volume in volumes) <= FEW_CHANNELS
        and min(_reach(problem)) >= 0
        and problem.kernel[0] * max(_plane(volume) for volume in volumes) <= ROOM
        and compiled.is_known()
    )


def forward_in_registers(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    """The convolution."""
    return torch.ops.hyperslab.direct_convolution(x, weight, bias, problem.padding, False)


def input_in_registers(
    g: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, problem: Problem
) -> torch.Tensor:
    """The input's gradient: a convolution by the kernel turned round."""
    return torch.ops.hyperslab.direct_convolution(g, weight, bias, _reach(problem), True)


def weight_in_registers(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, with_bias: bool, problem: Problem
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of weight and bias."""
    dw, db = torch.ops.hyperslab.direct_convolution_gradient(
        x, g, problem.kernel, problem.padding, with_bias
    )
    return dw, db if with_bias else None


def _reach(problem: Problem) -> list[int]:
    return [k - 1 - p for k, p in zip(problem.kernel, problem.padding, strict=True)]


def _plane(volume: tuple[int, ...]) -> int:
    """[B] Of a plane, but for a margin."""
    return 2 * volume[1] * math.prod(volume[-2:])
