"""Convolutions of one channel, with the taps of the last dim as channels.

OneDNN's kernels for bfloat16 work on several channels at a time: of one channel they do the work of
many. Where a window's columns are channels, and the kernel one column wide, there are as many as
the kernel has taps.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import torch.nn.functional as F

from hyperslab.ops.kernels.convolution.layout import in_channels_last
from hyperslab.ops.kernels.convolution.options import PROBLEMS, Problem, problem_for


def has_columns(problem: Problem) -> bool:
    """One channel, several taps, and nothing that oneDNN gets wrong: see `guards`."""
    lone = problem.x[1] == problem.options.groups == 1
    return lone and problem.kernel[-1] > 1 and not in_columns(problem).outreaches


@functools.lru_cache(PROBLEMS)
def in_columns(problem: Problem) -> Problem:
    """The same pass with columns for channels."""
    options = problem.options
    taps = problem.kernel[-1]
    return problem_for(
        problem.task,
        (problem.x[0], taps, *problem.x[2:-1], problem.y[-1]),
        (problem.weight[0], taps, *problem.kernel[:-1], 1),
        problem.dtype,
        replace(options, stride=(*options.stride[:-1], 1), dilation=(*options.dilation[:-1], 1)),
        (*problem.padding[:-1], 0),
    )


def columns_of(x: torch.Tensor, problem: Problem) -> torch.Tensor:
    """(N, 1, ..., W) as (N, taps, ..., outputs), channels last: the tap's part of each window."""
    padding = problem.padding[-1]
    step = problem.options.dilation[-1]
    span = step * (problem.kernel[-1] - 1) + 1
    lines = F.pad(x.squeeze(1), (padding, padding))
    windows = lines.unfold(-1, span, problem.options.stride[-1])[..., ::step]
    return in_channels_last(windows.contiguous().movedim(-1, 1))


def weight_in_columns(weight: torch.Tensor) -> torch.Tensor:
    """(out, 1, ..., taps) as (out, taps, ..., 1)."""
    return weight.movedim(-1, 1).movedim(2, -1).contiguous()


def weight_of_columns(weight: torch.Tensor) -> torch.Tensor:
    """The inverse of `weight_in_columns`."""
    return weight.movedim(1, -1).movedim(-2, 1).contiguous()
