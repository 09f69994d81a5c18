"""Writes the history of a run and shows its progress, on the main rank.

``steps.csv``, ``epochs.csv`` and ``layers.csv`` survive a stop: no step appears twice. Beside them
a `Reporter` feeds the loggers and a progress bar or, without a terminal, log lines.
"""

from __future__ import annotations

import csv
import datetime
import io
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperslab.errors import DataError
from hyperslab.train.loggers import Loggers, check_loggers, open_loggers
from hyperslab.util.atomic_files import append_whole, created_aside, json_lines, open_to_append
from hyperslab.util.documents import finished_lines, open_plain

if TYPE_CHECKING:  # the ranks that show nothing need not import it
    from rich.console import Console

STEP_COLUMNS = (
    "step",
    "epoch",
    "loss",
    "learning_rate",
    "step_seconds",
    "wait_seconds",
    "samples_per_second",
    "memory_bytes",
    "flops_per_second",
    "peak_share",
)
LAYERS = "layers.csv"
LAYER_COLUMNS = ("step", "layer", "use", "mean", "std", "common", "gradient", "weight", "ratio")
"""Names what ``layers.csv`` has of each ``use`` of a layer in a step, both counted from 1.

``mean`` and ``std`` are of all numbers of its output; ``common`` is the share of energy that all
samples of the mini-batch have in common (`hyperslab.train.layers.common_share`), of maps in the
means by channel; ``gradient`` and ``weight`` are norms of all its parameters together, and
``ratio`` is that of the two.
"""

LayerRow = dict[str, Any]
"""Maps `LAYER_COLUMNS` but the step to values; None where there is none."""

MOST_ROW = 1 << 20  # the longest line of a history that is gone on with [B]


CHANGES = "changes.jsonl"
"""In a run's folder: step, date and keys of every resumption with another recipe."""


