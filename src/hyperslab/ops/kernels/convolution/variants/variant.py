"""A way to compute a pass, and for which problems there is it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hyperslab.ops.kernels.convolution.layout import torch_makes_columns
from hyperslab.ops.kernels.convolution.options import Problem

MOST_COLUMNS = 64 << 20
"""[B] Of im2col, which is as many times a sample's volume as the kernel has taps, at most."""


def torch_takes_little(problem: Problem) -> bool:
    """Whether what torch chooses needs no more than `MOST_COLUMNS` beside the volumes.

    Torch chooses im2col by few of the extents; of a block it may where it does not of the whole.
    """
    if problem.dtype != torch.float32:
        return True
    if not torch_makes_columns(problem.x, problem.weight, problem.options):
        return True
    taps = math.prod(problem.kernel) * problem.x[1]
    return 4 * taps * math.prod(problem.y[2:]) <= MOST_COLUMNS


def _always(_: Problem) -> bool:
    """For every problem."""
    return True


@dataclass(frozen=True, slots=True)
class ConvVariant:
    """``run`` takes blocks in channels last, the problem last, and gives such blocks.

    ``copies``: it takes the memory of another copy of a block while it runs.
    """

    run: Callable[..., Any]
    legal: Callable[[Problem], bool] = _always
    copies: bool = False


ConvVariants = Mapping[str, ConvVariant]
"""By their names, all of one pass."""
