"""Starts a training again after failures, on this machine or from Slurm's queue.

`RestartPolicy` decides after a failure whether and on how many ranks to go on, `TrainingLaunch`
launches the training until it has ended, `requeue_when_stopped` puts a Slurm job back into the
queue when its time is over.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hyperslab.checkpoint import folder_of
from hyperslab.errors import CommError, HyperslabError, LayoutError, RecipeError, Stopped, reason
from hyperslab.launch.failures import OneRankError, RankFailed, RankLost
from hyperslab.launch.supervisor import cores_here, devices_environment, launch, launching
from hyperslab.recipe.schema import Recipe
from hyperslab.util.signals import StopRequest


@dataclass
class RestartPolicy:
    """Decides after each failure of a run.

    Again, at most ``left`` times: after a rank that died or hung, ranks that lost each other, and
    an error that is none of this package's. Not after what the package refuses (a `DataError`, a
    `RecipeError`, a full disk), which would come again, nor after such another error for the
    second time.

    A rank *cannot come back* if the rank of the same number is lost twice in a row and the run has
    written no checkpoint between: its device or its memory is no good. Then, if the grid
    ``shrinks``, there is one rank less.

    ``newest`` says which checkpoint is the newest, or nothing.
    """

    left: int
    ranks: int
    shrinks: bool
    newest: Callable[[], str | None]

    def __post_init__(self) -> None:
        self._before: tuple[type[HyperslabError], int | None, str | None] | None = None

    def after(self, error: HyperslabError) -> int:
        """Return on how many ranks to go on.

        Raises:
            HyperslabError: this one, where the run has ended.
        """
        if self.left == 0 or not isinstance(error, CommError | RankFailed):
            raise error
        rank = error.rank if isinstance(error, OneRankError) else None
        now = (type(error), rank, self.newest())
        if now == self._before:
            if isinstance(error, RankFailed):
                raise error
            if isinstance(error, RankLost) and self.shrinks and self.ranks > 1:
                self.ranks -= 1
                now = (type(error), None, now[2])  # the numbers mean others from here on
        self.left -= 1
        self._before = now
        return self.ranks


log = logging.getLogger("hyperslab")


class StartTraining(Protocol):
    """Starts a training, and yields until its end: that of a slot, or of a crew's team."""

    def __call__(
        self, ranks: int, words: Sequence[str], logs: Path, *, seconds: float, silent: bool = False
    ) -> Iterator[None]: ...