def record_changes(run: Path, step: int, changes: Mapping[str, list[Any]]) -> None:
    """Write down the keys that change from this step on, each with its value before and now."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    append_whole(run / CHANGES, json_lines([{"step": step, "date": date, "changes": changes}]))


def epochs_columns(measures: tuple[str, ...]) -> tuple[str, ...]:
    """Name the columns of ``epochs.csv``; the learning rate is that of the next epoch."""
    return ("epoch", "train_loss", *measures, "learning_rate", "seconds")


class HistoryFile:
    """Appends rows to a CSV file whose first column counts."""

    def __init__(self, path: Path, columns: tuple[str, ...], *, before: int) -> None:
        """Go on with an existing file after dropping the rows that count ``before`` or more.

        A checkpoint is older than the last rows of a run that was killed; the resumed run writes
        these steps again. Columns that only the file has stay behind the others: earlier versions
        wrote fewer, and a resumed run may measure more or less than before. What a row has no value
        for is an empty cell.

        Raises:
            DataError: the file that is there is no such table.
        """
        try:
            with open_plain(path) if path.exists() else nullcontext(io.BytesIO()) as old:
                lines = finished_lines(old, MOST_ROW)  # the last one may be half-written
                rows = csv.DictReader(line.decode() for line in lines)
                if rows.fieldnames and columns[0] not in rows.fieldnames:
                    raise ValueError(f"no column is called {columns[0]}")
                whole = (row for row in rows if None not in row and None not in row.values())
                earlier = (row for row in whole if int(row[columns[0]]) < before)
                first = next(earlier, {})
                columns = tuple(dict.fromkeys((*columns, *first)))
                with created_aside(path) as file, io.TextIOWrapper(file, newline="") as new:
                    kept = csv.DictWriter(new, columns, restval="", lineterminator="\n")
                    kept.writeheader()
                    kept.writerows(chain([first] if first else [], earlier))
        except (ValueError, csv.Error) as error:
            raise DataError(
                f"{path} is damaged: {error}\n"
                "    move it away; the run goes on without the rows that it had"
            ) from None
        # A row is on disk when it is written.
        self.file = os.fdopen(open_to_append(path), "a", newline="", buffering=1)
        self.writer = csv.DictWriter(self.file, columns, restval="", lineterminator="\n")

    def add(self, row: Mapping[str, object]) -> None:
        """Append one row, numbers with nine digits; None becomes an empty cell."""
        plain = (int, str, type(None))
        cells = {k: v if isinstance(v, plain) else f"{v:.9g}" for k, v in row.items()}
        self.writer.writerow(cells)

    def close(self) -> None:
        self.file.close()


log = logging.getLogger("hyperslab")

LOG_EVERY = 30.0  # [s] between two log lines within an epoch where there is no terminal


class Reporter:
    """Records the history of one run, on the main rank only.

    Without a terminal the progress bar is silent and a line is logged instead, at the end of
    every epoch and now and then within one.
    """

    def __init__(
        self,
        run: Path,
        *,
        measures: tuple[str, ...],
        step: int,
        epoch: int,
        total_steps: int,
        console: Console | None = None,
        loggers: Loggers = ("csv",),
        layers: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Go on after ``step`` steps, in ``epoch``; both are 0 at first.

        ``measures`` are those of a validation. ``loggers`` are named as in a recipe; they get
        ``settings``, nested dictionaries of what JSON can say, to show beside the numbers. With
        ``layers`` there will be rows of them.

        Raises:
            RecipeError: the library of a logger is not installed.
        """
        from rich import progress
        from rich.console import Console

        check_loggers(loggers)
        with ExitStack() as opened:

            def history(name: str, columns: tuple[str, ...], before: int) -> HistoryFile:
                file = HistoryFile(run / name, columns, before=before)
                opened.callback(file.close)
                return file

            self.steps = history("steps.csv", STEP_COLUMNS, step + 1)
            self.epochs = history("epochs.csv", epochs_columns(measures), epoch)
            if layers or (run / LAYERS).exists():  # without rows of steps that are done again
                self._layers = history(LAYERS, LAYER_COLUMNS, step + 1)
            self.loggers = open_loggers(loggers, run, settings or {}, step)
            self._files = opened.pop_all()
        console = console or Console()
        self.live = console.is_terminal
        self.bar = progress.Progress(
            progress.BarColumn(bar_width=10),  # all of it fits into 80 columns
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[note]}"),
            console=console,
            disable=not self.live,
        )
        self.task = self.bar.add_task("train", total=total_steps, completed=step, note="")
        self.bar.start()
        self.logged = time.monotonic()

    def step(self, row: dict[str, float | None]) -> None:
        """Record one step, counted from 1."""
        self.steps.add({name: row[name] for name in STEP_COLUMNS})
        known = {name: value for name, value in row.items() if value is not None}
        step = int(known["step"])
        shown = {f"step/{name}": known[name] for name in STEP_COLUMNS[2:] if name in known}
        for logger in self.loggers:
            logger.add(shown, step)
        took = known["step_seconds"]
        waiting = 100 * known["wait_seconds"] / took if took else 0.0
        note = (
            f"loss {known['loss']:.4g}  {known['samples_per_second']:.3g} samples/s  "
            f"{known['memory_bytes'] / 2**30:.2f} GiB  {waiting:.0f} % waiting"
        )
        self.bar.update(self.task, completed=step, note=note)
        if not self.live and time.monotonic() - self.logged > LOG_EVERY:
            self._log(f"step {step}  {note}")

    def layers(self, rows: Sequence[LayerRow], step: int) -> None:
        """Record the layers in one step, counted from 1, which need not be done yet."""
        for row in rows:
            self._layers.add({"step": step, **row})

    def epoch(self, row: dict[str, float | None], step: int) -> None:
        """Record one epoch, counted from 0, that ended with ``step``."""
        self.epochs.add(row)
        cells = {f"epoch/{name}": value for name, value in row.items() if name != "epoch"}
        known = {name: value for name, value in cells.items() if value is not None}
        for logger in self.loggers:
            logger.add(known, step)
            logger.flush()
        shown = [
            f"{name.replace('_', ' ')} {value:.4g}"
            for name, value in row.items()
            if name.startswith(("train_", "validation_")) and value is not None
        ]
        ended = int(row["epoch"] or 0) + 1  # people count from 1
        self._log(f"epoch {ended}  {'  '.join(shown)}  {row['seconds']:.1f} s")

    def _log(self, line: str) -> None:
        self.logged = time.monotonic()
        if self.live:
            self.bar.console.print(line, highlight=False, markup=False)
        else:
            log.info(line)

    def close(self) -> None:
        self.bar.stop()
        self._files.close()
        for logger in self.loggers:
            logger.close()
