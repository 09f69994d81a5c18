"""The blocks of code of a page, and what the page says of how they are run.

`<!-- run: ... -->` in a line of its own is read by tests only. Before a block it is of that block;
a page of ```pycon sessions has one of its own, for all of them.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(
    r"(?:^[ ]*<!-- run: (?P<run>.+?) -->\n)?^(?P<indent>[ ]*)```(?P<language>\w+).*?\n"
    r"(?P<code>.*?)^(?P=indent)```",
    re.M | re.S,
)
DIRECTIVE = re.compile(r"<!-- run: (.+?) -->")


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    run: dict[str, str]
    line: int


def words(text: str | None) -> dict[str, str]:
    """`ranks=2 as=torch` by name; a word alone is there, and empty."""
    pairs = (word.partition("=") for word in (text or "").split())
    return {name: value for name, _, value in pairs}


def blocks_of(page: str) -> list[Block]:
    return [
        Block(
            match["language"],
            textwrap.dedent(match["code"]),
            words(match["run"]),
            page.count("\n", 0, match.start()) + 1,
        )
        for match in BLOCK.finditer(page)
    ]


def directive_of(page: str) -> dict[str, str]:
    """The first of a page."""
    match = DIRECTIVE.search(page)
    return words(match[1] if match else None)
