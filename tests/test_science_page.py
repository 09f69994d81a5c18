"""Numbers of docs/science.md and sc18.md come from files (tier: no process)."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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


@pytest.mark.parametrize(("name", "blocks"), [("science.md", 8), ("sc18.md", 2)])
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
