"""What assistants read says what the code says (tier: no process)."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import hyperslab as hs
from hyperslab.cli import COMMANDS
from hyperslab.recipe.schema import Recipe

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "llms.txt"


def test_it_is_up_to_date() -> None:
    now = runpy.run_path(str(DOCS / "llms.py"))["text"]()
    assert PAGE.read_text() == now, "run python docs/llms.py"


def test_it_has_every_name_command_and_key() -> None:
    text = PAGE.read_text()
    assert set(re.findall(r"^- `hs\.(\w+)", text, re.MULTILINE)) == set(hs.__all__)
    assert set(re.findall(r"^- `hyperslab (\w+)`", text, re.MULTILINE)) == set(COMMANDS)
    keys = set(Recipe.model_fields) - {"handed_in"}
    assert keys <= set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))


def test_its_pages_are_there() -> None:
    links = re.findall(r"\]\(([\w/-]+\.md)\)", PAGE.read_text())
    assert len(links) > 20
    assert all((DOCS / link).is_file() for link in links)
