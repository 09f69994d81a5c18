"""The training loop: mini-batches in, a trained model, a history and checkpoints out."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from hyperslab.checkpoint.data_card import DataCard
from hyperslab.checkpoint.retention import folder_of, save_step
from hyperslab.checkpoint.run_state import Position, state_of
from hyperslab.comm import Grid
from hyperslab.errors import DivergedError, Stopped
from hyperslab.recipe.schema import Recipe
from hyperslab.tensor import Sharded
from hyperslab.train.objective import Objective
from hyperslab.train.precision import autocast
from hyperslab.train.reporter import Reporter
from hyperslab.train.step_vote import Verdict, Vote
from hyperslab.train.stop_request import StopRequest

Batch = tuple[Sharded, Sharded]
Batches = Iterator[Batch]


class Source(Protocol):
    """What the trainer needs of data: `hyperslab.data.Dataset` has it."""

    @property
    def wait_seconds(self) -> float: ...

    at: int

    def __len__(self) -> int: ...

    @property
    def steps(self) -> int: ...

    def epoch(self, epoch: int, start: int = 0, *, onward: bool = False) -> Batches: ...


@dataclass(frozen=True, slots=True)
class Pending:
    """A step that is done and whose agreement is under way."""

    vote: Vote
    step: int
    epoch: int
    rate: float
    samples: int
    seconds: float


class Trainer:
    """Trains a parallelised model on one rank of the grid; every rank runs the same one.

    Only the main rank has a ``reporter``; ``samples`` is the digest of the training split and
    ``about`` describes the data.
    """

    def __init__(
        self,
        recipe: Recipe,
        grid: Grid,
        model: torch.nn.Module,
        objective: Objective,
        *,
        data: Source,
        validation: Source,
        optimizer: torch.optim.Optimizer,
        schedule: LRScheduler,
        at: Position,
        samples: str,
        about: DataCard,
        reporter: Reporter | None = None,
    ) -> None:
        self.recipe, self.grid, self.model = recipe, grid, model
        self.data, self.validation = data, validation
        self.optimizer, self.schedule = optimizer, schedule
        self.at, self.samples, self.about, self.reporter = at, samples, about, reporter
        self.objective = objective
        self.no_sync: Callable[[], AbstractContextManager[None]] = model.no_sync  # type: ignore
        self.stop = StopRequest()
        self.pending: Pending | None = None

    def fit(self) -> None:
        """Train to the recipe's last epoch.

        Raises:
            Stopped: after a signal, with a checkpoint written.
            DivergedError: the loss is not finite; the last checkpoint is from before.
            CheckpointError: one cannot be written.
        """
        with self.stop.listening():
            while self.at.epoch < self.recipe.epochs:
                self.train_epoch()
                self.finish_epoch()

    def train_epoch(self) -> None:
        """The rest of an epoch, from the position on."""
        self.model.train()
        self.since, self.waited = time.perf_counter(), self.data.wait_seconds
        onward = self.at.epoch + 1 < self.recipe.epochs
        batches = iter(self.data.epoch(self.at.epoch, self.at.batch, onward=onward))
        while (batch := next(batches, None)) is not None:
            rate = self.optimizer.param_groups[0]["lr"]
            loss, prediction, samples = self.train_step(batch, batches)
            self.at.batch = self.data.at
            self.at.step += 1
            self.record(loss, prediction, samples, rate)
        self.at.batch = self.data.steps
        if number := self.settle():
            self.leave(number)

    def train_step(
        self, batch: Batch | None, batches: Batches
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """One step of the optimizer over ``batch`` and those that are accumulated with it.

        Returns the loss, this rank's last prediction and the number of samples; waits for nothing.
        """
        losses, seen, count = list[torch.Tensor](), 0, self.recipe.optimizer.accumulate
        planned = self.samples_of(count)
        while batch is not None:
            (x, y), seen = batch, seen + batch[0].shape[0]
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
        loss = torch.stack(losses).sum() * (planned / seen)
        return loss, prediction.local.detach(), seen

    def samples_of(self, count: int) -> int:
        """Samples in the next mini-batches; the last one of an epoch may be smaller."""
        size, done = self.recipe.data.batch_size, self.at.batch
        return min((done + count) * size, len(self.data)) - done * size

    def autocast(self) -> torch.autocast:
        """bf16 where the recipe says so."""
        return autocast(self.grid.device, self.recipe.precision)

    def record(
        self, loss: torch.Tensor, prediction: torch.Tensor, samples: int, rate: float
    ) -> None:
        """Start the agreement about this step, finish that of the step before."""
        now, waited = time.perf_counter(), self.data.wait_seconds
        vote = Vote(self.grid, loss, prediction, stop=self.stop.signal, wait=waited - self.waited)
        new = Pending(vote, self.at.step, self.at.epoch, rate, samples, now - self.since)
        before, self.pending = self.pending, new
        if number := self.finish(before):
            self.leave(number)
        every = self.recipe.checkpoint.every_steps
        if every is not None and self.at.step % every == 0:
            self.checkpoint()
            now = time.perf_counter()
        self.since, self.waited = now, waited

    def settle(self) -> int:
        """Finish the agreement that is under way."""
        done, self.pending = self.pending, None
        return self.finish(done)

    def finish(self, done: Pending | None) -> int:
        """Record an agreed step; returns the signal that any rank got, or 0.

        Every rank reads the same verdict, so all go on or none does.
        """
        if done is None:
            return 0
        verdict = done.vote.result()
        if not verdict.finite:
            raise DivergedError(self.diverged(done, verdict))
        self.at.loss += verdict.loss * done.samples
        self.at.samples += done.samples
        self.at.seconds += done.seconds
        if self.reporter is not None:
            self.reporter.step(_row(done, verdict))
        return verdict.signal

    def leave(self, number: int) -> None:
        """Write a checkpoint and end, because of a signal."""
        path = self.checkpoint()
        name = signal.Signals(number).name
        raise Stopped(number, f"stopped by {name} after {path}\n    go on with --resume")

    def diverged(self, done: Pending, verdict: Verdict) -> str:
        """The words of the error, with the rank where one can be told."""
        where = "" if verdict.culprit is None else f"; the first is rank {verdict.culprit}"
        return (
            f"the loss is not a finite number in step {done.step} (epoch {done.epoch}){where}\n"
            f"    the checkpoints in {folder_of(self.recipe.output)} are from before\n"
            "    try a smaller optimizer.learning_rate, or optimizer.clip=1"
        )

    @torch.no_grad()
    def validate(self) -> dict[str, float | None]:
        """The objective's measures over the validation split."""
        self.model.eval()
        tally = self.objective.tally(self.grid)
        for x, y in self.validation.epoch(0):
            with self.autocast():
                prediction = self.model(x)
                loss = self.objective.loss(prediction, y)
                tally.add(prediction, y, loss)
            vote = Vote(self.grid, loss, prediction.local, stop=self.stop.signal, wait=0.0)
            if number := vote.result().signal:
                self.leave(number)
        return tally.result()

    def finish_epoch(self) -> None:
        """Validate, record, go to the next epoch, and write a checkpoint where one is due."""
        at, begin = self.at, time.perf_counter()
        measured = self.validate()
        train, validation = (
            at.loss / at.samples if at.samples else None,
            measured["validation_loss"],
        )
        row = {
            "epoch": at.epoch,
            "train_loss": train,
            **measured,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "seconds": at.seconds + time.perf_counter() - begin,
        }
        if self.reporter is not None:
            self.reporter.epoch(row, at.step)
        self.at = Position(step=at.step, epoch=at.epoch + 1, best=at.best)
        if self.at.epoch % self.recipe.checkpoint.every == 0 or self.at.epoch == self.recipe.epochs:
            validation = measured["validation_loss"]
            self.checkpoint(train if validation is None else validation)

    def checkpoint(self, score: float | None = None) -> Path:
        """Write the state of the run; the lowest ``score`` is the best."""
        self.settle()
        best = score is not None and score < (math.inf if self.at.best is None else self.at.best)
        if best:
            self.at.best = score
        return save_step(
            self.recipe.output,
            self.at.step,
            self.model,
            self.optimizer,
            best=best,
            keep=self.recipe.checkpoint.keep,
            **state_of(
                self.at,
                self.schedule,
                self.recipe.data.batch_size,
                self.samples,
                self.about,
                self.grid.device,
            ),
        )


def _row(done: Pending, verdict: Verdict) -> dict[str, float]:
    return {
        "step": done.step,
        "epoch": done.epoch,
        "loss": verdict.loss,
        "learning_rate": done.rate,
        "step_seconds": done.seconds,
        "wait_seconds": verdict.wait_seconds,
        "samples_per_second": done.samples / done.seconds,
        "memory_bytes": verdict.memory_bytes,
    }
