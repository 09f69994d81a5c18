"""`fixed`: the kernel by a rule from shape and type alone, the same on every machine."""

from __future__ import annotations

import torch

from hyperslab.ops.kernels.convolution.options import Problem
from hyperslab.ops.kernels.convolution.variants.columns import has_columns
from hyperslab.ops.kernels.convolution.variants.input_pass import can_flip, has_name
from hyperslab.ops.kernels.convolution.variants.matrix import windows_tile
from hyperslab.ops.kernels.convolution.variants.weight_pass import has_halves, takes_im2col


def fixed(problem: Problem) -> str:
    """The name of a variant that is legal.

    Where the weight is much larger than the volumes: oneDNN in contiguous memory. Otherwise oneDNN
    in channels last, which in float32 takes another way round for each gradient, see the variants.
    """
    return _BY_TASK[problem.task](problem)


WORTH_COLUMNS = 1 << 22
"""Products from which on a copy of the input counts less than what it saves."""


def _forward(problem: Problem) -> str:
    if _takes_columns(problem):
        return "columns"
    return "contiguous" if problem.heavy else "onednn"


def _takes_columns(problem: Problem) -> bool:
    """In float32 oneDNN has kernels of its own for one channel."""
    narrow = problem.dtype == torch.bfloat16 and problem.products >= WORTH_COLUMNS
    return narrow and has_columns(problem)


def _input(problem: Problem) -> str:
    if problem.heavy and has_name(problem):
        return "contiguous"
    even = problem.x[2:] == problem.y[2:]  # else it multiplies more
    if problem.dtype == torch.float32 and even and can_flip(problem):
        return "flipped"
    return "onednn" if has_name(problem) else "torch"


def _weight(problem: Problem) -> str:
    if _takes_columns(problem):
        return "columns"
    if problem.heavy:
        return "contiguous"
    if not takes_im2col(problem):
        return "torch"
    if windows_tile(problem) and set(problem.kernel) == {1}:
        return "matrix"
    return "halves" if has_halves(problem) else "contiguous"


_BY_TASK = {"forward": _forward, "input": _input, "weight": _weight}
