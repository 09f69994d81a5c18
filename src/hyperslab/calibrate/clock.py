"""Times of work that all ranks do at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from hyperslab.comm import Grid
from hyperslab.comm.agreement import from_all

REPETITIONS = (5, 100)  # at least and at most


@dataclass(frozen=True)
class Clock:
    """Repeats work on all ranks together, for about ``budget`` [s] each time.

    ``of`` takes one time of a rank's repetitions: the median, as in a step, or the least.
    """

    grid: Grid
    budget: float = 0.3
    of: Callable[[Sequence[float]], float] = statistics.median

    def seconds(
        self, work: Callable[[], object], before: Callable[[], object] | None = None
    ) -> float:
        """The time [s] that it takes, the mean over ranks.

        All ranks call this. ``before`` runs before each repetition and is not counted.
        """
        return statistics.fmean(from_all(self.of(self.times(work, before))))

    @property
    def least(self) -> Clock:
        """One that takes the least time, which other processes disturb least."""
        return replace(self, of=min)

    def times(
        self, work: Callable[[], object], before: Callable[[], object] | None = None
    ) -> list[float]:
        """On this rank, one [s] each repetition, after warming up."""
        self._once(work, before)
        longest = max(from_all(self._once(work, before)))
        fewest, most = REPETITIONS
        count = int(min(max(self.budget / longest, fewest), most))
        self.grid.barrier()
        return [self._once(work, before) for _ in range(count)]

    def _once(self, work: Callable[[], object], before: Callable[[], object] | None) -> float:
        if before is not None:
            before()
        begin = self._now()
        work()
        return self._now() - begin

    def _now(self) -> float:
        """When everything queued on the device is done."""
        if self.grid.device.type == "cuda":
            torch.cuda.synchronize(self.grid.device)
        return time.perf_counter()
