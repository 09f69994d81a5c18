"""Layers on the page of a run (tier: no process)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyperslab.errors import DataError
from hyperslab.studies import run_folder
from hyperslab.studies.report import FigureFormat, write_report
from hyperslab.studies.run_folder import read_layers
from hyperslab.studies.table import DASH
from hyperslab.train.history import LAYER_COLUMNS
from tests.studies.report.fake import fake_run, write_csv


def write_layers(run: Path, steps: list[int]) -> Path:
    """Two layers, the first of which is used twice; the second has no gradient."""
    rows: list[list[object]] = []
    for step in steps:
        for use in (1, 2):
            rows.append([step, "stem.conv", use, 0.1, 1, 1 - use / (step + 2), 0.5, 2, 0.25 / step])
        rows.append([step, "fc", 1, "", "", "", "", 3, ""])
    write_csv(run / "layers.csv", LAYER_COLUMNS, rows)
    return run / "layers.csv"


@pytest.mark.usefixtures("undrawn")
def test_the_page_shows_them_where_they_were_recorded(tmp_path: Path) -> None:
    run = fake_run(tmp_path, epochs=2, wanted=2)
    assert "Share of energy common" not in write_report(run).read_text()
    write_layers(run, [1, 3, 5])
    page = write_report(run, figures=[FigureFormat.PNG]).read_text()
    assert "Share of energy common to all samples" in page
    assert "Layers in step 1, and in step 5." in page
    assert "stem.conv (2)" in page
    assert "0.667 → 0.857" in page
    for figure in ("layers-common", "layers-ratio"):
        assert (run / "report-figures" / f"{figure}.png").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_network_that_has_other_layers_than_before(tmp_path: Path) -> None:
    run = fake_run(tmp_path, epochs=2, wanted=2)
    path = write_layers(run, [1, 3])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], "4,other,1,0,1,,,,", ""]))
    assert f"0.667 → {DASH}" in write_report(run).read_text()


@pytest.mark.parametrize(("count", "stride"), [(1, 1), (16, 1), (17, 2), (40, 4)])
def test_of_many_steps_some_are_kept(tmp_path: Path, count: int, stride: int) -> None:
    steps = [1 + 5 * i for i in range(count)]
    found = read_layers(write_layers(tmp_path, steps))
    assert [*found] == sorted({*steps[::stride], steps[-1]})
    assert [*found[1]] == ["stem.conv", "stem.conv (2)", "fc"]
    assert found[1]["stem.conv"]["common"] == pytest.approx(2 / 3)
    assert found[1]["fc"]["common"] != found[1]["fc"]["common"], "an empty cell is NaN"
    assert found[1]["fc"]["weight"] == 3


def test_a_file_without_rows_is_none(tmp_path: Path) -> None:
    assert read_layers(write_layers(tmp_path, [])) == {}


def test_files_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_layers(tmp_path, [1, 3])
    text = path.read_text()
    path.write_text(text.replace("3,fc,1,", "3,fc,1,x"))
    with pytest.raises(DataError, match=r"layers\.csv, line 7, column mean: 'x' is not a number"):
        read_layers(path)
    path.write_text(text.replace("3,fc", "last,fc"))
    with pytest.raises(DataError, match=r"layers\.csv, line 7, column step: 'last'"):
        read_layers(path)
    for step in ("", "inf"):
        path.write_text(text.replace("3,fc", f"{step},fc"))
        with pytest.raises(DataError, match=r"layers\.csv, line 7, column step: .* of one"):
            read_layers(path)
    path.write_text("step,layer\n")
    with pytest.raises(DataError, match=r"layers\.csv has no column use"):
        read_layers(path)
    path.write_text(text)
    monkeypatch.setattr(run_folder, "MOST_LAYERS", 2)
    with pytest.raises(DataError, match=r"layers\.csv has more than 2 layers in step 1"):
        read_layers(path)
