"""The page of a run: complete, valid, self-contained, honest (tier: no process)."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hyperslab.cli import app
from hyperslab.errors import DataError
from hyperslab.studies.report import page_of, write_report
from hyperslab.studies.report.canvas import FIRST, INK, MUTED, SERIES
from hyperslab.studies.report.html import render_page
from hyperslab.studies.run_folder import read_run
from tests.selection import in_gate
from tests.studies.report.fake import NAMES, fake_run

TIMES = "\N{MULTIPLICATION SIGN}"
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Outline(HTMLParser):
    """Checks that tags are balanced; collects headings, ids, resources and alternative texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.alts: list[str] = []
        self.headings: list[str] = []
        self.references: set[str] = set(re.findall(r"url\(#([^)]*)\)", page))
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.look(tag, {k: v or "" for k, v in attrs})

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.look(tag, {k: v or "" for k, v in attrs})

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)

    def look(self, tag: str, attrs: dict[str, str]) -> None:
        self.ids += [attrs["id"]] if "id" in attrs else []
        if tag == "a":
            self.links.append(attrs["href"])
        elif tag == "use":
            self.references.add(attrs["href"].removeprefix("#"))
        else:
            self.loaded += [attrs[k] for k in ("src", "href", "xlink:href") if k in attrs]
        if tag == "svg":
            self.alts.append(attrs["aria-label"])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_run(tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="module")
def page(finished: Path) -> str:
    return write_report(finished).read_text()


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_page_is_balanced_and_ids_are_unique(page: str) -> None:
    outline = Outline(page)
    assert outline.open == []
    assert len(set(outline.ids)) == len(outline.ids) > 10
    assert outline.references <= set(outline.ids)
    assert {link.removeprefix("#") for link in outline.links} <= set(outline.ids)


def test_page_loads_nothing(page: str) -> None:
    outline = Outline(page)
    assert outline.loaded, "the slices are embedded pictures"
    assert all(url.startswith("data:image/png;base64,") for url in outline.loaded)
    assert not re.search(r"https?://|<script|@import|url\((?!#)", page)


def test_page_has_every_figure_with_an_alternative_text(page: str) -> None:
    outline = Outline(page)
    for title in ("Loss by epoch", "Loss by step", "Throughput", "Memory", "Waiting for data",
                  "Across depth", "Across height", "Across width", "A cut, enlarged"):  # fmt: skip
        assert outline.headings.count(title) == 1
    for symbol in ("Ωₘ", "σ₈", "nₛ", "H₀"):
        assert outline.headings.count(symbol) == 2, "true against predicted, and residuals"
    assert page.count("<figure>") == len(outline.alts) == 9 + 2 * 4
    assert all(len(alt) > 20 for alt in outline.alts)


def test_page_tells_every_parameter_also_the_bad_ones(page: str, finished: Path) -> None:
    errors = read_run(finished).errors
    assert set(errors) == set(NAMES)
    assert max(row["ratio"] or 0 for row in errors.values()) > 1
    for row in errors.values():
        assert f"{row['ratio']:.3g}" in page
    assert page.count('<th scope="row">') == 2 * len(NAMES)


