"""Speed-up and efficiency, and how they are shown (tier: no process)."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from hyperslab.recipe.schema import GridSection
from hyperslab.studies.scaling.points import ScalingKind, ScalingPoint
from hyperslab.studies.scaling.study import Study, StudyRow
from hyperslab.studies.scaling.summary import (
    STEP_PARTS,
    draw_study,
    figure_of,
    short_table,
    study_remarks,
    table_of_study,
    write_tables,
)
from hyperslab.studies.table import TIMES
from tests.selection import by_rotation
from tests.studies.scaling.studies import breakdown, predicted_step, study

RANKS = [8, 16, 32, 2048]


@pytest.fixture(params=list(ScalingKind), ids=str)
def both(request: pytest.FixtureRequest) -> Study:
    """Of four points two are measured, and the last three predicted."""
    return study(request.param, RANKS, measured=2, predicted=3)


def test_merits_are_relative_to_the_first_that_there_is() -> None:
    measured = study(ScalingKind.STRONG, RANKS, measured=2, predicted=3).speeds("measured")
    assert measured[2:] == [None, None]
    first, second = measured[:2]
    assert first is not None
    assert second is not None
    assert (first.speedup, first.efficiency, first.base) == (1, 1, 8)
    assert first.throughput == pytest.approx(8 / (1.1 * (0.1 + 10 / 8)))
    assert second.speedup == pytest.approx(1.35 / 0.725)
    assert second.efficiency == pytest.approx(1.35 / 0.725 / 2)
    predicted = study(ScalingKind.WEAK, RANKS, measured=2, predicted=3).speeds("forecast")
    assert predicted[0] is None
    last = predicted[-1]
    assert last is not None
    assert last.base == 16
    assert last.speedup == pytest.approx(2048 / 16 * 1.02 / 1.18)
    assert last.efficiency == pytest.approx(1.02 / 1.18)


def test_tables_hold_every_number(both: Study, tmp_path: Path) -> None:
    write_tables(both, tmp_path)
    rows = list(csv.DictReader((tmp_path / "study.csv").read_text().splitlines()))
    document = json.loads((tmp_path / "study.json").read_text())
    assert [int(row["ranks"]) for row in rows] == RANKS
    assert [bool(row["measured_seconds"]) for row in rows] == [True, True, False, False]
    assert [bool(row["predicted_seconds"]) for row in rows] == [False, True, True, True]
    assert [bool(row["deviation"]) for row in rows] == [False, True, False, False]
    assert float(rows[1]["deviation"]) == pytest.approx(1 / 1.1 - 1)
    parts = [key for key in rows[1] if key.removeprefix("predicted_") in breakdown(1).as_dict()]
    total = sum(float(rows[1][key]) for key in parts)
    assert total == pytest.approx(float(rows[1]["predicted_seconds"]))
    assert rows[1]["remark"].startswith("too many: ")
    assert (rows[3]["predicted_memory"], rows[3]["remark"][:12]) == (str(2**34), "does not fit")
    assert (document["kind"], document["machine"]) == (both.kind, "some-machine")
    assert document["rows"] == table_of_study(both)


def test_a_terminal_of_80_columns_shows_it(both: Study) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(short_table(both))
    text = console.export_text()
    assert "…" not in text
    assert text.count("measured") == 2
    assert text.count("predicted") == 3
    assert "-9.1%" in text
    first, second, *_ = study_remarks(both)
    assert first == "16 ranks: too many: meaningless as a measure of scaling"
    assert second == "2048 ranks: does not fit: a rank needs 16.0 GiB, and it has 8.00 GiB"


def test_a_time_that_nobody_knows_is_not_shown_as_one(both: Study) -> None:
    rows = [
        row
        if row.predicted is None
        else replace(row, predicted=replace(row.predicted, unknown="?"))
        for row in both.rows
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(short_table(replace(both, rows=tuple(rows))))
    lines = [line.split() for line in console.export_text().splitlines() if "predicted" in line]
    assert [line[-2:] for line in lines] == [["predicted", "unknown"]] * 3
    axes = figure_of(replace(both, rows=tuple(rows))).axes[0]
    assert "not known" in axes.get_title("left")
    labels = axes.get_legend_handles_labels()[1]
    assert any("measured" in label for label in labels)
    assert not any("predicted" in label for label in labels)
    cells = table_of_study(replace(both, rows=tuple(rows)))
    empty = ("predicted_seconds", "predicted_throughput", "predicted_total", "deviation")
    assert {row.get(key) for row in cells for key in empty} == {None}
    assert any(row["predicted_memory"] for row in cells)
    alone = [replace(row, measured=None) for row in rows if row.predicted is not None]
    for kind in ScalingKind:
        axes = figure_of(replace(both, kind=kind, rows=tuple(alone))).axes[0]
        assert "not known" in axes.get_title("left")
        assert not axes.containers
        assert not axes.lines


def test_no_number_is_cut_off_by_a_long_grid() -> None:
    grids = [GridSection(), GridSection(data=16, depth=8, height=8, width=16)]
    times = [predicted_step(70.0, fits=False), predicted_step(0.0335, fits=True)]
    rows = [StudyRow(ScalingPoint(g, 128), 128, None, t) for g, t in zip(grids, times, strict=True)]
    wide = Study(ScalingKind.STRONG, "hand", tuple(rows), "some-machine")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(short_table(wide))
    text = console.export_text()
    assert "…" not in text
    assert f"{70 / 0.0335:.2f}{TIMES}" in text


def test_bars_too_short_to_be_seen_are_lines() -> None:
    far = study(ScalingKind.STRONG, [8, 2048], measured=0, predicted=2)
    near = study(ScalingKind.STRONG, [8, 16], measured=0, predicted=2)
    assert figure_of(near).axes[0].get_yscale() == "linear"
    rows = (replace(near.rows[0], predicted=predicted_step(200.0, fits=True)), far.rows[1])
    assert figure_of(replace(far, rows=rows)).axes[0].get_yscale() == "log"


@pytest.mark.parametrize("recipe", ["hand", "a-recipe-with-a-name-that-is-rather-long-for-a-title"])
def test_the_legend_is_within_the_figure(recipe: str) -> None:
    figure = figure_of(
        replace(study(ScalingKind.STRONG, RANKS, measured=2, predicted=3), recipe=recipe)
    )
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width


@pytest.mark.parametrize(("rows", "kind"), by_rotation([(2, 3), (1, 0), (0, 4)], ScalingKind))
def test_the_figure_has_content(kind: ScalingKind, rows: tuple[int, int], tmp_path: Path) -> None:
    measured, predicted = rows
    draw_study(study(kind, RANKS, measured=measured, predicted=predicted), tmp_path / "study.png")
    pixels = imread(tmp_path / "study.png")[..., :3]
    assert min(pixels.shape[:2]) > 400
    colours = np.unique((255 * pixels).astype(int) @ (1 << 16, 1 << 8, 1))
    assert len(colours) > 20
    assert (0x0072B2 in colours) == (measured > 0)  # of what was measured


def test_the_parts_of_a_bar_are_the_whole_step() -> None:
    fields = [field for _, fields in STEP_PARTS.values() for field in fields]
    assert sorted(fields) == sorted(breakdown(1).as_dict())
