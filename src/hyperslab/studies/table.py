"""Holds the one kind of table that studies show: on a page through a template, or in a terminal.

A table is plain values; `Table.for_terminal` and `templates/table.html` of the report lay it out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import rich.table
from rich import box
from rich.console import JustifyMethod
from rich.text import Text

from hyperslab.errors import printable


@dataclass(frozen=True, slots=True)
class TableCell:
    """Holds a text, a quiet remark beside or ``below`` it, or a bar behind it.

    A ``share`` of 1 fills the cell with the bar.
    """

    text: str
    remark: str = ""
    below: str = ""
    share: float | None = None

    @property
    def percent(self) -> str:
        """Returns how wide the bar is."""
        return f"{100 * min(max(self.share or 0.0, 0.0), 1.0):.1f}"


TableRow = Sequence[TableCell | str]


@dataclass(frozen=True, slots=True)
class Table:
    """Holds a table whose first column names the row."""

    template: ClassVar = "table.html"
    caption: str
    head: Sequence[str]
    rows: Sequence[TableRow]

    def for_terminal(
        self, *, left: Collection[str] = (), padding: int = 1, wrap: str = ""
    ) -> rich.table.Table:
        """Lays the table out for rich's console.

        Columns of the heads ``left`` (by default the first one, and those without a head) begin at
        the left, all others end at the right. The column ``wrap`` gives way in a narrow terminal.
        """
        left = left or ("", self.head[0])
        table = rich.table.Table(
            box=box.SIMPLE_HEAD,
            padding=(0, padding),
            pad_edge=False,
            caption=self.caption or None,
            caption_justify="left",
        )
        for name in self.head:
            justify: JustifyMethod = "left" if name in left else "right"
            table.add_column(Text(name), justify=justify, no_wrap=not name or name != wrap)
        for row in self.rows:
            # Names come from files: no markup in them, and no control characters.
            table.add_row(*(Text(printable(_plain(cell))) for cell in row))
        return table


def _plain(cell: TableCell | str) -> str:
    if isinstance(cell, str):
        return cell
    return " ".join(filter(None, (cell.text, cell.remark, cell.below)))
