"""Defines what surrounds one optimizer step: its precision, its result, its vote, its clock.

In reading order: the types that torch computes in, and the scale of float16; the vote, one small
collective a step (is the loss a number, does any rank want to stop?); a step's result, its time and
its row of the history.
"""

from __future__ import annotations

import datetime
import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyperslab.comm import Grid
from hyperslab.comm.bootstrap import world
from hyperslab.data import Dataset
from hyperslab.recipe.schema import Recipe
from hyperslab.recipe.section import choose

PRECISIONS: dict[str, torch.dtype | None] = {
    "float32": None,
    "tf32": None,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
}
"""Autocast casts to these by ``precision``, None for weights and values as they are."""

_MATMUL: Any = torch.backends.cuda.matmul
_CONV: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]


@contextmanager
def autocast(device: torch.device, precision: str) -> Iterator[None]:
    """Compute in the recipe's precision: autocast, and `float32_products` as it says."""
    dtype = choose(PRECISIONS, precision, "precision")
    cast = torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)
    with float32_products(precision), cast:
        yield


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Let a CUDA device multiply float32 as TF32 (10 bits) with "tf32" alone, and in no other run.

    By torch's defaults convolutions do so and products of matrices do not. Afterwards its switches
    are as they were.
    """
    before = _MATMUL.fp32_precision, _CONV.fp32_precision
    _set_products("tf32" if precision == "tf32" else "ieee")
    try:
        yield
    finally:
        _set_products(*before)


def _set_products(matmul: str, conv: str | None = None) -> None:
    """Set both generations of torch's switches: code that reads an older one that differs gets an
    error from torch.
    """
    conv = conv or matmul
    _MATMUL.allow_tf32 = matmul == "tf32"
    torch.backends.cudnn.allow_tf32 = conv == "tf32"
    _MATMUL.fp32_precision = matmul
    _CONV.fp32_precision = conv


@contextmanager
def arithmetic(recipe: Recipe, *, same_shapes: bool) -> Iterator[None]:
    """Set torch's switches for a run, whose backward passes are outside of `autocast`.

    With ``same_shapes`` cuDNN tries its algorithms for each convolution once and keeps the fastest,
    but for ``kernels: fixed`` (it does not choose the same one each time) and ``torch``.
    """
    before = torch.backends.cudnn.benchmark
    with float32_products(recipe.precision):
        if recipe.kernels != "torch":
            torch.backends.cudnn.benchmark = same_shapes and recipe.kernels != "fixed"
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before


class LossScaler(torch.amp.GradScaler):
    """Scales the loss of a run in float16, whose small gradients would be zero, for a grid.

    [Note: float16 on a grid] Until gradients are averaged they are those of the sum of all ranks'
    losses, of which each is the global mean: in a cut network as many times the serial ones as
    there are ranks. So the loss is scaled by that much less, and float16 ends where it does in a
    serial run. Other types need no scale; then this does nothing.
    """

    FIRST = 2.0**16
    """Scales the loss of a serial run at first, as torch does."""

    def __init__(self, grid: Grid, precision: str) -> None:
        self.ranks = grid.size
        on = precision == "float16"
        super().__init__(grid.device.type, init_scale=self.FIRST / grid.size, enabled=on)

    def state_dict(self) -> dict[str, Any]:
        """Return its state as on one rank; empty where there is no scale."""
        state = super().state_dict()
        return {**state, "scale": state["scale"] * self.ranks} if state else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a state that any grid has written; an empty one is left."""
        if state and self.is_enabled():
            super().load_state_dict({**state, "scale": state["scale"] / self.ranks})


@dataclass(frozen=True, slots=True)
class Verdict:
    """Holds what all ranks know about a step; the same on every rank."""

    loss: float
    finite: bool
    culprit: int | None  # the first rank whose prediction, or else whose loss alone, is not finite
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
        self.facts = _vote_facts(grid, loss, prediction, stop=stop, wait=wait)
        if grid.size > 1:
            self.work = dist.all_reduce(
                self.facts, op=dist.ReduceOp.MAX, group=world(), async_op=True
            )
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
        """Wait until it has arrived, so long at most; what went wrong is for `result` to say."""
        if self.work is not None:
            with suppress(RuntimeError):
                self.work.wait(limit)

    def result(self) -> Verdict:
        """Wait for the agreement."""
        if self.work is not None:
            self.work.wait()
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, infinite, some_finite, wrong, stop, wait, memory = self.facts.tolist()
        # Where no rank has a finite loss they have the same one, which says nothing of a rank.
        first = wrong or (infinite if some_finite else 0)
        return Verdict(
            loss=math.nan if infinite else loss,
            finite=not infinite and not wrong,
            culprit=self.size - int(first) if first else None,
            signal=int(stop),
            wait_seconds=wait,
            memory_bytes=int(memory),
        )


def _vote_facts(
    grid: Grid, loss: torch.Tensor, prediction: torch.Tensor, *, stop: int, wait: float
) -> torch.Tensor:
    """Loss, who has no finite one, has anybody, who predicted no number, signal, wait, memory.

    Of several ranks the first has the largest number. Seconds and bytes are as in `Verdict`.
    """
    finite = torch.isfinite(loss)
    wrong = ~torch.isfinite(prediction).all()
    number = grid.size - grid.rank
    of_step = (torch.where(finite, loss, 0.0), ~finite * number, finite, wrong * number)
    of_rank = torch.tensor(
        [stop, wait, peak_memory_bytes(grid.device)],
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


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory so far [B]: of this process, or allocated on its CUDA device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def weights_are_finite(model: nn.Module) -> bool:
    """Tell whether all that is trained on this rank is finite, by one pass over it.

    Of finite weights beyond 1e38 a sum may not be finite; these are looked at one by one.
    """
    weights = [p.detach() for p in model.parameters() if p.requires_grad]
    own = [w.to_local() if hasattr(w, "to_local") else w for w in weights]  # of a DTensor
    sums = [w.sum().abs().float() for w in own]
    if not sums or bool(torch.stack(sums).isfinite().all()):
        return True
    return all(bool(w.isfinite().all()) for w in own)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Holds what a step of the optimizer gave, still on the device.

    ``loss`` is the global mean; ``prediction`` is this rank's block of the last one; ``samples``
    are those of the step, on all ranks.
    """

    loss: torch.Tensor
    prediction: torch.Tensor
    samples: int


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that is done and whose vote is under way; ``facts`` are this rank's of the history."""

    vote: Vote
    samples: int
    facts: dict[str, Any]


class StepClock:
    """Measures how long a step takes [s], and how long of that it waits for data [s]."""

    def __init__(self, data: Dataset) -> None:
        self.data = data
        self.restart()

    def restart(self) -> None:
        self.began = time.perf_counter()
        self.waited = self.data.wait_seconds

    def lap(self) -> tuple[float, float]:
        """End the step: return its time, and its wait for data. The next one begins."""
        began, waited = self.began, self.waited
        self.restart()
        return self.began - began, self.waited - waited
