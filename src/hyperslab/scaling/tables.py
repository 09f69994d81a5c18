"""A study as tables: CSV and JSON with every number, and a short one for the terminal."""

from __future__ import annotations

import dataclasses
import datetime
import platform
from pathlib import Path

import torch
from rich import box
from rich.console import JustifyMethod
from rich.markup import escape
from rich.table import Table

from hyperslab.atomic_files import write_csv, write_json
from hyperslab.cost.breakdown import Breakdown
from hyperslab.report.number_format import TIMES, number, size
from hyperslab.scaling.study import MeasuredStep, Speed, Study, StudyRow

Cell = float | int | str | None


def write_tables(study: Study, folder: Path) -> None:
    """``study.csv`` and ``study.json``: one row a point; what is not there is empty.

    Times are in seconds, throughputs in samples/s, memory in bytes; ``deviation`` is
    predicted / measured - 1. In the JSON ``remark`` and the facts stand beside them.
    """
    rows = table_of_study(study)
    write_csv(
        folder / "study.csv",
        list(rows[0]),
        [["" if cell is None else _csv(cell) for cell in row.values()] for row in rows],
    )
    facts = {
        "kind": study.kind,
        "recipe": study.recipe,
        "machine": study.machine or None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
    }
    write_json(folder / "study.json", {**facts, "rows": rows})


def table_of_study(study: Study) -> list[dict[str, Cell]]:
    """By row, every number by its name; of a point that cannot be, the ranks and why."""
    speeds = zip(study.rows, study.measured(), study.predicted(), strict=True)
    rows = [_cells(row, measured, predicted) for row, measured, predicted in speeds]
    nothing = dict.fromkeys(rows[0])
    rows += [{**nothing, "ranks": one.ranks, "remark": one.reason} for one in study.refused]
    return sorted(rows, key=lambda cells: int(cells["ranks"] or 0))


def short_table(study: Study) -> Table:
    """What one looks for first, in 80 columns; a prediction stands below its measurement."""
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    for head in ("ranks", "grid", "batch", ""):
        justify: JustifyMethod = "left" if head in ("grid", "") else "right"
        table.add_column(head, justify=justify, no_wrap=head != "grid")  # a grid of 3 axes is long
    for head in ("step\n[s]", "samples\n/s", "speed-\nup", "effi-\nciency", "devi-\nation"):
        table.add_column(escape(head), justify="right", no_wrap=True)
    for row, measured, predicted in zip(
        study.rows, study.measured(), study.predicted(), strict=True
    ):
        point = [str(row.point.ranks), row.point.cut, str(row.point.batch_size)]
        if measured is not None:
            table.add_row(*point, "measured", *_merits(row.measured_seconds, measured), "")
            point = [""] * len(point)
        if predicted is not None:
            off = "" if row.deviation is None else f"{row.deviation:+.1%}"
            table.add_row(*point, "predicted", *_merits(row.predicted_seconds, predicted), off)
    return table


def study_remarks(study: Study) -> list[str]:
    """What a reader of the numbers has to know."""
    words = [f"left out: {one.reason}" for one in study.refused]
    words += [_shared(remark, study) for row in study.rows for remark in remarks_on(row)]
    words = list(dict.fromkeys(words))
    memory = [row.measured.memory for row in study.rows if row.measured]
    if memory:
        words.append(f"a rank held at most {size(max(memory))}")
    return words


def remarks_on(row: StudyRow) -> list[str]:
    """Why a time of a row means less than it seems."""
    words = []
    if row.measured is not None and row.measured.crowded:
        words.append(f"{row.measured.crowded}: meaningless as a measure of scaling")
    if row.failure:
        words.append(f"the training failed: {row.failure}")
    if row.predicted is not None and not row.predicted.fits:
        need = f"{size(row.predicted.memory)}, and it has {size(row.predicted.limit)}"
        words.append(f"does not fit: a rank needs {need}")
    words += row.predicted.doubts if row.predicted else ()
    return words


def _shared(remark: str, study: Study) -> str:
    """A remark once, with the ranks of all rows that it is made on."""
    ranks = [str(row.point.ranks) for row in study.rows if remark in remarks_on(row)]
    return f"{', '.join(ranks)} rank{'s' * (ranks != ['1'])}: {remark}"


def _merits(seconds: float | None, speed: Speed) -> list[str]:
    merits = [f"{speed.speedup:.2f}{TIMES}", f"{speed.efficiency:.0%}"]
    return [number(seconds), number(speed.throughput), *merits]


def _cells(row: StudyRow, measured: Speed | None, predicted: Speed | None) -> dict[str, Cell]:
    cells: dict[str, Cell] = {"ranks": row.point.ranks, **row.point.grid.model_dump()}
    cells["batch_size"] = row.point.batch_size
    cells |= _named("measured", MeasuredStep, row.measured)
    cells |= _named("measured", Speed, measured)
    cells["predicted_seconds"] = row.predicted_seconds
    cells |= _named("predicted", Breakdown, row.predicted and row.predicted.parts)
    cells |= _named("predicted", Speed, predicted)
    cells["predicted_memory"] = None if row.predicted is None else row.predicted.memory
    cells["deviation"] = row.deviation
    cells["remark"] = "; ".join(remarks_on(row))
    return cells


def _named(
    what: str, kind: type[MeasuredStep | Breakdown | Speed], values: object
) -> dict[str, Cell]:
    """The numbers among the fields of a dataclass, each called by what it is a number of."""
    names = [field.name for field in dataclasses.fields(kind) if field.name != "crowded"]
    return {f"{what}_{name}": getattr(values, name, None) for name in names}


def _csv(cell: Cell) -> Cell:
    return f"{cell:.9g}" if isinstance(cell, float) else cell
