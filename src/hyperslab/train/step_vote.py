"""One small collective per step: is the loss a number, and does any rank want to stop?"""

from __future__ import annotations

import datetime
import math
import resource
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hyperslab.comm import Grid


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks know about a step; the same on every rank."""

    loss: float
    finite: bool
    culprit: int | None  # the first rank whose prediction is not finite
    signal: int  # that any rank got; 0: none
    wait_seconds: float  # for data, the longest of all ranks
    memory_bytes: int  # at its highest, the most of all ranks


class Vote:
    """The agreement about one step, under way while the next step runs.

    Distribution scheme:
      1. Every rank puts its facts into one vector.
      2. The elementwise maximum over all ranks, started and not waited for.
      3. `result` waits and reads it: a step later, when it has long arrived.
    """

    def __init__(
        self, grid: Grid, loss: torch.Tensor, prediction: torch.Tensor, *, stop: int, wait: float
    ) -> None:
        self.size = grid.size
        self.work: dist.Work | None = None
        self.arrived: torch.cuda.Event | None = None
        self.facts = _facts(grid, loss, prediction, stop=stop, wait=wait)
        if grid.size > 1:
            self.work = dist.all_reduce(self.facts, op=dist.ReduceOp.MAX, async_op=True)
        if grid.device.type == "cuda":
            self._fetch()

    def _fetch(self) -> None:
        """Copy to the host in stream order: reading it later waits for this step only."""
        if self.work is not None:
            self.work.wait()  # the stream's wait, not the host's
        host = torch.empty(self.facts.shape, dtype=self.facts.dtype, pin_memory=True)
        self.facts = host.copy_(self.facts, non_blocking=True)
        self.arrived = torch.cuda.Event()
        self.arrived.record()
        self.work = None

    def wait(self, limit: datetime.timedelta) -> None:
        """Until it has arrived, for as long at most; what went wrong is for `result` to say."""
        if self.work is not None:
            with suppress(RuntimeError):
                self.work.wait(limit)

    def result(self) -> Verdict:
        """Wait for the agreement."""
        if self.work is not None:
            self.work.wait()
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, infinite, wrong, stop, wait, memory = self.facts.tolist()
        return Verdict(
            loss=math.nan if infinite else loss,
            finite=not infinite and not wrong,
            culprit=self.size - int(wrong) if wrong else None,
            signal=int(stop),
            wait_seconds=wait,
            memory_bytes=int(memory),
        )


def _facts(
    grid: Grid, loss: torch.Tensor, prediction: torch.Tensor, *, stop: int, wait: float
) -> torch.Tensor:
    """Loss, is it not finite, who predicted no number, signal, wait [s], memory [B]."""
    finite = torch.isfinite(loss)
    wrong = ~torch.isfinite(prediction).all()
    of_step = (torch.where(finite, loss, 0.0), ~finite, wrong * (grid.size - grid.rank))
    of_rank = torch.tensor(
        [stop, wait, memory_bytes(grid.device)],
        dtype=torch.float64,
        device="cpu",
        pin_memory=grid.device.type == "cuda",
    )
    return torch.cat(
        (
            torch.stack([fact.double() for fact in of_step]),
            of_rank.to(grid.device, non_blocking=True),
        )
    )


def memory_bytes(device: torch.device) -> int:
    """The most memory so far [B]: of this process, or allocated on its CUDA device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
