"""Run a pass by the variant that is chosen for it."""

from __future__ import annotations

from typing import Any

from hyperslab.ops.kernels.convolution.guards import guarded
from hyperslab.ops.kernels.convolution.options import Kernels, Problem
from hyperslab.ops.kernels.convolution.variants import CONV_VARIANTS, fixed


def chosen(problem: Problem, kernels: Kernels, *operands: Any) -> Any:
    """The result of a pass; ``operands`` are what its variants take before the problem.

    Blocks are channels last, and so is the result.
    """

    def run(problem: Problem, *operands: Any) -> Any:
        return CONV_VARIANTS[problem.task][fixed(problem)].run(*operands, problem)

    return guarded(run, problem, *operands)
