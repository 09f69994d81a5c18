"""How far a sweep is: one bar for all runs, or a line a run where there is no terminal."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from hyperslab.errors import printable
from hyperslab.sweep.load import Sweep, SweepRun
from hyperslab.sweep.result import RunResult

log = logging.getLogger("hyperslab")

LOOK_EVERY = 1.0
"""Seconds between two looks at the history of the run that is under way."""


class SweepProgress:
    """Shows which run of how many is under way, its last epoch, and the share that is done.

    The bar counts epochs of all runs together.
    """

    def __init__(self, sweep: Sweep, console: Console | None = None) -> None:
        self.console = console or Console()
        choosing = sweep.choosing()
        self.runs = len(choosing) + sum(len(variant.seeds) for variant in sweep.variants)
        self.number = 0
        self.done = 0
        final = sum(len(variant.seeds) * variant.recipe.epochs for variant in sweep.variants)
        columns = (BarColumn(bar_width=16), TaskProgressColumn(), TimeRemainingColumn())
        self.bar = Progress(
            *columns,
            TextColumn("{task.description}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        total = final + sum(run.recipe.epochs for run in choosing)
        self.task = self.bar.add_task("", total=total)
        self.under_way: SweepRun | None = None
        self.ended = threading.Event()
        self.watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self.bar.start()
        if self.console.is_terminal:
            self.watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.bar.stop()

    def begin(self, run: SweepRun) -> None:
        """The next run."""
        self.number += 1
        self.under_way = run
        self.bar.update(self.task, description=self._words(run), completed=self.done)

    def end(self, run: SweepRun, result: RunResult, *, again: bool) -> None:
        """It is done; ``again``: it was done only now."""
        self._finish(run)
        words = (
            f"validation loss {result.validation_loss:.4g} in epoch {result.best_epoch} of "
            f"{result.epochs}, {result.seconds:.0f} s"
        )
        self._say(f"{self._words(run)}: {words}{'' if again else ', was done before'}")

    def fail(self, run: SweepRun, error: Exception) -> None:
        """It failed, and others go on."""
        self._finish(run)
        self._say(f"{self._words(run)}: failed: {error}")

    def _finish(self, run: SweepRun) -> None:
        self.under_way = None
        self.done += run.recipe.epochs
        self.bar.update(self.task, completed=self.done)

    def _words(self, run: SweepRun) -> str:
        return f"run {self.number} of {self.runs}: {run.name}"

    def _say(self, line: str) -> None:
        if self.console.is_terminal:
            self.bar.console.print(printable(line), highlight=False, markup=False, soft_wrap=True)
        else:
            log.info("%s", line)

    def _watch(self) -> None:
        while not self.ended.wait(LOOK_EVERY):
            run = self.under_way
            if run is not None:
                epochs, loss = _last_epoch(run.folder / "epochs.csv")
                note = f", epoch {epochs} of {run.recipe.epochs}{loss}" if epochs else ""
                self.bar.update(
                    self.task, completed=self.done + epochs, description=self._words(run) + note
                )


def _last_epoch(path: Path) -> tuple[int, str]:
    """How many epochs a run has done, and its validation loss in words."""
    try:
        head, *rows = path.read_text().rpartition("\n")[0].splitlines()
        row = dict(zip(head.split(","), rows[-1].split(","), strict=True))
        loss = float(row["validation_loss"])
    except (OSError, ValueError, KeyError, IndexError):
        return 0, ""
    return int(row["epoch"]) + 1, f", validation loss {loss:.4g}"
