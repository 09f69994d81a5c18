"""`measure`: the variant that is fastest here, timed at its first use on the real operands."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from hyperslab.ops.kernels import choose
from hyperslab.ops.kernels.convolution.options import Problem
from hyperslab.ops.kernels.convolution.stored import StoredChoices
from hyperslab.ops.kernels.convolution.variants import CONV_VARIANTS, fixed

WORTHWHILE = 20_000_000
"""Products from which on a pass is measured: some tenths of a millisecond of one core."""

COPIED = 1 << 22
"""Elements of both volumes up to which a variant may copy them."""

SLOW = 2.0  # times the fastest so far: not run once more
CLEARLY = 0.95  # of the rule's time: what another variant must be below


class MeasuredChoices:
    """Choices of this process, read from disk or measured and written there."""

    def __init__(self, stored: StoredChoices) -> None:
        self._stored = stored
        self._names: dict[Problem, str] = {}

    def name(self, problem: Problem, run: Callable[[str], Any]) -> str:
        """The variant for a problem; ``run`` computes it by a variant's name."""
        name = self._names.get(problem)
        if name is None:
            name = self._stored.read(problem)
            if name not in legal(problem):
                name = self._stored.keep(problem, fastest(problem, run))
            if name not in legal(problem):  # of another version of hyperslab
                name = fixed(problem)
            self._names[problem] = name
        return name


@functools.cache
def measured_choices(threads: int) -> MeasuredChoices:
    """Those for this number of threads."""
    return MeasuredChoices(StoredChoices(threads=threads))


def is_measured(problem: Problem) -> bool:
    """Whether it is worth it, and nobody watches operators or traces them."""
    return (
        problem.products >= WORTHWHILE
        and not choose.is_traced()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def legal(problem: Problem) -> list[str]:
    """The names of its variants, the rule's first.

    Of large volumes without those that copy them: a step may fit by less than that.
    """
    first = fixed(problem)
    large = math.prod(problem.x) + math.prod(problem.y) > COPIED
    rest = [
        name
        for name, variant in CONV_VARIANTS[problem.task].items()
        if name != first and variant.legal(problem) and not (large and variant.copies)
    ]
    return [first, *rest]


def fastest(problem: Problem, run: Callable[[str], Any]) -> str:
    """Best of two after a first run, which also plans; the rule's unless another is clearly faster.

    A variant that oneDNN refuses here is none.
    """
    first, *rest = legal(problem)
    limit = min(_seconds(run, first) for _ in range(3)) * CLEARLY
    best = first
    for name in rest:
        try:
            seconds = _seconds(run, name)
            if seconds > SLOW * limit:
                continue
            seconds = min(seconds, _seconds(run, name), _seconds(run, name))
        except RuntimeError:
            continue
        if seconds < limit:
            best = name
            limit = seconds
    return best


def _seconds(run: Callable[[str], Any], name: str) -> float:
    begin = time.perf_counter()
    run(name)
    return time.perf_counter() - begin
