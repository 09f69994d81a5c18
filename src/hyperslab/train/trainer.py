"""Runs the training loop and keeps its progress: mini-batches in, a trained network out.

`Progress` has the position of a run, votes on every step (the vote is read a step later, when it
has long arrived), and writes history and checkpoints when they are due. `Trainer` steps through
the data; `Trainer.train_step` is the step itself.
"""

from __future__ import annotations

import datetime
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hyperslab.checkpoint import folder_of
from hyperslab.checkpoint.background import BackgroundWriter
from hyperslab.checkpoint.retention import save_step
from hyperslab.checkpoint.run_state import Position, RunState
from hyperslab.comm import Grid
from hyperslab.comm.agreement import any_rank
from hyperslab.comm.bootstrap import backend_of
from hyperslab.comm.watch import Watch
from hyperslab.data import Dataset
from hyperslab.errors import DivergedError, Stopped
from hyperslab.recipe.schema import Recipe
from hyperslab.tensor import Sharded
from hyperslab.train import step as steps
from hyperslab.train.flops import FlopCount, StepFlops
from hyperslab.train.history import Reporter
from hyperslab.train.layers import RandomStates, layer_rows, random_states, repeating
from hyperslab.train.mlperf import RunEvents
from hyperslab.train.moving_average import MovingAverage
from hyperslab.train.objective import MetricSums, Objective
from hyperslab.train.optimizer import RateSchedule
from hyperslab.util.signals import StopRequest
from hyperslab.util.torch_internals import foreach_multiply_

LOST_AFTER = datetime.timedelta(seconds=2)  # in a run that failed a vote may never arrive


