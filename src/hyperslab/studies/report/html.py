"""Renders a page: plain values, chapters of blocks, become HTML by the templates beside this file.

The blocks hold no HTML: texts come from a run's files as they are, and everything is escaped by
Jinja2, the SVG of our own figures excepted. The template of a block has the name of its class.
Control characters are written out: what stands in a run's files can neither run nor disturb how the
page is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hyperslab.errors import printable
from hyperslab.studies.report.canvas import Picture
from hyperslab.studies.table import Table


class Heading(NamedTuple):
    """Puts a heading inside a chapter."""

    text: str


class Notice(NamedTuple):
    """Says that something is missing; ``command`` makes it."""

    text: str
    command: str = ""


class FactList(NamedTuple):
    """Lists names and their values."""

    items: Sequence[tuple[str, str]]


class Legend(NamedTuple):
    """Explains colours."""

    items: Sequence[tuple[str, str]]


class Details(NamedTuple):
    """Holds text that opens on demand."""

    summary: str
    text: str


class Figures(NamedTuple):
    """Puts figures side by side, as many as fit."""

    pictures: Sequence[Picture]
    size: Literal["tiny", "small", "medium", "large", "wide"] = "large"


# A string is a paragraph.
Block = str | Heading | Notice | FactList | Legend | Details | Figures | Table


class Chapter(NamedTuple):
    """Holds one chapter of the page."""

    key: str
    title: str
    blocks: Sequence[Block]


class Tile(NamedTuple):
    """Shows a large number at the top of the page."""

    what: str
    value: str
    remark: str


@dataclass(frozen=True, slots=True)
class Page:
    """Holds the whole document."""

    title: str
    lede: str
    chapters: Sequence[Chapter]
    made: str
    tiles: Sequence[Tile] = ()
    kind: str = "report of a run"

    @property
    def pictures(self) -> list[Picture]:
        blocks = [block for chapter in self.chapters for block in chapter.blocks]
        figures = [block.pictures for block in blocks if isinstance(block, Figures)]
        return [picture for pictures in figures for picture in pictures]


def render_page(page: Page) -> str:
    """Renders the whole document."""
    environment = Environment(
        loader=PackageLoader("hyperslab.studies.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_without_control_characters,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(page=page)


def _without_control_characters(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return value
