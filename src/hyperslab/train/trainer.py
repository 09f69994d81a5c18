"""The training loop: mini-batches in, a trained network out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from hyperslab.checkpoint.run_state import Position
from hyperslab.comm import Grid
from hyperslab.recipe.schema import Recipe
from hyperslab.tensor import Sharded
from hyperslab.train.flops import FlopCount
from hyperslab.train.objective import Objective
from hyperslab.train.parts.schedules import RateSchedule
from hyperslab.train.precision import autocast
from hyperslab.train.progress import Progress
from hyperslab.train.step import StepClock, StepResult

MiniBatch = tuple[Sharded, Sharded]
"""Values and target."""


TEST_LOSS = "test_loss"
"""Its column in ``epochs.csv``."""


class Batches(Protocol):
    """The mini-batches of one split: `hyperslab.data.Dataset` has them."""

    @property
    def wait_seconds(self) -> float: ...

    at: int

    def __len__(self) -> int: ...

    @property
    def steps(self) -> int: ...

    def epoch(self, epoch: int, start: int = 0, *, onward: bool = False) -> Iterator[MiniBatch]: ...


class Trainer:
    """Trains a parallelised model on one rank of the grid; every rank runs the same one."""

    def __init__(
        self,
        recipe: Recipe,
        grid: Grid,
        objective: Objective,
        *,
        data: Batches,
        validation: Batches,
        progress: Progress,
        test: Batches | None = None,
    ) -> None:
        """``test`` is measured after every epoch, too, if it is there."""
        self.recipe = recipe
        self.grid = grid
        self.objective = objective
        self.data = data
        self.validation = validation
        self.test = test
        self.progress = progress
        self.model = progress.state.model
        self.optimizer = progress.state.optimizer
        assert isinstance(progress.state.schedule, RateSchedule)
        self.schedule = progress.state.schedule
        self.no_sync: Callable[[], AbstractContextManager[None]] = self.model.no_sync  # type: ignore[assignment]
        self.clock = StepClock(data)

    @property
    def at(self) -> Position:
        """How far the run is."""
        return self.progress.at

    def fit(self) -> None:
        """Train to the recipe's last epoch, or until it is as good as the recipe asks for.

        Raises:
            Stopped: after a signal, with a checkpoint written.
            DivergedError: the loss is not finite; the last checkpoint is from before.
            CheckpointError: one cannot be written.
        """
        with self.progress.stop.listening(), self.progress.writer.finishing():
            events = self.progress.events
            while not self.progress.finished:
                epoch = self.at.epoch
                events.epoch_begins(epoch)
                self.train_epoch()
                events.validation_begins(epoch)
                began = time.perf_counter()
                measured = self.validate()
                seconds = time.perf_counter() - began
                events.validation_ends(epoch, measured)
                events.epoch_ends(epoch)
                if self.test is not None:  # not counted: a training needs none of it
                    measured |= {TEST_LOSS: self.measure(self.test)["validation_loss"]}
                self.schedule.end_epoch(measured)
                self.progress.finish_epoch(measured, seconds)

    def train_epoch(self) -> None:
        """The rest of an epoch, from the position on."""
        self.model.train()
        self.clock.restart()
        onward = self.at.epoch + 1 < self.recipe.epochs
        batches = iter(self.data.epoch(self.at.epoch, self.at.batch, onward=onward))
        while (batch := next(batches, None)) is not None:
            rate = self.progress.rate
            step = self.first_step if self.progress.flops.wanted else self.train_step
            done = step(batch, batches)
            self.at.batch = self.data.at
            self.at.step += 1
            self.record(done, rate)
        self.at.batch = self.data.steps
        self.progress.end_steps()

    def record(self, done: StepResult, rate: float) -> None:
        """The step is done: vote, write, stop; as `Progress.record`."""
        self.progress.record(done, rate, self.clock)

    def first_step(self, batch: MiniBatch, batches: Iterator[MiniBatch]) -> StepResult:
        """`train_step`, with its floating-point operations counted."""
        with FlopCount() as count:
            done = self.train_step(batch, batches)
        self.progress.flops.counted(count.flops, done.samples)
        return done

    def train_step(self, batch: MiniBatch | None, batches: Iterator[MiniBatch]) -> StepResult:
        """One step of the optimizer over ``batch`` and those that are accumulated with it.

        It waits for nothing.
        """
        losses: list[torch.Tensor] = []
        seen = 0
        count = self.recipe.optimizer.accumulate
        planned = self.samples_of(count)
        while batch is not None:
            x, y = batch
            seen += x.shape[0]
            batch = next(batches, None) if len(losses) + 1 < count else None
            with torch.enable_grad() if batch is None else self.no_sync():
                with self.autocast():
                    prediction = self.model(x)
                    loss = self.objective.loss(prediction, y) * (x.shape[0] / planned)
                loss.backward()
            losses.append(loss.detach())
        if seen != planned:  # samples were left out because they could not be read
            torch._foreach_mul_(
                [p.grad for p in self.model.parameters() if p.grad is not None], planned / seen
            )
        if self.recipe.optimizer.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.optimizer.clip)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        mean = torch.stack(losses).sum() * (planned / seen)
        return StepResult(mean, prediction.local.detach(), seen)

    def samples_of(self, count: int) -> int:
        """Samples in the next mini-batches; the last one of an epoch may be smaller."""
        size = self.recipe.data.batch_size
        done = self.at.batch
        return min((done + count) * size, len(self.data)) - done * size

    def autocast(self) -> torch.autocast:
        """In the recipe's precision."""
        return autocast(self.grid.device, self.recipe.precision)

    def validate(self) -> dict[str, float | None]:
        """The objective's measures over the validation split."""
        return self.measure(self.validation)

    @torch.no_grad()
    def measure(self, split: Batches) -> dict[str, float | None]:
        """The objective's measures over a split, under the names that they have in a validation."""
        self.model.eval()
        sums = self.objective.metric_sums(self.grid)
        for x, y in split.epoch(0):
            with self.autocast():
                prediction = self.model(x)
                loss = self.objective.loss(prediction, y).reshape(())
                sums.add(prediction, y, loss)
            self.progress.check_stop(loss, prediction.local)
        return sums.result()
