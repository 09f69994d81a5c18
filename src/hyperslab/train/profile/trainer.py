"""A trainer that profiles some of its steps."""

from __future__ import annotations

from hyperslab.train.flops import measure_peak
from hyperslab.train.profile.recorder import ProfilePolicy, StepRecorder, about_rank
from hyperslab.train.profile.schema import profile_folder
from hyperslab.train.step import StepResult
from hyperslab.train.trainer import Trainer


class ProfiledTrainer(Trainer):
    """What `Trainer` does, with a `StepRecorder` at the borders of its steps."""

    def __init__(self, trainer: Trainer, policy: ProfilePolicy) -> None:
        """Takes the place of ``trainer``, which has not begun; every rank makes one.

        Profiles of an earlier start of the run are removed, with what was predicted for it.
        """
        super().__init__(
            trainer.recipe,
            trainer.grid,
            trainer.objective,
            data=trainer.data,
            validation=trainer.validation,
            test=trainer.test,
            progress=trainer.progress,
        )
        run = self.recipe.output
        if self.grid.is_main:
            for old in profile_folder(run).glob("*.json"):
                old.unlink()
        self.grid.barrier()  # or it might remove what another rank has just written
        peak = self.recipe.peak or measure_peak(self.grid.device, self.recipe.precision)
        self.progress.flops.measured(peak)
        about = about_rank(self.grid, self.recipe.precision, peak)
        self.recorder = StepRecorder(
            policy, about, run, model=self.model, settle=self.progress.await_vote
        )

    def fit(self) -> None:
        """As `Trainer.fit`; however it ends, a profile is written."""
        with self.recorder:
            super().fit()

    def train_epoch(self) -> None:
        """As `Trainer.train_epoch`."""
        self.recorder.begin_step()
        self.clock.restart()
        super().train_epoch()
        # What has begun is no step: there is no mini-batch left.
        self.recorder.end_step(self.at.step + 1, keep=False)

    def record(self, done: StepResult, rate: float) -> None:
        """As `Trainer.record`; a step that wrote a checkpoint is not kept."""
        super().record(done, rate)
        every = self.recipe.checkpoint.every_steps
        recording = self.recorder.recording
        self.recorder.end_step(self.at.step, keep=every is None or self.at.step % every != 0)
        if not self.recorder.done:
            self.recorder.begin_step()
        elif recording:
            self.grid.barrier()  # the next step is not to wait for the profiles of others
        if recording or not self.recorder.done:
            self.clock.restart()  # neither to start the profiler nor to write is part of a step