@dataclass(frozen=True, slots=True)
class LaunchSlot:
    """Holds one of ``count`` equal parts of this machine, where trainings run beside each other.

    The signals that ``stop`` notes end what runs there.
    """

    stop: StopRequest
    number: int = 0
    count: int = 1

    def start_training(
        self, ranks: int, words: Sequence[str], logs: Path, *, seconds: float, silent: bool = False
    ) -> Iterator[None]:
        """Run ``hyperslab words...`` on ranks that may write a checkpoint when a signal ends them.

        A rank may be stopped, and all may take to end, for ``seconds``; raises what `launching`
        does.
        """
        environ = dict(os.environ)
        if self.count > 1:
            threads = max(1, cores_here() // (ranks * self.count))
            environ.setdefault("OMP_NUM_THREADS", str(threads))
            environ |= devices_environment(range(self.number * ranks, (self.number + 1) * ranks))
        yield from launching(
            *(ranks, ["-m", "hyperslab", *words], logs, self.stop),
            limit=seconds,
            patience=seconds,
            silent=silent,
            environ=environ,
        )


def launch_training(ranks: int, words: Sequence[str], logs: Path, *, seconds: float) -> None:
    """Run ``hyperslab words...`` on ranks of this machine until it has ended, as a slot does."""
    launch(ranks, ["-m", "hyperslab", *words], logs, limit=seconds, patience=seconds)


@dataclass(frozen=True, slots=True)
class TrainingLaunch:
    """Starts ``hyperslab arguments...`` on ranks of this machine until the training has ended.

    ``asked`` is the recipe as the user gave it; where it leaves something to the plan, ``choose``
    gives it for the ranks that there are.
    """

    asked: Recipe
    arguments: Sequence[str]
    choose: Callable[[Recipe, int], Recipe]

    def until_done(self, recipe: Recipe, *, restarts: int, resume: bool) -> None:
        """Train on the grid of ``recipe``; after a failure so often again (see `RestartPolicy`).

        Raises what `launch` does.
        """
        size = recipe.grid.size
        decide = RestartPolicy(restarts, size, shrinks=self.asked.grid.auto, newest=self._newest)
        while True:
            try:
                words = chosen_overrides(recipe) if self.asked.undecided else []
                words = [*self.arguments, *words, *(["--resume"] if resume else [])]
                logs = recipe.output / "logs"
                launch_training(recipe.grid.size, words, logs, seconds=recipe.timeout)
                return
            except HyperslabError as error:
                ranks = decide.after(error)
                recipe = self._on(ranks, recipe, error)
                log.warning("%s", str(error).splitlines()[0])
            decide.ranks = recipe.grid.size
            resume = True
            start = f"{restarts - decide.left} of {restarts}"
            log.info("restart %s on %d ranks, from the newest checkpoint", start, decide.ranks)

    def _on(self, ranks: int, recipe: Recipe, error: HyperslabError) -> Recipe:
        """Return the recipe with a grid of so many ranks, or of fewer if there is none.

        Raises:
            HyperslabError: this one, where there is none at all.
        """
        asked = self.asked
        if not asked.grid.auto:
            return recipe
        import torch

        if asked.device == "cuda" or (asked.device == "auto" and torch.cuda.is_available()):
            ranks = min(ranks, torch.cuda.device_count())  # one may be gone
        if ranks == recipe.grid.size:
            return recipe
        for count in range(ranks, 0, -1):
            try:
                return self.choose(asked, count)
            except LayoutError:
                continue
        raise error

    def _newest(self) -> str | None:
        names = (path.name for path in folder_of(self.asked.output).glob("step-*"))
        return max(names, default=None)


def chosen_overrides(recipe: Recipe) -> list[str]:
    """Writes the grid and the memory policy that were chosen as overrides for the started ranks."""
    axes = ", ".join(f"{axis}: {extent}" for axis, extent in recipe.grid.model_dump().items())
    return [f"grid={{{axes}}}", f"memory={recipe.memory}"]


REQUEUE_EXIT_CODES = (128 + signal.SIGUSR1, 128 + signal.SIGUSR2)
"""Exit codes of a command that Slurm's ``--signal`` has ended."""

SCONTROL_LIMIT = 60.0  # [s] that `scontrol` may take


@contextmanager
def requeue_when_stopped(wanted: bool) -> Iterator[None]:
    """Put this job, if ``wanted``, back into the queue where SIGUSR1 or SIGUSR2 ended the work.

    Of several ranks that Slurm started the main one does it.

    Raises:
        RecipeError: it is wanted, but this is not a Slurm job, or `scontrol` is not there.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    if wanted and not job:
        raise RecipeError("--requeue: this is not a Slurm job (SLURM_JOB_ID is not set): omit it")
    if wanted and shutil.which("scontrol") is None:
        raise RecipeError(
            "--requeue needs Slurm's command `scontrol`, which was not found\n"
            f"    omit it, and requeue in the batch script on exit code {REQUEUE_EXIT_CODES[0]}"
        )
    try:
        yield
    except Stopped as stopped:
        if wanted and stopped.code in REQUEUE_EXIT_CODES and os.environ.get("RANK", "0") == "0":
            _requeue(job)
        raise


def _requeue(job: str) -> None:
    """Requeue the job; an error is only logged, as the work is saved in any case."""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SCONTROL_LIMIT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("%s: %s", " ".join(command), reason(error))
        return
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        log.warning("%s: %s", " ".join(command), said or f"exit code {done.returncode}")
    else:
        log.info("job %s is in the queue again", job)
