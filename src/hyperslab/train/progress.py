"""The progress of a run: its position, the vote on the last step, its history, its checkpoints."""

from __future__ import annotations

import datetime
import math
import signal
from pathlib import Path

import torch

from hyperslab.checkpoint.background import BackgroundWriter
from hyperslab.checkpoint.retention import folder_of, save_step
from hyperslab.checkpoint.run_state import Position, RunState
from hyperslab.comm import Grid
from hyperslab.errors import DivergedError, Stopped
from hyperslab.recipe.schema import Recipe
from hyperslab.train.flops import StepFlops
from hyperslab.train.mlperf.events import RunEvents
from hyperslab.train.reporter import Reporter
from hyperslab.train.step import PendingStep, StepClock, StepResult
from hyperslab.train.step_vote import Verdict, Vote
from hyperslab.train.stop_request import StopRequest

LOST_AFTER = datetime.timedelta(seconds=2)
"""Without an answer [s]: in a run that failed a vote may never arrive."""


class Progress:
    """How far a run is, on one rank; every rank has the same one.

    The ranks vote on every step, and the vote is read a step later, when it has long arrived: then
    the step enters the history. Only the main rank has a ``reporter``.
    """

    def __init__(
        self,
        recipe: Recipe,
        grid: Grid,
        state: RunState,
        at: Position,
        *,
        reporter: Reporter | None = None,
        events: RunEvents | None = None,
    ) -> None:
        self.recipe = recipe
        self.grid = grid
        self.state = state
        self.at = at
        self.reporter = reporter
        self.events = RunEvents() if events is None else events
        self.stop = StopRequest()
        self.writer = BackgroundWriter()
        self.flops = StepFlops(grid.size, recipe.peak)
        self.pending: PendingStep | None = None

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        rate: float = self.state.optimizer.param_groups[0]["lr"]
        return rate

    @property
    def reached(self) -> bool:
        """Whether the last validation was as good as the recipe asks for, if it does."""
        goal = self.recipe.stop_at
        return goal is not None and goal.reached(self.at.measured)

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.at.epoch >= self.recipe.epochs or (self.at.batch == 0 and self.reached)

    def record(self, done: StepResult, rate: float, clock: StepClock) -> None:
        """Start the vote on this step, read that on the step before; write what is due.

        Raises:
            Stopped: any rank got a signal; a checkpoint is written.
            DivergedError: the loss of the step before is not finite.
        """
        seconds, waited = clock.lap()
        vote = Vote(self.grid, done.loss, done.prediction, stop=self.stop.signal, wait=waited)
        before = self.pending
        speed = self.flops.speed(done.samples, seconds)
        self.pending = PendingStep(
            vote,
            self.at.step,
            self.at.epoch,
            rate,
            done.samples,
            seconds=seconds,
            flops_per_second=speed,
            peak_share=self.flops.share(speed),
        )
        self._leave_if(self._finish(before))
        every = self.recipe.checkpoint.every_steps
        if every is not None and self.at.step % every == 0:
            self.checkpoint()
            clock.restart()

    def end_steps(self) -> None:
        """Read the vote on the last step of an epoch; raises as `record` does."""
        self._leave_if(self._settle())

    def await_vote(self) -> None:
        """Wait until the vote that is under way has arrived, or was lost; nothing is read."""
        if self.pending is not None:
            self.pending.vote.wait(LOST_AFTER)

    def check_stop(self, loss: torch.Tensor, prediction: torch.Tensor) -> None:
        """Vote on one mini-batch of a validation, and wait: only a signal counts.

        Raises:
            Stopped: any rank got one.
        """
        vote = Vote(self.grid, loss, prediction, stop=self.stop.signal, wait=0.0)
        self._leave_if(vote.result().signal)

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
        if self.at.epoch % self.recipe.checkpoint.every == 0 or self.finished:
            validation = measured["validation_loss"]
            self.checkpoint(train_loss if validation is None else validation)

    def checkpoint(self, score: float | None = None) -> Path:
        """Write the state of the run; the lowest ``score`` is the best."""
        self._settle()
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
            **self.state.extra(self.at),
        )

    def _settle(self) -> int:
        """Read the vote that is under way."""
        done = self.pending
        self.pending = None
        return self._finish(done)

    def _finish(self, done: PendingStep | None) -> int:
        """Record a step that was voted on; returns the signal that any rank got, or 0.

        Every rank reads the same verdict, so all go on or none does.
        """
        if done is None:
            return 0
        verdict = done.vote.result()
        if not verdict.finite:
            raise DivergedError(self._diverged(done, verdict))
        self.at.loss += verdict.loss * done.samples
        self.at.samples += done.samples
        self.at.seconds += done.seconds
        if self.reporter is not None:
            self.reporter.step(done.row(verdict))
        return verdict.signal

    def _leave_if(self, number: int) -> None:
        """Where there is a signal, write a checkpoint and end."""
        if number:
            path = self.checkpoint()
            self.writer.wait()
            name = signal.Signals(number).name
            raise Stopped(number, f"stopped by {name} after {path}\n    go on with --resume")

    def _diverged(self, done: PendingStep, verdict: Verdict) -> str:
        """The words of the error, with the rank where one can be told."""
        where = "" if verdict.culprit is None else f"; the first is rank {verdict.culprit}"
        return (
            f"the loss is not a finite number in step {done.step} (epoch {done.epoch + 1}){where}\n"
            f"    the checkpoints in {folder_of(self.recipe.output)} are from before\n"
            "    try a smaller optimizer.learning_rate, or optimizer.clip=1"
        )
