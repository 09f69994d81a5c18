"""Pages on runs whose files were written to do harm: nothing of it runs (tier: no process)."""

from __future__ import annotations

import json
import shutil
import unicodedata
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml

from hyperslab.errors import DataError
from hyperslab.studies.report import write_comparison, write_report
from hyperslab.studies.report.canvas import Canvas
from hyperslab.train.profile import profile_path, write_profile
from tests.selection import in_gate
from tests.studies.report import fake, fake_scans
from tests.studies.report.compared import write_run
from tests.studies.report.test_timelines import a_profile
from tests.train.scans import CLASSES

NASTY = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style></svg></title><script src='//x'></script>",
    "{{ 7 * 7 }}{% include 'style.css' %}",
    "a\x1b[2K\x00\u202e\u2028z",
    r"$\frac{$ \$",
    "</code></pre><svg onload=alert(1)>",
)
DRAWN = (NASTY[0], *NASTY[4:6])
"""What XML, fonts and formulas in figures have to take; the others are in the words of pages."""

ALLOWED = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "header",
        "main",
        "footer",
        "nav",
        "section",
    ),
    *("p", "h1", "h2", "h3", "dl", "div", "dt", "dd", "small", "a", "figure", "figcaption", "span"),
    *("table", "caption", "thead", "tbody", "tr", "th", "td", "ul", "li", "details", "summary"),
    *("pre", "code", "br", "svg", "g", "path", "use", "defs", "clippath", "rect", "text", "image"),
}


class Tags(HTMLParser):
    """Which elements and attributes a browser would make of a page, and its texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def check(page: str, *shown: str) -> None:
    tags = Tags(page)
    assert tags.tags <= ALLOWED, tags.tags - ALLOWED
    assert not [name for name in tags.attributes if name.startswith("on")]
    assert not [c for c in set(page) - {"\n"} if unicodedata.category(c) in ("Cc", "Cf", "Cs")]
    for text in shown:
        assert text in tags.text, text
    assert page.count("<style>") == page.count("</style>") == 1


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake.fake_run(tmp_path_factory.mktemp("numbers"))


@pytest.mark.parametrize("nasty", NASTY)
def test_a_run_whose_every_name_is_nasty(
    request: pytest.FixtureRequest, finished: Path, tmp_path: Path, nasty: str
) -> None:
    if nasty != NASTY[0]:
        request.getfixturevalue("undrawn")
    run = Path(shutil.copytree(finished, tmp_path / nasty.replace("/", "|").replace("\0", "")))
    evaluation = run / "evaluation"
    metrics = json.loads((evaluation / "metrics.json").read_text())
    metrics["parameters"] = {
        nasty if name == "sigma_8" else name: row for name, row in metrics["parameters"].items()
    }
    metrics |= dict.fromkeys(("samples", "split", "checkpoint", "device", "date"), nasty)
    metrics["versions"] = {nasty: nasty}
    (evaluation / "metrics.json").write_text(json.dumps(metrics))
    head, *rows = (evaluation / "predictions.csv").read_text().splitlines()
    quoted = [f'"{cell}"'.replace("sigma_8", nasty.replace('"', '""')) for cell in head.split(",")]
    (evaluation / "predictions.csv").write_bytes("\n".join([",".join(quoted), *rows, ""]).encode())
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    text = nasty.replace("\0", "")  # with it no text of YAML is read
    recipe["model"] |= {"name": text, "variant": text}
    recipe |= dict.fromkeys(("loss", "device", "precision", text), text)
    recipe["data"]["path"] = text
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    profile = a_profile(0)
    layers = [layer.model_copy(update={"layer": nasty}) for layer in profile.layers]
    write_profile(
        profile_path(run, 0), profile.model_copy(update={"layers": layers, "ended": nasty})
    )
    page = write_report(run).read_text()
    check(page, *[nasty] * nasty.isprintable())


@pytest.mark.parametrize("nasty", DRAWN)
def test_a_figure_whose_every_word_is_nasty(nasty: str) -> None:
    canvas = Canvas(nasty)
    canvas.axes.plot([1, 2], label=nasty)
    canvas.axes.set(xlabel=nasty, ylabel=nasty, title=nasty)
    canvas.axes.text(0, 1, nasty)
    canvas.legend()
    svg = canvas.picture(title=nasty, alt=nasty).svg
    check(f"<style></style>{svg}", *[nasty] * nasty.isprintable())
    ElementTree.fromstring(svg)


@pytest.mark.parametrize("nasty", NASTY[:2] + NASTY[4:6])
@pytest.mark.usefixtures("undrawn")
def test_classes_and_samples_with_nasty_names(tmp_path: Path, nasty: str) -> None:
    run = fake_scans.fake_run(tmp_path, epochs=2)
    path = run / "evaluation" / "metrics.json"
    metrics = json.loads(path.read_text())
    names = [*CLASSES[:2], nasty]
    metrics["classes"] = dict(zip(names, metrics["classes"].values(), strict=True))
    path.write_text(json.dumps(metrics))
    text = (run / "epochs.csv").read_text()
    cell = '"validation_dice_{}"'.format(nasty.replace('"', '""'))
    (run / "epochs.csv").write_text(text.replace(f"validation_dice_{CLASSES[2]}", cell))
    page = write_report(run).read_text()
    check(page, *[nasty] * nasty.isprintable())
    with np.load(run / "evaluation" / "masks.npz") as file:
        np.savez(run / "evaluation" / "masks.npz", samples=[nasty] * 2, masks=file["masks"])
    check(write_report(run).read_text(), "No scan of this run can be shown")


@pytest.mark.parametrize("nasty", in_gate(NASTY[:2] + NASTY[4:6], kept=NASTY[:1]))
@pytest.mark.usefixtures("undrawn")
def test_a_comparison_of_runs_with_nasty_recipes(tmp_path: Path, nasty: str) -> None:
    runs = [write_run(tmp_path / name, seed=0, noise=0.2) for name in "ab"]
    recipe = json.loads((runs[1] / "recipe.yaml").read_text())
    recipe["model"]["variant"] = nasty
    (runs[1] / "recipe.yaml").write_text(json.dumps(recipe))
    check(write_comparison(runs).read_text(), *[nasty] * nasty.isprintable())
    check(write_report(*runs).read_text())


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("evaluation/metrics.json", {"parameters": {"n_s": {"ratio": "<script>"}}}),
        ("evaluation/metrics.json", {"parameters": {"n_s": {"mse": [1]}}}),
        ("evaluation/metrics.json", {"classes": {"a": {"dice": {}}}, "confusion": [[1]]}),
        ("evaluation/metrics.json", {"classes": {"a": {"dice": 1}}, "confusion": [["x"]]}),
        ("evaluation/metrics.json", {"classes": {"a": {}, "b": {}}, "confusion": [[1], [1, 2]]}),
        ("evaluation/metrics.json", {"parameters": {}, "versions": [1]}),
        ("recipe.yaml", {"grid": {"depth": "x"}}),
        ("recipe.yaml", {"grid": {"depth": 0}}),
        ("recipe.yaml", {"epochs": "many"}),
        ("recipe.yaml", {"grid": 3, "data": [1], "model": "x", "loss": {"target": "a"}}),
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_values_of_other_kinds_are_named_or_shown_as_they_are(
    finished: Path, tmp_path: Path, file: str, content: object
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    (run / file).write_text(json.dumps(content))
    try:
        page = write_report(run).read_text()
    except DataError as error:
        page = ""
        named = str(run / file) in str(error)
    assert page or named
    check(page or "<style></style>")
