"""Numbers of docs/science.md and other pages come from files (tier: no process)."""

from __future__ import annotations

import importlib.util
import json
import re
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from hyperslab.studies.configurations import read_comparison
from hyperslab.studies.report.comparison import comparison_numbers

PAGE = Path(__file__).parents[1] / "docs" / "science.md"


@pytest.fixture(scope="module")
def science() -> ModuleType:
    spec = importlib.util.spec_from_file_location("science", PAGE.with_suffix(".py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interval(value: float) -> dict[str, float]:
    return {"value": value, "lower": 0.8 * value, "upper": 1.3 * value}


def numbers(**ratios: float) -> dict[str, Any]:
    """As `hyperslab report --json` writes them; ratios to the first row."""
    keys = ("mean", "Omega_m", "sigma_8")
    names = list(ratios)
    rows = [
        {
            "name": name,
            "control": name == "ridge",
            "seeds": 3,
            "samples": 8,
            "ratio": {key: interval(0.1 * ratio) for key in keys},
            "ratio_by_seed": {key: [0.1 * ratio, 9.0, 0.0] for key in keys},
            "to_reference": {key: interval(ratio) if i else None for key in keys},
        }
        for i, (name, ratio) in enumerate(ratios.items())
    ]
    return {"parameters": keys[1:], "reference": names[0], "rows": rows}


@pytest.mark.parametrize(
    ("name", "blocks"), [("science.md", 14), ("sc18.md", 2), ("receptive-field.md", 2)]
)
def test_a_page_is_what_its_files_say(science: ModuleType, name: str, blocks: int) -> None:
    assert name in [page.name for page in science.PAGES]
    page = PAGE.with_name(name).read_text()
    assert science.filled(page, science.RESULTS) == page, "run: python docs/science.py"
    assert len(science.BLOCK.findall(page)) >= blocks


def test_no_measured_number_stands_outside_the_blocks(science: ModuleType) -> None:
    rest = science.BLOCK.sub("", PAGE.read_text())
    assert re.findall(r"(?<![\w/])\d+[.,]\d+(?!\w)", rest) == []


def test_blocks_are_written_from_files(science: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(numbers(whole=1.0, parts=12.0, ridge=0.5)))
    blocks = ["errors", "ratios", "bars, parts, ridge"]
    page = "\n\n".join(f"<!-- a.json: {words} -->\nold\n<!-- end -->" for words in blocks)
    page += "\n\n<!-- b.json: errors -->\nold\n<!-- end -->\nprose\n"
    new = science.filled(page, tmp_path)
    assert science.filled(new, tmp_path) == new
    assert "old" not in new
    assert new.endswith("<!-- b.json: errors -->\nNot measured yet.\n<!-- end -->\nprose\n")
    assert "| parts | 3 | 1.2 (0.96 to 1.56) |" in new
    assert "| ridge | control | 0.05 (0.04 to 0.065) |" in new
    assert "| parts | 12 (9.6 to 15.6) | 12 (9.6 to 15.6) |" in new
    assert "lower end above 3 | 12 (9.6 to 15.6) | met |" in new
    assert "whole over ridge, Omega_m: at most 1.5 | 2 | **missed** |" in new


def by_window() -> dict[str, Any]:
    """As `benchmarks/receptive_field.py` records them."""
    found = numbers(**{"1": 8.0, "33": 1.0})
    for row in found["rows"]:
        row["weights"] = 1000 * int(row["name"])
    return found


def test_receptive_fields_are_named_in_voxels_and_in_length(science: ModuleType) -> None:
    lines = science.windows(by_window(), "8")
    cells = "0.8 (0.64 to 1.04)"
    assert lines[2] == f"| 1 | 8 | 1,000 | 3 | {cells} | {cells} | {cells} |"
    assert lines[3].startswith("| 33 | 264 | 33,000 | 3 | 0.1 ")


def test_the_figure_of_receptive_fields_has_every_parameter(
    science: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda *a, **k: (drawn.append(a[0]), save(*a, **k)))
    (tmp_path / "a.json").write_text(json.dumps(by_window()))
    science.draw_windows(tmp_path / "a.json", tmp_path / "a.png")
    (axes,) = drawn[0].axes
    curves = {one.get_label(): one[0].get_ydata() for one in axes.containers}
    assert list(curves) == ["Omega_m", "sigma_8"]
    assert curves["sigma_8"] == pytest.approx([0.8, 0.1])
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.width > 500


def of_heads() -> dict[str, Any]:
    """As `benchmarks/head.py` records them."""
    keys = ("Omega_m", "sigma_8", "n_s", "H_0", "mean")
    ridge, network = (dict.fromkeys(keys, one) for one in (0.4, 0.3))

    def row(count: int, **changed: float) -> dict[str, Any]:
        over = {"network over mean": network, "ridge over mean": ridge}
        over["network over ridge"] = dict.fromkeys(keys, 0.75) | changed
        over["network over best ridge"] = dict.fromkeys(keys, 1.0)
        compared = {
            what: {key: interval(value) for key, value in of.items()} for what, of in over.items()
        }
        return {"universes": count, "seeds": 3, "test": compared, "validation": compared}

    facts = {"coverage_68": 0.7, "coverage_95": 0.9}
    facts |= {f"{key}_interval": [value - 0.1, value + 0.05] for key, value in facts.items()}
    said = {
        "parameters": dict.fromkeys(keys[:4], facts),
        "joint": facts,
        "drawn": {key: [0.4, 0.9] for key in (*keys[:4], "together")},
    }
    names = ("ridge", "network, as it says", "network")
    return {
        "splits": {"test": 100},
        "rows": [row(128), row(4096, sigma_8=0.8, n_s=1.1)],
        "levers": [{"name": "nothing", **row(4096)}],
        "coverage": {
            "levels": [0.5, 0.9],
            "factor": dict.fromkeys(keys[:4], 1.1),
            **dict.fromkeys(names, said),
        },
    }


def test_heads_are_held_to_their_bars(science: ModuleType) -> None:
    lines = science.goals(of_heads())
    words = "over ridge, Omega_m: at most 0.9, upper end below 1"
    best = "1 (0.8 to 1.3)"
    assert lines[2] == f"| {words} | 0.75 (0.6 to 0.975) | met | {best} |"
    assert lines[3].endswith(f"| 0.8 (0.64 to 1.04) | **missed** | {best} |")  # its upper end
    assert lines[4].endswith(f"| 1.1 (0.88 to 1.43) | **missed** | {best} |")
    words = "over predicting the mean, Omega_m: below 0.8"
    assert lines[6] == f"| {words} | 0.3 (0.24 to 0.39) | met |  |"
    lines = science.learning(of_heads())
    assert len(lines) == 2 + 2 * 4
    assert lines[6].startswith("| 4,096 | network over mean | 0.3 (0.24 to 0.39) |")
    lines = science.levers(of_heads())
    assert lines[2].startswith("| nothing | 0.750 | 0.75 (0.6 to 0.975) |")
    assert science.coverage(of_heads())[6].startswith("| network | 68 % | 70 % (60 to 75) |")


def test_figures_of_heads_have_network_and_ridge(
    science: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda *a, **k: (drawn.append(a[0]), save(*a, **k)))
    (tmp_path / "a.json").write_text(json.dumps(of_heads()))
    science.draw_learning(tmp_path / "a.json", tmp_path / "a.png")
    science.draw_coverage(tmp_path / "a.json", tmp_path / "b.png")
    learning, coverage = drawn
    assert [axes.get_title() for axes in learning.axes] == ["Omega_m", "sigma_8", "n_s", "H_0"]
    curves = {one.get_label(): one[0].get_ydata() for one in learning.axes[0].containers}
    assert {name: list(values) for name, values in curves.items()} == {
        "ridge": [0.4, 0.4],
        "network": [0.3, 0.3],
    }
    for axes in coverage.axes:
        assert len(axes.lines) == 5 + 1
        assert list(axes.lines[0].get_ydata()) == pytest.approx([-0.1, 0])


def of_subvolumes() -> dict[str, Any]:
    """As `benchmarks/subvolumes.py` records them."""
    keys = ("Omega_m", "sigma_8", "n_s", "H_0")
    made = ("", ", averaged", ", averaged and recalibrated")
    networks = ["4", *(f"2{one}" for one in made), "2, equal samples"]
    networks.append("statistics of 2, averaged")
    ridges = ["ridge, 4", *(f"ridge, 2{one}" for one in made)]

    def row(name: str, value: float, *, control: bool) -> dict[str, Any]:
        found = dict.fromkeys((*keys, "mean"), interval(value))
        whole = name in ("4", "ridge, 4")
        return {
            "name": name,
            "width": 4 if "4" in name else 2,
            "control": control,
            "ratio": found,
            "to_reference": dict.fromkeys(found) if whole else found,
            "residuals": {key: [-2 * value, -value, 0.0, value, 2 * value] for key in keys},
        }

    facts = {"samples": 4096, "batch": 64, "steps": 2000}
    tried = [{"rate": rate, "validation": 1.0} for rate in (3e-4, 1e-3, 3e-3)]
    return {
        "parameters": keys,
        "configurations": [
            {"name": "4", **facts, "rates": tried, "rate": 1e-3, "inside": True},
            {"name": "2", **facts, "rates": tried, "rate": 3e-3, "inside": False},
        ],
        "rows": [
            row(name, 0.1 * (1 + place), control=control)
            for control, kind in ((False, networks), (True, ridges))
            for place, name in enumerate(kind)
        ],
    }


def test_budgets_are_compared(science: ModuleType) -> None:
    untimed = {"pieces": 2, "timed": 0, "unforeseen": 0, "expected_s": 0.0, "taken_s": 0.0}
    heads = {"pieces": 9, "timed": 3, "unforeseen": 1, "expected_s": 60.0, "taken_s": 95.2}
    lines = {"pieces": 1, "timed": 1, "unforeseen": 0, "expected_s": 5.0, "taken_s": 4.0}
    found = science.budget({"budget": {"old": untimed, "heads": heads, "lines": lines}})
    assert found[2:] == [
        "| heads | 3 | 1 | 1 min 0 s | 1 min 35 s |",
        "| lines | 1 | 0 | 5.00 s | 4.00 s |",
        "| all | 4 | 1 | 1 min 5 s | 1 min 39 s |",
    ]


def test_parts_stand_beside_those_of_other_methods(science: ModuleType) -> None:
    kept = json.loads((science.RESULTS / "science-figure9-batch-norm.json").read_text())
    lines = science.parts(of_subvolumes(), "with batch norm", "science-figure9-batch-norm.json")
    assert lines[2].startswith("| 2 | 0.2 (0.16 to 0.26) | 0.2 ")
    assert [line.split(" | ")[0] for line in lines[6:9]] == [
        "| statistics of 2, averaged",
        "| ridge, 2",
        "| ridge, 2, averaged",
    ]
    parts = [row["name"] for row in kept["rows"][1:] if not row["control"]]
    assert [line.split(" | ")[0][2:] for line in lines[10:]] == [
        f"with batch norm: {name}" for name in parts
    ]
    lines = science.rates(of_subvolumes())
    assert lines[2:] == [
        "| 4 | 4,096 | 64 | 2,000 | 3, 3.0e-04 to 3.0e-03 | 1.0e-03 |",
        "| 2 | 4,096 | 64 | 2,000 | 3, 3.0e-04 to 3.0e-03 | 3.0e-03, **at the end** |",
    ]


def test_figures_of_parts_have_every_method(
    science: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda *a, **k: (drawn.append(a[0]), save(*a, **k)))
    (tmp_path / "a.json").write_text(json.dumps(of_subvolumes()))
    science.draw_parts(tmp_path / "a.json", tmp_path / "a.png")
    science.draw_residuals(tmp_path / "a.json", tmp_path / "b.png")
    parts, residuals = drawn
    assert [axes.get_title() for axes in parts.axes] == ["Omega_m", "sigma_8", "n_s", "H_0"]
    curves = {one.get_label(): one[0].get_ydata() for one in parts.axes[0].containers}
    assert {name: pytest.approx(list(values)) for name, values in curves.items()} == {
        "network, one sub-volume": [0.2, 0.1],
        "network, averaged and recalibrated": [0.4, 0.1],
        "network, statistics averaged": [0.6, 0.1],
        "ridge, one sub-volume": [0.2, 0.1],
        "ridge, averaged and recalibrated": [0.4, 0.1],
    }
    names = [label.get_text() for label in residuals.axes[0].get_yticklabels()]
    assert "2, averaged" in names
    assert "2, equal samples" not in names
    assert names[-1] == "ridge, 4"


def test_posteriors_of_network_and_ridge_are_in_table_and_figure(
    science: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda *a, **k: (drawn.append(a[0]), save(*a, **k)))
    of = of_heads()["coverage"]["ridge"]
    said = {name: {"test": of} for name in ("network", "ridge")}
    seeds = [
        {"seed": seed, **{name: dict.fromkeys((*of["parameters"], "together"), p) for name in said}}
        for seed, p in ((0, 0.25), (3, 0.75))
    ]
    record = {"levels": [0.5, 0.9], "splits": {"test": 100}, "summaries": said, "seeds": seeds}
    lines = science.posterior(record)
    assert len(lines) == 2 + 2 * 4
    assert lines[2].startswith("| ridge | in intervals of 68 % | 70 % (60 to 75) |")
    assert lines[8:] == [
        f"| network | probability of ranks so uneven, seed {seed} |" + f" {p} |" * 5
        for seed, p in ((0, "0.25"), (3, "0.75"))
    ]
    (tmp_path / "a.json").write_text(json.dumps(record))
    science.draw_coverage(tmp_path / "a.json", tmp_path / "a.png")
    assert [axes.get_title() for axes in drawn[0].axes] == ["network", "ridge"]
    assert list(drawn[0].axes[1].lines[0].get_ydata()) == pytest.approx([-0.1, 0])


def test_the_records_in_the_repository_give_the_numbers(
    science: ModuleType, tmp_path: Path
) -> None:
    """As `make science` does, but for the report's page and its figures."""
    with zipfile.ZipFile(science.RESULTS / "science-figure9-runs.zip") as records:
        records.extractall(tmp_path)
    runs = [tmp_path / name for name in ("figure9", "figure9-equal-samples")]
    found = comparison_numbers(read_comparison(runs, [("ridge", tmp_path / "ridge" / "whole")]))
    kept = json.loads((science.RESULTS / "science-figure9.json").read_text())
    assert (found["parameters"], found["reference"]) == (kept["parameters"], kept["reference"])
    for row, other in zip(found["rows"], kept["rows"], strict=True):
        assert row["name"] == other["name"]
        for key in ("ratio", "to_reference"):
            for name, value in row[key].items():
                assert value == (None if value is None else pytest.approx(other[key][name])), name


def test_pictures_of_a_report_become_those_of_the_page(science: ModuleType, tmp_path: Path) -> None:
    for parts in science.PICTURES.values():
        for place, part in enumerate(parts):
            Image.new("RGB", (30, 20), ("red", "blue")[place]).save(tmp_path / part)
    science.make_pictures(tmp_path, tmp_path)
    with Image.open(tmp_path / "science-figure10.png") as picture:
        assert picture.size == (30, 40)
        colours = [picture.convert("RGB").getpixel((15, y)) for y in (10, 30)]
    assert colours == [(255, 0, 0), (0, 0, 255)]
    page = PAGE.read_text()
    assert all(f"images/{name})" in page for name in science.PICTURES)
