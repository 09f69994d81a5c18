"""The chapter on the timeline of a step (tier: no process)."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hyperslab.cli import app
from hyperslab.errors import DataError
from hyperslab.studies.report import write_report
from hyperslab.studies.report.timelines import merged_spans
from hyperslab.train.profile import (
    LayerTime,
    Profile,
    StepTimes,
    TimelineRow,
    TimelineSpan,
    predicted_path,
    profile_path,
    write_profile,
)
from tests.studies.report.fake import fake_run
from tests.studies.report.test_report import Outline

SPANS: dict[TimelineRow, list[TimelineSpan]] = {
    "convolutions": [(0.0, 0.5, 0)],
    "operators": [(0.5, 0.6, 1)],
    "halos": [(0.6, 0.7, 2)],
    "data": [(0.7, 0.75, 3)],
    "framework": [(0.75, 0.98, 4)],
}


def a_profile(rank: int, *, scale: float = 1.0, ended: str | None = None) -> Profile:
    """One of two ranks; a step takes ``scale`` [s] and 2 % of it are not covered."""
    spans = {row: [(scale * a, scale * b, i) for a, b, i in s] for row, s in SPANS.items()}
    rows: dict[TimelineRow, float] = {
        row: sum(b - a for a, b, _ in found) for row, found in spans.items()
    }
    step = StepTimes(
        step=5,
        seconds=scale,
        rows=rows,
        spans={**spans, "halos under way": [(0.1 * scale, 0.7 * scale, 2)]},
    )
    return Profile(
        rank=rank,
        ranks=2,
        grid={"data": 1, "depth": 2, "height": 1, "width": 1},
        wanted=3,
        usual_seconds=0.9,
        ended=ended,
        steps=[step],
        layers=[
            LayerTime(layer="conv1", stage="forward", compute=0.25, communication=0.125),
            LayerTime(layer="", stage="optimizer", compute=0.1),
        ],
        labels=["a", "b", "c", "d", "e"],
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the profiles of two ranks, the second slower."""
    run = fake_run(tmp_path, epochs=1, evaluated=False)
    for profile in (a_profile(0), a_profile(1, scale=1.25)):
        write_profile(profile_path(run, profile.rank), profile)
    return run


def test_a_step_is_drawn_and_told(run: Path) -> None:
    page = write_report(run).read_text()
    outline = Outline(page)
    assert "A step" in outline.headings
    assert outline.open == []
    assert any("1000 ms" in alt for alt in outline.alts)
    for line in ("compute", "halo", "waiting for data"):
        assert f">{line}</text>" in page
    assert ">gradients</text>" not in page, "nothing was averaged"
    assert "The rows cover 98.0 % of it" in page
    assert "Without the profiler a step took 900 ms" in page
    assert "rank 1 works longest (1038 ms of a step), rank 0 shortest (830 ms" in page
    assert "50.0 %" in page
    assert "2.0 %" in page, "what is not covered"


@pytest.mark.usefixtures("undrawn")
def test_layers_are_compared_with_a_prediction(run: Path) -> None:
    assert "predicted" not in write_report(run).read_text().partition('id="timelines"')[2]
    layers = [
        LayerTime(layer="conv1", stage="forward", compute=0.3),
        LayerTime(layer="conv1", stage="backward", compute=0.5),
    ]
    write_profile(predicted_path(run), Profile(kind="predicted", layers=layers))
    page = write_report(run).read_text()
    assert "measured / predicted" in page
    row = page.partition("conv1 <small>forward</small>")[2].partition("</tr>")[0]
    cells = [cell.partition("<")[0] for cell in row.split("<td>")[1:]]
    assert cells == ["250", "125", "375", "300", "1.25"]
    row = page.partition("conv1 <small>backward</small>")[2].partition("</tr>")[0]
    assert "500" in row, "predicted and not measured"
    layers_table = page.partition("time by layer and pass")[2].partition("</table>")[0]
    last = layers_table.rpartition("<tr>")[2]
    # 0.25 + 0.125 + 0.1 s measured, 0.3 + 0.5 s predicted
    cells = [cell.partition("<")[0] for cell in last.split("<td>")[1:]]
    assert cells == ["350", "125", "475", "800", "0.594"]


@pytest.mark.usefixtures("undrawn")
def test_two_runs_on_one_scale(run: Path, tmp_path: Path) -> None:
    other = fake_run(tmp_path / "other", epochs=1, evaluated=False)
    write_profile(profile_path(other, 0), a_profile(0, scale=2.0))
    result = CliRunner().invoke(app, ["report", str(run), str(other)])
    assert result.output.startswith(f"{run / 'report.html'} (the page of {run}, ")
    (alt,) = [a for a in Outline((run / "report.html").read_text()).alts if "Timeline" in a]
    assert "1000 ms" in alt
    assert "2000 ms" in alt


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_a_profile_says_how_to_make_one(tmp_path: Path) -> None:
    page = write_report(fake_run(tmp_path, epochs=1, evaluated=False)).read_text()
    assert "no step was profiled" in page
    assert "--profile" in page


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_ended_before_says_why(tmp_path: Path) -> None:
    run = fake_run(tmp_path, epochs=1, evaluated=False)
    write_profile(profile_path(run, 0), Profile(ranks=1, ended="stopped by SIGTERM"))
    assert "stopped by SIGTERM" in write_report(run).read_text()


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_ended_between_is_shown_as_far_as_it_came(tmp_path: Path) -> None:
    run = fake_run(tmp_path, epochs=1, evaluated=False)
    write_profile(profile_path(run, 0), a_profile(0, ended="stopped by SIGTERM"))
    page = write_report(run).read_text()
    assert "the median of 1 (not 3: stopped by SIGTERM)" in page
    assert "A step" in Outline(page).headings


def test_a_broken_profile_is_named(run: Path) -> None:
    profile_path(run, 1).write_text("{")
    with pytest.raises(DataError, match=r"rank-1\.json is not a profile"):
        write_report(run)


def test_close_pieces_are_drawn_as_one() -> None:
    spans = [(0.0, 1.0, 0), (1.05, 2.0, 1), (3.0, 4.0, 0)]
    assert merged_spans(spans, 0.1) == [(0.0, 2.0), (3.0, 4.0)]