@dataclass(eq=False)
class Progress:
    """Keeps how far a run is, on one rank; every rank has the same one.

    The ranks vote on every step, and the vote is read a step later, when it has long arrived: then
    the step enters the history. Only the main rank has a ``reporter``. ``until`` so many epochs are
    done it trains this time, if that is said, and writes a checkpoint. ``check_folder`` is called
    on the main rank before one is written.
    """

    recipe: Recipe
    grid: Grid
    state: RunState
    at: Position
    reporter: Reporter | None = None
    events: RunEvents = field(default_factory=RunEvents)
    until: int | None = None
    check_folder: Callable[[], None] = lambda: None
    stop: StopRequest = field(default_factory=StopRequest, init=False)
    writer: BackgroundWriter = field(default_factory=BackgroundWriter, init=False)
    pending: steps.PendingStep | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.watch = Watch(self.recipe.timeout)
        self.flops = StepFlops(self.grid.size, self.recipe.peak)

    @property
    def rate(self) -> float:
        rate: float = self.state.optimizer.param_groups[0]["lr"]
        return rate

    @property
    def reached(self) -> bool:
        """Say whether the last validation was as good as the recipe asks for, if it does."""
        goal = self.recipe.stop_at
        return goal is not None and goal.reached(self.at.measured)

    @property
    def last_epoch(self) -> int:
        """Return how many epochs are done when it ends this time, if nothing ends it before."""
        return min(self.recipe.epochs, self.until or self.recipe.epochs)

    @property
    def finished(self) -> bool:
        return self.at.epoch >= self.recipe.epochs or (self.at.batch == 0 and self.reached)

    @property
    def ends_here(self) -> bool:
        return self.finished or self.at.epoch >= self.last_epoch

    def record(self, done: steps.StepResult, rate: float, clock: steps.StepClock) -> None:
        """Start the vote on this step, read that on the step before; write what is due.

        Raises:
            Stopped: any rank got a signal; a checkpoint is written.
            DivergedError: the loss of the step before is not finite.
        """
        seconds, waited = clock.lap()
        vote = steps.Vote(self.grid, done.loss, done.prediction, stop=self.stop.signal, wait=waited)
        before = self.pending
        speed = self.flops.speed(done.samples, seconds)
        facts = {
            "step": self.at.step,
            "epoch": self.at.epoch,
            "learning_rate": rate,
            "step_seconds": seconds,
            "samples_per_second": done.samples / seconds,
            "flops_per_second": speed,
            "peak_share": self.flops.share(speed),
        }
        self.pending = steps.PendingStep(vote, done.samples, facts)
        self.leave_if(self._finish(before))
        every = self.recipe.checkpoint.every_steps
        if every is not None and self.at.step % every == 0:
            self.checkpoint()
            clock.restart()

    def await_vote(self) -> None:
        """Wait until the vote that is under way has arrived, or was lost; nothing is read."""
        if self.pending is not None:
            self.pending.vote.wait(LOST_AFTER)

    def vote(self, loss: torch.Tensor, prediction: torch.Tensor) -> steps.Vote:
        """Start the vote on a mini-batch of a validation, which a signal of any rank ends."""
        return steps.Vote(self.grid, loss, prediction, stop=self.stop.signal, wait=0.0)

    def read(self, vote: steps.Vote, what: str) -> steps.Verdict:
        """Wait for a vote, under watch; raises as `Watch.over`."""
        with self.watch.over(what):
            return vote.result()

    def finish_epoch(self, measured: dict[str, float | None], seconds: float) -> None:
        """Record an epoch, go to the next one, and write a checkpoint where one is due.

        ``measured`` is what the validation found in ``seconds`` [s].
        """
        at = self.at
        train_loss = at.loss / at.samples if at.samples else None
        row = {
            "epoch": at.epoch,
            "train_loss": train_loss,
            **measured,
            "learning_rate": self.rate,
            "seconds": at.seconds + seconds,
        }
        if self.reporter is not None:
            self.reporter.epoch(row, at.step)
        self.at = Position(
            step=at.step,
            epoch=at.epoch + 1,
            best=at.best,
            best_step=at.best_step,
            measured=measured,
        )
        if self.at.epoch % self.recipe.checkpoint.every == 0 or self.ends_here:
            validation = measured["validation_loss"]
            self.checkpoint(train_loss if validation is None else validation)

    def checkpoint(self, score: float | None = None) -> Path:
        """Write the state of the run; the lowest ``score`` is the best.

        Raises:
            DivergedError: the last loss or a weight is not finite; nothing is written.
        """
        self.settle()
        # A gradient may not be a number where its loss is one.
        if any_rank(not steps.weights_are_finite(self.state.model)):
            raise self._diverged("a weight is", self.at.step, self.at.epoch)
        best = score is not None and score < (math.inf if self.at.best is None else self.at.best)
        if best:
            self.at.best = score
            self.at.best_step = self.at.step
        return save_step(
            self.recipe.output,
            self.at.step,
            self.state.model,
            self.state.optimizer,
            best=best,
            keep=self.recipe.checkpoint.keep,
            behind=self.writer if self.recipe.checkpoint.background else None,
            check_folder=self.check_folder,
            **self.state.extra(self.at),
        )

    def settle(self) -> int:
        """Read the vote that is under way; returns as `_finish`."""
        done = self.pending
        self.pending = None
        return self._finish(done)

    def _finish(self, done: steps.PendingStep | None) -> int:
        """Record a step that was voted on; returns the signal that any rank got, or 0.

        Every rank reads the same verdict, so all go on or none does.
        """
        if done is None:
            return 0
        verdict = self.read(done.vote, f"the vote on step {done.facts['step']}")
        if not verdict.finite:
            where = "" if verdict.culprit is None else f"; the first is rank {verdict.culprit}"
            raise self._diverged("the loss is", done.facts["step"], done.facts["epoch"], where)
        self.at.loss += verdict.loss * done.samples
        self.at.samples += done.samples
        self.at.seconds += done.facts["step_seconds"]
        if self.reporter is not None:
            row = {
                **done.facts,
                "loss": verdict.loss,
                "wait_seconds": verdict.wait_seconds,
                "memory_bytes": verdict.memory_bytes,
            }
            self.reporter.step(row)
        return verdict.signal

    def _diverged(self, what: str, step: int, epoch: int, where: str = "") -> DivergedError:
        folder = folder_of(self.recipe.output)
        some = any(folder.glob("*"))
        before = f"    the checkpoints in {folder} are from before\n" if some else ""
        return DivergedError(
            f"{what} not a finite number in step {step} (epoch {epoch + 1}){where}\n{before}"
            "    try a smaller optimizer.learning_rate, or optimizer.clip=1"
        )

    def leave_if(self, number: int) -> None:
        """Write a checkpoint and end, if there is a signal."""
        if number:
            path = self.checkpoint()
            self.writer.wait()
            name = signal.Signals(number).name
            raise Stopped(number, f"stopped by {name} after {path}\n    go on with --resume")


