"""The history of a run as CSV files that survive a stop: no step appears twice."""

from __future__ import annotations

import csv
import datetime
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperslab.atomic_files import append_whole, json_lines, open_to_append, write_csv
from hyperslab.errors import DataError

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
LATER = {"flops_per_second", "peak_share"}
"""Columns that files of earlier versions do not have; their cells are empty."""


CHANGES = "changes.jsonl"
"""In a run's folder: step, date and keys of every resumption with another recipe."""


def record_changes(run: Path, step: int, changes: Mapping[str, list[Any]]) -> None:
    """Take down what the steps from here on are done with: by key, the value before and now.

    Raises:
        OSError: it cannot be written.
    """
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    append_whole(run / CHANGES, json_lines([{"step": step, "date": date, "changes": changes}]))


def epochs_columns(measures: tuple[str, ...]) -> tuple[str, ...]:
    """Of ``epochs.csv``, where a validation measures these; the learning rate is the next one's."""
    return ("epoch", "train_loss", *measures, "learning_rate", "seconds")


class HistoryFile:
    """A CSV file that grows by rows; its first column counts."""

    def __init__(self, path: Path, columns: tuple[str, ...], *, before: int) -> None:
        """Go on with an existing file after dropping the rows that count ``before`` or more.

        A checkpoint is older than the last rows of a run that was killed; the resumed run writes
        these steps again.

        Raises:
            DataError: the file that is there is no such table.
        """
        self.columns = columns
        try:
            kept = [row for row in _rows(path, columns) if int(row[columns[0]]) < before]
        except (ValueError, csv.Error) as error:
            raise DataError(
                f"{path} is damaged: {error}\n"
                "    move it away; the run goes on without the rows that it had"
            ) from None
        write_csv(path, columns, ([row.get(name, "") for name in columns] for row in kept))
        # A row is on disk when it is written.
        self.file = os.fdopen(open_to_append(path), "a", newline="", buffering=1)
        self.writer = csv.DictWriter(self.file, columns, lineterminator="\n")

    def add(self, row: Mapping[str, object]) -> None:
        """Append one row; None becomes an empty cell."""
        self.writer.writerow(row)

    def close(self) -> None:
        self.file.close()


def _rows(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """The whole rows: the last one may be half-written."""
    if not path.exists():
        return []
    complete = path.read_text().rpartition("\n")[0]
    rows = csv.DictReader(complete.splitlines())
    expected = set(columns)
    return [
        row
        for row in rows
        if set(row) <= expected and expected - set(row) <= LATER and None not in row.values()
    ]
