"""The CSV history across stops (tier: no process)."""

from __future__ import annotations

import csv
import io
import os
import tracemalloc
from pathlib import Path

import pytest
from rich.console import Console

from hyperslab.errors import DataError
from hyperslab.train.history import STEP_COLUMNS, HistoryFile, Reporter, epochs_columns

MEASURES = ("validation_loss", "validation_mae")
COLUMNS = ("step", "loss")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def fill(path: Path, *, before: int, steps: range) -> None:
    table = HistoryFile(path, COLUMNS, before=before)
    for step in steps:
        table.add({"step": step, "loss": step / 8})
    table.close()


def test_steps_after_the_checkpoint_are_dropped_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    fill(path, before=1, steps=range(1, 8))
    fill(path, before=5, steps=range(5, 10))
    assert [int(row["step"]) for row in rows(path)] == list(range(1, 10))
    assert float(rows(path)[8]["loss"]) == 9 / 8


def test_a_half_written_row_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    fill(path, before=1, steps=range(1, 4))
    path.write_text(path.read_text() + "4,0.")
    fill(path, before=5, steps=range(4, 5))
    assert [row["loss"] for row in rows(path)] == ["0.125", "0.25", "0.375", "0.5"]


def test_a_history_of_any_length_is_gone_on_with_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("step,loss\n" + "".join(f"{step},0.5\n" for step in range(40_000)))
    tracemalloc.start()
    try:
        HistoryFile(path, COLUMNS, before=30_000).close()
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()
    assert [int(row["step"]) for row in rows(path)] == list(range(30_000))


def test_a_history_without_lines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    fill(path, before=1, steps=range(1, 4))
    before = path.read_bytes()
    os.truncate(path, 1 << 40)  # holes
    with pytest.raises(DataError, match=r"steps\.csv is damaged: a line has more than"):
        HistoryFile(path, COLUMNS, before=5)
    os.truncate(path, len(before))
    assert path.read_bytes() == before, "what was there stays"
    assert [*tmp_path.iterdir()] == [path]


def test_a_row_is_on_disk_at_once(tmp_path: Path) -> None:
    table = HistoryFile(tmp_path / "steps.csv", COLUMNS, before=1)
    table.add({"step": 1, "loss": None})
    assert rows(tmp_path / "steps.csv") == [{"step": "1", "loss": ""}]
    table.close()


def row(step: int) -> dict[str, float]:
    return {**dict.fromkeys(STEP_COLUMNS, 0.5), "step": step, "epoch": 0, "memory_bytes": 2**30}


def test_without_a_terminal_nothing_is_drawn_and_epochs_are_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    reporter = Reporter(tmp_path, measures=MEASURES, step=0, epoch=0, total_steps=4)
    reporter.step(row(1))
    with caplog.at_level("INFO", "hyperslab"):
        reporter.epoch(
            {**dict.fromkeys(epochs_columns(MEASURES), 0.25), "epoch": 0, "validation_loss": None},
            1,
        )
    reporter.close()
    assert capsys.readouterr().out == ""
    assert "epoch 1  train loss 0.25  validation mae 0.25" in caplog.text
    assert rows(tmp_path / "epochs.csv")[0]["validation_loss"] == ""
    assert rows(tmp_path / "steps.csv")[0]["memory_bytes"] == str(2**30)


def test_a_terminal_shows_a_bar(tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(force_terminal=True, width=200, file=screen)
    reporter = Reporter(
        tmp_path, measures=MEASURES, step=0, epoch=0, total_steps=4, console=console
    )
    reporter.step(row(3))
    reporter.close()
    assert "3/4" in screen.getvalue()
    assert "100 % waiting" in screen.getvalue()


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    reporter = Reporter(
        tmp_path, measures=MEASURES, step=0, epoch=0, total_steps=4, loggers=["tensorboard"]
    )
    for step in (1, 2):
        reporter.step({**row(step), "loss": step / 4})
    reporter.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = [(event.step, event.value) for event in events.Scalars("step/loss")]
    assert shown == [(1, 0.25), (2, 0.5)]


def test_a_file_of_an_earlier_version_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    old = STEP_COLUMNS[: STEP_COLUMNS.index("flops_per_second")]
    table = HistoryFile(path, old, before=1)
    for step in (1, 2):
        table.add(dict.fromkeys(old, step))
    table.close()
    table = HistoryFile(path, STEP_COLUMNS, before=2)
    table.add(dict.fromkeys(STEP_COLUMNS, 2))
    table.close()
    first, second = rows(path)
    assert (first["step"], first["memory_bytes"], first["peak_share"]) == ("1", "1", "")
    assert (second["step"], second["peak_share"]) == ("2", "2")


def test_rows_of_other_measures_stay_with_their_columns(tmp_path: Path) -> None:
    """A resumed run may measure more than before, or less; where no row is kept, as it says."""
    path = tmp_path / "epochs.csv"
    for epoch, measures in enumerate((("validation_loss",), ("a", "b"), ("b",), ("b", "c"))):
        columns = ("epoch", *measures)
        table = HistoryFile(path, columns, before=epoch)
        table.add(dict.fromkeys(columns, epoch))
        table.close()
    assert path.read_text().splitlines() == [
        "epoch,b,c,a,validation_loss",
        "0,,,,0",
        "1,1,,1,",
        "2,2,,,",
        "3,3,3,,",
    ]
    HistoryFile(path, ("epoch", "b"), before=0).close()
    assert path.read_text() == "epoch,b\n"


def test_another_table_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "epochs.csv"
    path.write_text("name,size\na,1\n")
    with pytest.raises(DataError, match=r"epochs\.csv is damaged: no column is called epoch"):
        HistoryFile(path, ("epoch", "loss"), before=1)
    assert path.read_text() == "name,size\na,1\n"


def test_what_is_not_known_is_an_empty_cell(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, measures=MEASURES, step=0, epoch=0, total_steps=4)
    reporter.step({**row(1), "peak_share": None})
    reporter.close()
    assert rows(tmp_path / "steps.csv")[0]["peak_share"] == ""
