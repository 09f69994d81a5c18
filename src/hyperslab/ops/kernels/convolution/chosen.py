"""Run a pass by the variant that is chosen for it."""

from __future__ import annotations

from typing import Any

import torch

from hyperslab.ops.kernels.convolution.guards import guarded
from hyperslab.ops.kernels.convolution.measured import is_measured, measured_choices
from hyperslab.ops.kernels.convolution.options import Kernels, Problem
from hyperslab.ops.kernels.convolution.variants import CONV_VARIANTS, fixed


def chosen(problem: Problem, kernels: Kernels, *operands: Any) -> Any:
    """The result of a pass; ``operands`` are what its variants take before the problem.

    Blocks are channels last, and so is the result.
    """

    def run(problem: Problem, *operands: Any) -> Any:
        variants = CONV_VARIANTS[problem.task]
        if kernels != "measure" or not is_measured(problem):
            return variants[fixed(problem)].run(*operands, problem)
        known = measured_choices(torch.get_num_threads())
        name = known.name(problem, lambda name: variants[name].run(*operands, problem))
        return variants[name].run(*operands, problem)

    return guarded(run, problem, *operands)
