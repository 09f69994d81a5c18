"""One step of the optimizer: what it gives, how long it takes, its row of the history."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from hyperslab.train.step_vote import Verdict, Vote


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step of the optimizer gave, still on the device.

    ``loss`` is the global mean; ``prediction`` is this rank's block of the last one; ``samples``
    are those of the step, on all ranks.
    """

    loss: torch.Tensor
    prediction: torch.Tensor
    samples: int


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that is done and whose vote is under way."""

    vote: Vote
    step: int
    epoch: int
    rate: float
    samples: int
    seconds: float
    flops_per_second: float | None
    peak_share: float | None

    def row(self, verdict: Verdict) -> dict[str, float | None]:
        """Its row of the history."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "loss": verdict.loss,
            "learning_rate": self.rate,
            "step_seconds": self.seconds,
            "wait_seconds": verdict.wait_seconds,
            "samples_per_second": self.samples / self.seconds,
            "memory_bytes": verdict.memory_bytes,
            "flops_per_second": self.flops_per_second,
            "peak_share": self.peak_share,
        }


class CountsWaiting(Protocol):
    """Data that count how long they have been waited for, `hyperslab.data.Dataset` say."""

    @property
    def wait_seconds(self) -> float: ...


class StepClock:
    """How long a step takes [s], and how long of that it waits for data [s]."""

    def __init__(self, data: CountsWaiting) -> None:
        self.data = data
        self.began = time.perf_counter()
        self.waited = data.wait_seconds

    def restart(self) -> None:
        """A step begins now."""
        self.began = time.perf_counter()
        self.waited = self.data.wait_seconds

    def lap(self) -> tuple[float, float]:
        """The step that ends now: its time, and its wait for data. The next one begins."""
        began = self.began
        waited = self.waited
        self.restart()
        return self.began - began, self.waited - waited
