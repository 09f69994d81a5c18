"""What oneDNN (3.12) gets wrong, in plain torch convolutions too, and the way round it.

It then reads, and sometimes writes, foreign memory: garbage, NaN or a crash. Found by random
shapes; each is a tiny volume, so that the way round costs nothing that counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.ops.kernels.convolution.layout import in_channels_last
from hyperslab.ops.kernels.convolution.options import Problem


def guarded(run: Callable[..., Any], problem: Problem, first: torch.Tensor, *others: Any) -> Any:
    """The result of ``run``, or the same one by a way that oneDNN computes right."""
    if problem.has_lone_column:
        y = guarded(run, problem.in_steps_of_one(), first, *others)
        return in_channels_last(y.narrow(-1, 0, 1))
    if not problem.outreaches:
        return run(problem, first, *others)
    margins = [p for p in reversed(problem.padding) for _ in range(2)]
    if problem.task != "input":
        return run(problem.padded(), in_channels_last(F.pad(first, margins)), *others)
    padded = run(problem.padded(), first, *others)
    return in_channels_last(F.pad(padded, [-margin for margin in margins]))