MiniBatch = tuple[Sharded, Sharded]  # values and target


TEST_LOSS = "test_loss"  # its column in ``epochs.csv``


@dataclass(eq=False)
class Trainer:
    """Trains a parallelised model on one rank of the grid; every rank runs the same one.

    ``test`` is measured after every epoch, too, if it is there.
    """

    recipe: Recipe
    grid: Grid
    objective: Objective
    data: Dataset
    validation: Dataset
    progress: Progress
    test: Dataset | None = None

    def __post_init__(self) -> None:
        state = self.progress.state
        self.model = state.model
        self.optimizer = state.optimizer
        assert isinstance(state.schedule, RateSchedule)
        self.schedule = state.schedule
        assert state.average is None or isinstance(state.average, MovingAverage)
        self.average = state.average
        self.no_sync: Callable[[], AbstractContextManager[None]] = self.model.no_sync  # type: ignore[assignment]
        assert isinstance(state.scaler, steps.LossScaler)
        self.scaler = state.scaler
        self.clock = steps.StepClock(self.data)

    @property
    def at(self) -> Position:
        return self.progress.at

    def fit(self) -> None:
        """Train to the last epoch of this time, or until it is as good as the recipe asks for.

        Raises:
            Stopped: after a signal, with a checkpoint written.
            DivergedError: the loss is not finite; the last checkpoint is from before.
            CheckpointError: one cannot be written.
        """
        hangs = self.grid.size > 1 and "nccl" in backend_of()
        with (
            self.progress.stop.listening(),
            self.progress.writer.finishing(),
            self.progress.watch.running() if hangs else nullcontext(),
        ):
            events = self.progress.events
            while not self.progress.ends_here:
                epoch = self.at.epoch
                events.begins("EPOCH", epoch)
                self.train_epoch()
                events.begins("EVAL", epoch)
                began = time.perf_counter()
                measured = self.measure(self.validation)
                seconds = time.perf_counter() - began
                events.ends("EVAL", epoch)
                events.validated(epoch, measured)
                events.ends("EPOCH", epoch)
                if self.test is not None:  # not counted: a training needs none of it
                    measured |= {TEST_LOSS: self.measure(self.test)["validation_loss"]}
                self.schedule.end_epoch(measured)
                self.progress.finish_epoch(measured, seconds)

    def train_epoch(self) -> None:
        """Train for the rest of an epoch, from the position on."""
        self.model.train()
        self.clock.restart()
        onward = self.at.epoch + 1 < self.progress.last_epoch
        batches = iter(self.data.epoch(self.at.epoch, self.at.batch, onward=onward))
        while (batch := next(batches, None)) is not None:
            rate = self.progress.rate
            with FlopCount() if self.progress.flops.wanted else nullcontext() as count:
                done = self.train_step(batch, batches)
            if count is not None:
                self.progress.flops.counted(count.flops, done.samples)
            del batch  # or it would be there beside the next one
            self.at.batch = self.data.at
            self.at.step += 1
            self.record(done, rate)
        self.at.batch = self.data.steps
        self.progress.leave_if(self.progress.settle())

    def record(self, done: steps.StepResult, rate: float) -> None:
        """Vote on the step, write, stop; as `Progress.record`."""
        self.progress.record(done, rate, self.clock)

    def train_step(self, batch: MiniBatch | None, batches: Iterator[MiniBatch]) -> steps.StepResult:
        """Take one step of the optimizer over ``batch`` and those that are accumulated with it.

        It waits for nothing, but in float16 for whether gradients are finite.
        """
        losses: list[torch.Tensor] = []
        states: RandomStates = ()
        seen = 0
        count = self.recipe.optimizer.accumulate
        planned = self.samples_of(count)
        while batch is not None:
            x, y = batch
            seen += x.shape[0]
            batch = next(batches, None) if len(losses) + 1 < count else None
            if batch is None and self.measures_layers:
                states = random_states(self.grid.device)
            with torch.enable_grad() if batch is None else self.no_sync():
                with self.autocast():
                    prediction = self.model(x)
                    loss = self.objective.loss(prediction, y) * (x.shape[0] / planned)
                self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        if seen != planned:  # samples were left out because they could not be read
            foreach_multiply_(
                [p.grad for p in self.model.parameters() if p.grad is not None], planned / seen
            )
        if states:
            self.measure_layers(x, states)
        if self.recipe.optimizer.clip is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.optimizer.clip)
        self.scaler.step(self.optimizer)  # if all gradients are finite, the same on all ranks
        self.scaler.update()
        if self.average is not None:
            self.average.update(self.at.step + 1)
        self.schedule.step()
        self.optimizer.zero_grad()
        mean = torch.stack(losses).sum() * (planned / seen)
        return steps.StepResult(mean, prediction.local.detach(), seen)

    @property
    def measures_layers(self) -> bool:
        """Tell whether the step that is under way goes into ``layers.csv``."""
        every = self.recipe.layers
        return every is not None and self.at.step % every == 0

    def measure_layers(self, x: Sharded, states: RandomStates) -> None:
        """Record what layers say of ``x``, run from these random states, and their gradients."""
        with repeating(self.model, self.grid.device, states), self.autocast():
            rows = layer_rows(self.model, lambda: self.model(x), self.scaler.get_scale())
        if self.progress.reporter is not None:
            self.progress.reporter.layers(rows, self.at.step + 1)

    def samples_of(self, count: int) -> int:
        """Count samples of the next mini-batches; the last one of an epoch may be smaller."""
        size = self.recipe.data.batch_size
        done = self.at.batch
        return min((done + count) * size, len(self.data)) - done * size

    def autocast(self) -> AbstractContextManager[None]:
        return steps.autocast(self.grid.device, self.recipe.precision)

    @torch.no_grad()
    def measure(self, split: Dataset) -> dict[str, float | None]:
        """Measure the objective over a split, under the names that a validation has."""
        self.model.eval()
        sums = MetricSums(self.objective, self.grid)
        signal_of_any = 0
        pending: steps.Vote | None = None
        vote = "the vote on a mini-batch of a validation"
        if self.average is not None:
            self.progress.writer.await_copies()
        with nullcontext() if self.average is None else self.average.in_place():
            for x, y in split.epoch(0):
                with self.autocast():
                    prediction = self.model(x)
                    loss = self.objective.loss(prediction, y).reshape(())
                    sums.add(prediction, y, loss)
                # Read a mini-batch later, as in training: the device has the next one by then.
                before, pending = pending, self.progress.vote(loss, prediction.local)
                if before is not None:
                    signal_of_any = self.progress.read(before, vote).signal
                if signal_of_any:
                    break
                del x, y  # as in `train_epoch`
        if pending is not None:
            last = self.progress.read(pending, vote).signal
            signal_of_any = signal_of_any or last
        # A checkpoint has the network's own weights: it is written outside.
        self.progress.leave_if(signal_of_any)
        return sums.result()
