"""Figures as files for a paper, and labels that nothing clips (tier: no process)."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import IO, Any

import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image
from typer.testing import CliRunner

from hyperslab.cli import app
from hyperslab.studies.report import page_of
from hyperslab.studies.report.canvas import COLUMN_INCHES, FIRST, Canvas, for_paper
from hyperslab.studies.run_folder import read_run
from hyperslab.train.profile import profile_path, write_profile
from tests.docs.blocks import DOCS
from tests.selection import in_gate
from tests.studies.report import fake, fake_scans
from tests.studies.report.test_timelines import a_profile


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = fake.fake_run(tmp_path_factory.mktemp("numbers"))
    write_profile(profile_path(run, 0), a_profile(0))
    return run


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_scans.fake_run(tmp_path_factory.mktemp("scans"))


def clipped(figure: Figure) -> list[str]:
    """The texts of a figure that reach over its edges."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    found = []
    for axes in figure.findobj(Axes, include_self=False):
        for label in texts_of(axes):
            box = label.get_window_extent(canvas.get_renderer())
            inside = box.x0 >= -1 and box.x1 <= figure.bbox.width + 1
            if not (inside and box.y0 >= -1 and box.y1 <= figure.bbox.height + 1):
                found.append(label.get_text())
    return found


def texts_of(axes: Axes) -> list[Text]:
    """What is drawn: ticks beyond the limits are not."""
    legend = axes.get_legend()
    found = [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
    found += legend.get_texts() if legend is not None else []
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        places = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
        found += [label for place, label in places if low <= place <= high]
    return [text for text in found if text.get_visible() and text.get_text().strip()]


@pytest.mark.parametrize("kind", in_gate(["run", "scans"], kept=["run"]))
@pytest.mark.usefixtures("undrawn")
def test_no_label_is_clipped_on_the_page_or_in_a_paper(
    kind: str, request: pytest.FixtureRequest
) -> None:
    pictures = page_of(read_run(request.getfixturevalue(kind))).pictures
    assert len(pictures) > 8
    for picture in pictures:
        assert picture.figure is not None
        assert clipped(picture.figure) == [], picture.name
        for_paper(picture.figure)
        assert clipped(picture.figure) == [], f"{picture.name} for a paper"


@pytest.mark.parametrize("count", in_gate([2, 4, 7], kept=[4]))
def test_no_legend_is_clipped(count: int) -> None:
    """Long and short labels, whichever column they come to."""
    labels = [
        "64",
        "64 + batch norm",
        "32",
        "16",
        "32, equal samples",
        "predicting the mean",
        "ridge",
    ]
    for first in range(len(labels)):
        canvas = Canvas("legend")
        for label in (labels * 2)[first : first + count]:
            canvas.axes.plot([0, 1], label=label)
        canvas.legend()
        assert clipped(canvas.figure) == [], (first, count)
        for_paper(canvas.figure)
        assert clipped(canvas.figure) == [], (first, count)


WRITTEN = ("loss-epoch", "scatter-sigma-8", "slice-depth", "timeline")
"""Curves, points, an image and bars: one figure of each kind."""


@pytest.fixture
def one_of_each_kind(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The other figures are composed, and their files are empty."""
    draw = Figure.savefig
    request.getfixturevalue("undrawn")

    def save(figure: Figure, file: IO[bytes], **options: Any) -> None:
        if any(f"/.{name}." in str(file.name) for name in WRITTEN):
            draw(figure, file, **options)

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save)


@pytest.mark.usefixtures("one_of_each_kind")
def test_files_have_a_columns_width_and_letters_that_can_be_read(run: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(run), "--figures", "pdf,png"])
    folder = run / "report-figures"
    shown = (DOCS / "report.md").read_text().partition("--figures pdf,png\n")[2].partition("...")[0]
    assert result.output.startswith(shown.replace("runs/demo", str(run)))
    for name in WRITTEN:
        assert name in result.output
        assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        with Image.open(folder / f"{name}.png") as image:
            assert image.width > 300
    with Image.open(folder / "loss-epoch.png") as image:
        assert image.width == pytest.approx(300 * COLUMN_INCHES, abs=2)
    content = (folder / "loss-epoch.pdf").read_bytes()
    packed = re.findall(rb"stream\r?\n(x.*?)endstream", content, re.S)
    drawn = b"".join(zlib.decompress(stream) for stream in packed)
    sizes = {float(size) for size in re.findall(rb"/F\d+ ([\d.]+) Tf", drawn)}
    assert sizes
    assert min(sizes) > 7


def test_a_figure_has_the_same_colours_on_paper_and_its_text_none_on_a_page() -> None:
    canvas = Canvas("faint")
    (line,) = canvas.axes.plot([1, 2], color=FIRST, alpha=0.5)
    canvas.axes.set_title("told")
    svg = canvas.picture(title="a", alt="b").svg
    assert FIRST in svg
    texts = re.findall(r"<text[^>]*>", svg)
    assert len(texts) > 3
    assert [text for text in texts if "fill" in text] == []
    for_paper(canvas.figure)
    assert to_hex(line.get_color()) == FIRST
    assert line.get_alpha() == 0.5


def test_an_unknown_format_is_named(run: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(run), "--figures", "gif"])
    assert result.exit_code == 2
    assert "choose from pdf, png" in re.sub(r"\s+", " ", result.output)