def luminance(colour: str) -> float:
    """That of ``#rrggbb``, by WCAG 2."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    parts = [
        v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (red, green, blue)
    ]
    return float(np.dot(parts, (0.2126, 0.7152, 0.0722)))


def test_figures_can_be_seen_on_a_light_and_on_a_dark_page(page: str) -> None:
    drawn = "".join(re.findall(r"<svg.*?</svg>", page, re.S))
    drawn = re.sub(r"data:image[^\"]*", "", drawn)
    used = set(re.findall(r"#[0-9a-fA-F]{6}\b", drawn)) - {"#7fd4ff", "#010101"}  # on the slices
    assert {FIRST, INK} < used <= {*SERIES, MUTED, INK}
    papers = re.findall(r"--paper: (#[0-9a-f]+);", page)
    assert len(papers) == 3, "light, dark, print"
    for paper in papers:
        full = paper if len(paper) == 7 else "#" + "".join(2 * digit for digit in paper[1:])
        for colour in (*SERIES, MUTED):
            darker, lighter = sorted((luminance(full), luminance(colour)))
            assert (lighter + 0.05) / (darker + 0.05) >= 3, f"{colour} on {paper}"


@pytest.mark.usefixtures("undrawn")
def test_names_from_a_run_are_escaped(run: Path) -> None:
    for file in ("evaluation/predictions.csv", "evaluation/metrics.json"):
        text = (run / file).read_text()
        (run / file).write_text(text.replace("sigma_8", "<b>&amp;"))
    outline = Outline(write_report(run).read_text())
    assert outline.headings.count("<b>&amp;") == 2


def test_the_slices_show_the_cut_and_the_halo(page: str) -> None:
    assert "cut into 2 x 1 x 1 boxes" in page.replace(TIMES, "x")
    assert "a halo of 1 voxel" in page
    assert "Plane 9 of 16, not cut here." in page


@pytest.mark.usefixtures("undrawn")
def test_not_evaluated(tmp_path: Path) -> None:
    run = fake_run(tmp_path, evaluated=False)
    page = write_report(run).read_text()
    assert f"hyperslab evaluate {run}" in page
    assert Outline(page).open == []
    assert "Loss by epoch" in page


@pytest.mark.usefixtures("undrawn")
def test_not_finished(tmp_path: Path) -> None:
    page = write_report(fake_run(tmp_path, epochs=2, wanted=30, evaluated=False)).read_text()
    assert "2 of 30 epochs are done" in page
    assert "--resume" in page


@pytest.mark.usefixtures("undrawn")
def test_one_epoch_and_one_step(tmp_path: Path) -> None:
    run = fake_run(tmp_path, epochs=1, wanted=1)
    (run / "steps.csv").write_text(
        "\n".join((run / "steps.csv").read_text().split("\n")[:2]) + "\n"
    )
    outline = Outline(write_report(run).read_text())
    assert "Loss by epoch" in outline.headings
    assert "Throughput" in outline.headings


def test_nothing_but_a_recipe(run: Path) -> None:
    for file in ("steps.csv", "epochs.csv"):
        (run / file).unlink()
    shutil.rmtree(run / "evaluation")
    page = write_report(run).read_text()
    assert Outline(page).open == []
    assert "0 of 30 epochs are done" in page


@pytest.mark.usefixtures("undrawn")
def test_missing_validation_and_metrics_that_are_not_defined(run: Path) -> None:
    epochs = (run / "epochs.csv").read_text().splitlines()
    blank = [",".join([*(row.split(",")[:2]), "", "", row.split(",")[4]]) for row in epochs[1:]]
    (run / "epochs.csv").write_text("\n".join([epochs[0], *blank]) + "\n")
    text = (run / "evaluation" / "metrics.json").read_text()
    (run / "evaluation" / "metrics.json").write_text(
        re.sub(r'"(ratio|r2|correlation|relative_error)": [^,}]*', r'"\1": null', text)
    )
    page = write_report(run).read_text()
    assert "no validation loss" in page
    assert Outline(page).open == []


@pytest.mark.parametrize("value", in_gate(["1e999", "-inf", "nan"], kept=["1e999"]))
def test_numbers_without_end_are_not_drawn(tmp_path: Path, value: str) -> None:
    run = fake_run(tmp_path, epochs=3, wanted=3)
    for file in ("steps.csv", "epochs.csv", "evaluation/predictions.csv"):
        head, first, *rows = (run / file).read_text().splitlines()
        cells = first.split(",")
        changed = ",".join([*cells[:2], *[value] * (len(cells) - 2)])
        (run / file).write_text("\n".join([head, changed, *rows, ""]))
    assert Outline(write_report(run).read_text()).open == []


@pytest.mark.usefixtures("undrawn")
def test_universes_that_moved_away(run: Path) -> None:
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace("/universes", "/gone"))
    page = write_report(run).read_text()
    assert "No universe of this run can be shown" in page
    assert "/gone" in page


@pytest.mark.usefixtures("undrawn")
def test_a_grid_with_three_cut_axes_draws_them_all(run: Path) -> None:
    recipe = (run / "recipe.yaml").read_text()
    grid = "depth: 2, height: 3, width: 4"
    (run / "recipe.yaml").write_text(recipe.replace("depth: 2, height: 1, width: 1", grid))
    page = render_page(page_of(read_run(run))).replace(TIMES, "x")
    assert "cut into 12 shards: 3 along height x 4 along width" in page
    assert "cut into 6 shards: 2 along depth x 3 along height" in page


def test_resumed_steps_count_once_and_a_row_being_written_does_not(run: Path) -> None:
    text = (run / "steps.csv").read_text()
    (run / "steps.csv").write_text(text + "300,29,0.5,1,1,0,8,1\n301,30,0.")
    steps = read_run(run).steps
    assert steps["step"].tolist() == list(range(1, 301))
    assert steps["loss"][-1] == 0.5


@pytest.mark.usefixtures("undrawn")
def test_many_points_are_thinned(run: Path) -> None:
    head, *rows = (run / "evaluation" / "predictions.csv").read_text().splitlines()
    (run / "evaluation" / "predictions.csv").write_text("\n".join([head, *rows * 40]) + "\n")
    page = page_of(read_run(run))
    assert "1000 of 2560 samples are drawn" in render_page(page)
    (scatter,) = (one.figure for one in page.pictures if one.name == "scatter-sigma-8")
    assert scatter is not None
    assert [
        len(points.get_xdata()) for points in scatter.axes[0].lines if points.get_marker() == "o"
    ] == [1000]


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("steps.csv", "step,epoch,loss\n1,0,0.5\n", "no column step_seconds"),
        ("epochs.csv", "epoch,train_loss,validation_loss,seconds\n0,x,1,1\n", "line 2.*'x'"),
        ("epochs.csv", "epoch,train_loss,validation_loss,seconds\n0,1\n", "line 2: 2 cells"),
        ("steps.csv", b"\x89HDF\xff\xfe\x00\n", "cannot be read as CSV"),
        ("steps.csv", "", "no column"),
        ("evaluation/metrics.json", "{", "cannot be read as JSON"),
        ("evaluation/metrics.json", "[]", "no errors of parameters"),
        ("evaluation/predictions.csv", "sample,true_n_s\na,1\n", "no column true_Omega_m"),
        ("recipe.yaml", "a: [", "is not valid YAML"),
        ("recipe.yaml", "3", "so it is not a recipe"),
    ],
)
def test_broken_files_are_named(run: Path, file: str, content: str | bytes, says: str) -> None:
    (run / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=f"(?s){re.escape(str(run / file))}.*{says}"):
        write_report(run)
    assert not list(run.glob("*.tmp"))


def test_not_the_folder_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not the folder of a run"):
        write_report(tmp_path)


@pytest.mark.usefixtures("undrawn")
def test_a_folder_that_cannot_be_written(run: Path) -> None:
    (run / "report.html").unlink(missing_ok=True)  # another test has made it, or not yet
    (run / "report.html").mkdir()
    with pytest.raises(DataError, match=r"report\.html cannot be written"):
        write_report(run)
    assert not list(run.glob("*.tmp"))


def test_reading_a_run_gives_the_numbers_in_its_files(finished: Path) -> None:
    run = read_run(finished)
    table = np.loadtxt(finished / "epochs.csv", delimiter=",", skiprows=1)
    np.testing.assert_array_equal(run.epochs["validation_loss"], table[:, 2])
    assert run.grid == {"data": 1, "depth": 2, "height": 1, "width": 1}
    assert len(run.predictions["true_n_s"]) == 64


@pytest.mark.usefixtures("undrawn")
def test_the_command_says_where_the_page_is(run: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(run)])
    assert result.output == f"{run / 'report.html'}\n"
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")
