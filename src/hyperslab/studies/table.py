"""Formats numbers, sizes and names as a reader wants them, and the one kind of table of studies.

A table is plain values; `Table.for_terminal` and `templates/table.html` of the report lay it out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import rich.table
from rich import box
from rich.cells import cell_len
from rich.console import JustifyMethod
from rich.text import Text

from hyperslab.errors import printable
from hyperslab.train.metrics import ConfidenceInterval

LABELS = {"Omega_m": "Ωₘ", "sigma_8": "σ₈", "n_s": "nₛ", "N_spec": "nₛ", "H_0": "H₀"}
UNITS = {"H_0": "km/s/Mpc"}
MINUS = "\N{MINUS SIGN}"
DASH = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
DIGITS = 3  # significant ones
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
SCALES = ("B", "KiB", "MiB", "GiB", "TiB")


def label(name: str) -> str:
    """Returns a parameter's usual symbol; its name where none is known."""
    return LABELS.get(name, name)


def number(value: float | None) -> str:
    """Writes a number to three significant digits; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return DASH
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.{DIGITS - 1}e}".split("e")
        power = str(int(exponent)).translate(SUPERSCRIPTS)
        return f"{mantissa}·10{power}".replace("-", MINUS)
    places = DIGITS - 1 - (math.floor(math.log10(abs(value))) if value else 0)
    return f"{value:.{max(places, 0)}f}".replace("-", MINUS)


def interval_words(found: ConfidenceInterval) -> str:
    """Writes an estimate and its interval: ``0.143 (0.08 – 0.25)``."""
    return f"{number(found.value)} ({number(found.lower)} {DASH} {number(found.upper)})"


def duration(seconds: float) -> str:
    """Writes a time in its two largest units: ``75`` as ``1 min 15 s``."""
    if seconds < 60:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def scale_of(size: float) -> tuple[float, str]:
    """Chooses the unit that suits a size [B]: how many bytes it has, and its name."""
    power = 0 if size < 1 else min(int(math.log(size, 1024)), len(SCALES) - 1)
    return 1024.0**power, SCALES[power]


def size(value: float) -> str:
    """Writes a number of bytes, such as ``1.50 GiB``."""
    scale, unit = scale_of(value)
    return f"{number(value / scale)} {unit}"


def counted(count: int, thing: str) -> str:
    """Counts things: ``1 epoch``, ``2 epochs``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def slug(name: str) -> str:
    """Makes a part of a file's name of any name."""
    return "".join(c if c.isalnum() else "-" for c in name)


def times(values: Iterable[object]) -> str:
    """Joins extents: ``2 x 3 x 4``, with the right sign between."""
    return f" {TIMES} ".join(map(str, values))


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

    caption: str
    head: Sequence[str]
    rows: Sequence[TableRow]

    def for_terminal(
        self,
        *,
        left: Collection[str] = (),
        padding: int = 1,
        wrap: str = "",
        wrap_heads: bool = False,
    ) -> rich.table.Table:
        """Lays the table out for rich's console.

        Columns of the heads ``left`` (by default the first one, and those without a head) begin at
        the left, all others end at the right. In a narrow terminal the column ``wrap`` gives way,
        and with ``wrap_heads`` whatever has more than one word. Numbers are never cut there, so
        the table may be wider than the terminal.
        """
        left = left or ("", self.head[0])
        table = rich.table.Table(
            box=box.SIMPLE_HEAD,
            padding=(0, padding),
            pad_edge=False,
            caption=self.caption or None,
            caption_justify="left",
        )
        # Names come from files: no markup in them, and no control characters.
        rows = [[printable(_plain(cell)) for cell in row] for row in self.rows]
        for place, name in enumerate(self.head):
            justify: JustifyMethod = "left" if name in left else "right"
            fixed = not name or (name != wrap and (justify == "left" or not wrap_heads))
            words = " ".join([name, *(row[place] for row in rows)]).split()
            longest = max(map(cell_len, words), default=0) if wrap_heads else None
            table.add_column(Text(name), justify=justify, no_wrap=fixed, min_width=longest)
        for row in rows:
            table.add_row(*map(Text, row))
        return table


def _plain(cell: TableCell | str) -> str:
    if isinstance(cell, str):
        return cell
    return " ".join(filter(None, (cell.text, cell.remark, cell.below)))
