"""Presents a scaling study: CSV and JSON with every number, a short table, and a figure.

The figure has bars as figures 4 and 7 of Oyama et al. 2020, or lines as figure 8.
"""

from __future__ import annotations

import dataclasses
import datetime
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import rich.table
import torch
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from hyperslab.errors import RecipeError, system_errors_as
from hyperslab.planner.cost import Breakdown
from hyperslab.studies.report.canvas import FIGURE_STYLE, FIRST, SECOND
from hyperslab.studies.scaling.points import ScalingKind
from hyperslab.studies.scaling.study import TABLE, MeasuredStep, Speed, Study, StudyRow
from hyperslab.studies.table import TIMES, Table, TableRow, number, size
from hyperslab.util.atomic_files import created_aside, write_csv, write_json

Cell = float | int | str | None


def write_study(study: Study, folder: Path) -> None:
    """Writes the study's tables and its figure, if there is anything in them."""
    if not any(row.measured or row.predicted for row in study.rows):
        return
    with system_errors_as(RecipeError, f"cannot write into output {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        write_tables(study, folder)
        draw_study(study, folder / "study.png")


def write_tables(study: Study, folder: Path) -> None:
    """Writes ``study.csv`` and ``study.json``: one row a point; what is not there is empty.

    Times are in seconds, throughputs in samples/s, memory in bytes; ``deviation`` is
    predicted / measured - 1. Predicted times that are not known are empty, too. In the JSON
    ``remark`` and the facts stand beside them.
    """
    rows = table_of_study(study)
    cells = [
        [f"{cell:.9g}" if isinstance(cell, float) else cell for cell in row.values()]
        for row in rows
    ]
    write_csv(folder / "study.csv", list(rows[0]), cells)
    facts = {
        "kind": study.kind,
        "recipe": study.recipe,
        "machine": study.machine or None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
    }
    write_json(folder / TABLE, {**facts, "rows": rows})


def table_of_study(study: Study) -> list[dict[str, Cell]]:
    """Lists every number of each row by name; of a point that cannot be, the ranks and why."""
    rows = [_row_cells(*row) for row in study.rows_with_speeds()]
    nothing = dict.fromkeys(rows[0])
    rows += [{**nothing, "ranks": one.ranks, "remark": one.reason} for one in study.refused]
    return sorted(rows, key=lambda cells: int(cells["ranks"] or 0))


SHORT_HEAD = (
    "ranks",
    "grid",
    "batch",
    "",
    "step\n[s]",
    "samples\n/s",
    "speed-\nup",
    "effi-\nciency",
    "devi-\nation",
)


def short_table(study: Study) -> rich.table.Table:
    """Shows what one looks for first; a prediction stands below its measurement."""
    rows: list[TableRow] = []
    for row, measured, predicted in study.rows_with_speeds():
        point = [str(row.point.ranks), row.point.cut, str(row.point.batch_size)]
        if row.measured is not None and measured is not None:
            rows.append([*point, "measured", *_merits(row.measured.seconds, measured), ""])
            point = [""] * len(point)
        if row.predicted is not None and row.predicted.unknown:
            rows.append([*point, "predicted", "unknown", "", "", "", ""])
        elif row.forecast is not None and predicted is not None:
            off = "" if row.deviation is None else f"{row.deviation:+.1%}"
            rows.append([*point, "predicted", *_merits(row.forecast.seconds, predicted), off])
    # A grid of three axes is long, and all has to fit into 80 columns.
    return Table("", SHORT_HEAD, rows).for_terminal(left=("grid", ""), padding=0, wrap="grid")


def study_remarks(study: Study) -> list[str]:
    """Says what a reader of the numbers has to know."""
    ranks: dict[str, list[str]] = {}  # by the remark that is made on them
    for row in study.rows:
        for remark in remarks_on(row):
            ranks.setdefault(remark, []).append(str(row.point.ranks))
    words = list(dict.fromkeys(f"left out: {one.reason}" for one in study.refused))
    words += [f"{', '.join(of)} rank{'s' * (of != ['1'])}: {what}" for what, of in ranks.items()]
    memory = [row.measured.memory for row in study.rows if row.measured]
    if memory:
        words.append(f"a rank held at most {size(max(memory))}")
    return words


def remarks_on(row: StudyRow) -> list[str]:
    """Says why a time of a row means less than it seems."""
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


def _merits(seconds: float, speed: Speed) -> list[str]:
    merits = [f"{speed.speedup:.2f}{TIMES}", f"{speed.efficiency:.0%}"]
    return [number(seconds), number(speed.throughput), *merits]


def _row_cells(row: StudyRow, measured: Speed | None, predicted: Speed | None) -> dict[str, Cell]:
    cells: dict[str, Cell] = {"ranks": row.point.ranks, **row.point.grid.model_dump()}
    cells["batch_size"] = row.point.batch_size
    cells |= _named("measured", MeasuredStep, row.measured)
    cells |= _named("measured", Speed, measured)
    cells["predicted_seconds"] = None if row.forecast is None else row.forecast.seconds
    cells |= _named("predicted", Breakdown, row.forecast and row.forecast.parts)
    cells |= _named("predicted", Speed, predicted)
    cells["predicted_memory"] = None if row.predicted is None else row.predicted.memory
    cells["deviation"] = row.deviation
    cells["remark"] = "; ".join(remarks_on(row))
    return cells


def _named(
    what: str, kind: type[MeasuredStep | Breakdown | Speed], values: object
) -> dict[str, Cell]:
    """Names the numbers among a dataclass's fields by what they are numbers of."""
    names = [field.name for field in dataclasses.fields(kind) if field.name != "crowded"]
    return {f"{what}_{name}": getattr(values, name, None) for name in names}


DAGGER = "\N{DAGGER}"

STEP_PARTS = {
    "forward": ("#56b4e9", ("forward",)),
    "backward": ("#e69f00", ("backward_data", "backward_filter")),
    "waiting for ranks": ("#cc79a7", ("halos", "statistics", "gradients")),
    "optimizer, overhead, input": ("#bbbbbb", ("offload", "optimizer", "overhead", "input")),
}
"""Groups a predicted step's parts: a colour, and fields of its `Breakdown`."""

COMPARABLE = 40  # ratio of bars: a shorter one could not be seen, and lines take its place

STUDY_STYLE = {
    **FIGURE_STYLE,
    "font.size": 10,
    "axes.grid.axis": "y",
    "ytick.minor.size": 2,  # of logarithmic axes
}


def draw_study(study: Study, path: Path) -> None:
    """Writes the figure as PNG, whole or not at all."""
    with mpl.rc_context(STUDY_STYLE), created_aside(path) as file:
        figure_of(study).savefig(file, format="png", dpi=150)


def figure_of(study: Study) -> Figure:
    """Draws bars where they can be compared by eye, else lines."""
    wide = max(6.4, 1.6 + 0.95 * len(study.rows))
    figure = Figure(figsize=(wide, 4.6), layout="constrained")
    axes = figure.subplots()
    steps = [step for row in study.rows for step in (row.measured, row.forecast) if step]
    seconds = [step.seconds for step in steps] or [0.0]
    alike = study.kind is ScalingKind.STRONG and max(seconds) <= COMPARABLE * min(seconds)
    (_bars if alike else _lines)(axes, study)
    axes.set_title(_title(study), loc="left", fontsize=10)
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        figure.legend(loc="outside lower left", ncols=2, fontsize=9)
    return figure


def _title(study: Study) -> str:
    words = f"{study.kind.capitalize()} scaling of {study.recipe}"
    first = study.rows[0].point
    if study.kind is ScalingKind.STRONG:
        words += f", mini-batch {first.batch_size}"
    else:
        each = first.batch_size // first.grid.data
        words += f", {each} sample{'s' * (each > 1)} a replica"
    if study.machine:
        words += f"\npredicted for {study.machine}"
    if any(row.measured and row.measured.crowded for row in study.rows):
        words += "\n* more ranks than cores or GPUs: meaningless as a measure of scaling"
    if any(row.predicted and not row.predicted.fits for row in study.rows):
        words += f"\n{DAGGER} does not fit into a rank's memory"
    if any(row.predicted and row.predicted.unknown for row in study.rows):
        words += "\npredicted times are not known: most of a step's operators were never measured"
    if study.refused:
        words += f"\ncannot be: {', '.join(str(one.ranks) for one in study.refused)} ranks"
    return words


def _bars(axes: Axes, study: Study) -> None:
    """Draws the time of a step, measured beside predicted, which is shaded by its parts."""
    rows = study.rows
    both = any(row.measured for row in rows) and any(row.forecast for row in rows)
    width = 0.38 if both else 0.6
    # Side by side where there are both, else in the middle.
    shifts = [width / 2 if row.measured and row.forecast else 0.0 for row in rows]
    measured = [(n, row.measured) for n, row in enumerate(rows) if row.measured is not None]
    predicted = [(n, row.forecast) for n, row in enumerate(rows) if row.forecast is not None]
    tops: list[float] = []
    if measured:
        places = [place - shifts[place] for place, _ in measured]
        seconds = np.array([found.seconds for _, found in measured])
        upper = [found.upper for _, found in measured]
        spread = [seconds - [found.lower for _, found in measured], upper - seconds]
        bars = axes.bar(
            places, seconds, width, color=FIRST, yerr=spread,
            error_kw={"ecolor": "#1c1f24", "elinewidth": 0.8, "capsize": 2},
            label="measured (median, quartiles)",
        )  # fmt: skip
        _label_bars(axes, bars, study.speeds("measured"))
        tops += upper
    if predicted:
        places = [place + shifts[place] for place, _ in predicted]
        below = np.zeros(len(predicted))
        for name, (colour, fields) in STEP_PARTS.items():
            seconds = np.array([sum(getattr(p.parts, f) for f in fields) for _, p in predicted])
            bars = axes.bar(
                places, seconds, width, bottom=below, color=colour, alpha=0.6, hatch="////",
                edgecolor="white", linewidth=0.5, label=f"predicted: {name}",
            )  # fmt: skip
            below += seconds
        _label_bars(axes, bars, study.speeds("forecast"))
        tops += below.tolist()
    axes.set_xticks(range(len(rows)), [_point_label(row) for row in rows])
    axes.set(
        ylabel="time of a step [s]",
        ylim=(0, 1.18 * max(tops, default=1.0)),
        xlim=(-0.6, len(rows) - 0.4),
    )


def _label_bars(axes: Axes, bars: BarContainer, speeds: Iterable[Speed | None]) -> None:
    """Writes throughput [samples/s] and speed-up above bars, as in the paper."""
    words = [_speed_words(speed) for speed in speeds if speed is not None]
    axes.bar_label(bars, words, padding=3, fontsize=7.5)


def _speed_words(speed: Speed) -> str:
    return f"{number(speed.throughput)}/s\n{number(speed.speedup)}{TIMES}"


def _lines(axes: Axes, study: Study) -> None:
    """Draws throughput over ranks, both logarithmic; a dotted line is ideal scaling."""
    ranks = [row.point.ranks for row in study.rows]
    _line(axes, ranks, study.speeds("measured"), above=True)
    _line(axes, ranks, study.speeds("forecast"), above=False)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(ranks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([_point_label(row) for row in study.rows])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.margins(0.14, 0.18)
    axes.set(ylabel="throughput [samples/s]")


def _line(axes: Axes, ranks: Sequence[int], speeds: Sequence[Speed | None], *, above: bool) -> None:
    """Draws the measured line, its words above, or the predicted one, its words below."""
    points = [(r, s) for r, s in zip(ranks, speeds, strict=True) if s is not None]
    if not points:
        return
    name = "measured" if above else "predicted"
    color = FIRST if above else SECOND
    first = points[0][1]
    ideal = [first.throughput * count / first.base for count in ranks]
    axes.plot(ranks, ideal, ":", color=color, linewidth=1, label=f"ideal, from the first {name}")
    found = [speed.throughput for _, speed in points]
    style = "o-" if above else "s--"
    places = [count for count, _ in points]
    axes.plot(places, found, style, color=color, markersize=4, label=name)
    for count, speed in points:
        axes.annotate(
            _speed_words(speed),
            (count, speed.throughput),
            xytext=(-6, 5) if above else (6, -5),
            textcoords="offset points",
            ha="right" if above else "left",
            va="bottom" if above else "top",
            fontsize=7.5,
            color=color,
        )


def _point_label(row: StudyRow) -> str:
    star = "*" if row.measured and row.measured.crowded else ""
    extents = row.point.grid.model_dump()
    cut = "\n".join(f"{axis} {n}" for axis, n in extents.items() if n > 1)
    plural = "s" * (row.point.ranks > 1)
    dagger = DAGGER if row.predicted and not row.predicted.fits else ""
    return f"{row.point.ranks}{star}{dagger} rank{plural}\n{cut}".rstrip()
