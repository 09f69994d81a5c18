"""What a page is made of, as plain values: chapters of blocks, each with its template.

Nothing here is HTML: texts come from a run's files as they are, and templates escape all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from hyperslab.report.figures.svg import Picture

Size = Literal["tiny", "small", "medium", "large", "wide"]


@dataclass(frozen=True, slots=True)
class TableCell:
    """A cell of a table: a text, a quiet remark beside or ``below`` it, or a bar behind it.

    A ``share`` of 1 fills the cell with the bar.
    """

    text: str
    remark: str = ""
    below: str = ""
    share: float | None = None

    @property
    def percent(self) -> str:
        """How wide the bar is."""
        return f"{100 * min(max(self.share or 0.0, 0.0), 1.0):.1f}"


TableRow = Sequence[TableCell | str]


@dataclass(frozen=True, slots=True)
class Paragraph:
    template: ClassVar = "paragraph.html"
    text: str


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading inside a chapter."""

    template: ClassVar = "heading.html"
    text: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Something is missing; ``command`` makes it."""

    template: ClassVar = "notice.html"
    text: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class FactList:
    """Names and their values."""

    template: ClassVar = "facts.html"
    items: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Legend:
    """Colours and what they mean."""

    template: ClassVar = "legend.html"
    items: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Details:
    """Text that opens on demand."""

    template: ClassVar = "details.html"
    summary: str
    text: str


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures side by side, as many as fit."""

    template: ClassVar = "figures.html"
    pictures: Sequence[Picture]
    size: Size = "large"


@dataclass(frozen=True, slots=True)
class CellTable:
    """A table whose first column names the row."""

    template: ClassVar = "table.html"
    caption: str
    head: Sequence[str]
    rows: Sequence[TableRow]


Block = Paragraph | Heading | Notice | FactList | Legend | Details | Figures | CellTable


@dataclass(frozen=True, slots=True)
class Chapter:
    """One chapter of the page."""

    key: str
    title: str
    blocks: Sequence[Block]

    @property
    def pictures(self) -> list[Picture]:
        """All of its figures, in their order."""
        found = [block.pictures for block in self.blocks if isinstance(block, Figures)]
        return [picture for pictures in found for picture in pictures]


@dataclass(frozen=True, slots=True)
class Tile:
    """A large number at the top of the page."""

    what: str
    value: str
    remark: str


@dataclass(frozen=True, slots=True)
class Page:
    """The whole document."""

    title: str
    lede: str
    chapters: Sequence[Chapter]
    made: str
    tiles: Sequence[Tile] = field(default=())
    kind: str = "report of a run"

    @property
    def pictures(self) -> list[Picture]:
        """All of its figures, in their order."""
        return [picture for chapter in self.chapters for picture in chapter.pictures]


def bar(share: float, text: str) -> TableCell:
    """A number with a bar behind it."""
    return TableCell(text, share=share)
