"""Draws matplotlib figures as inline SVG for a page, and as PDF and PNG files for a paper.

A figure is drawn once, in the colours that it has on paper (``INK``, ``FIRST`` ...). In its SVG a
CSS variable takes the place of each, so that the page's style gives the colours of a light or a
dark page.

Files for a paper are ink on white, with letters of 8 pt. A figure of the page's usual width
becomes as wide as a column; smaller ones become smaller, so that some of them stand side by
side, and wide ones go over two columns. Letters are as large in all.
"""

from __future__ import annotations

import io
import itertools
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import matplotlib as mpl
from markupsafe import Markup
from matplotlib import ticker
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from hyperslab.errors import DataError, printable, reason
from hyperslab.util.atomic_files import created_aside

# Not quite black: outlines on pictures are, which stay as they are on a dark page.
INK = "#010101"
MUTED = "#444444"
RULE = "#cccccc"
FIRST = "#0072b2"
SECOND = "#b84a00"
THIRD = "#00785a"
FOURTH = "#a8437f"
FIFTH = "#8a6d00"
SIXTH = "#6b4226"
SERIES = (FIRST, SECOND, THIRD, FOURTH, FIFTH, SIXTH)
COLOUR_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    RULE: "var(--rule)",
    FIRST: "var(--first)",
    SECOND: "var(--second)",
    THIRD: "var(--third)",
    FOURTH: "var(--fourth)",
    FIFTH: "var(--fifth)",
    SIXTH: "var(--sixth)",
}
"""Names the page's colour for each of the paper's."""

FIGURE_STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be found, read aloud and scaled
    "font.size": 12,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "text.color": INK,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "path.simplify": True,
}

LETTER_WIDTH = 0.56
"""Gives the width of an average letter, over its height."""

BESIDE_LABEL = 3.8
"""Gives the width of a legend's sample and the spaces around, over the letters' height."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Holds a figure of the page: its SVG, what it shows in words, and the text below it.

    ``figure`` is what it was drawn as; ``name`` is unique on a page.
    """

    svg: Markup
    alt: str
    title: str
    caption: str = ""
    name: str = ""
    figure: Figure | None = field(default=None, compare=False, repr=False)


class Canvas:
    """Gives axes to draw on, in the report's style; ``picture`` turns them into a Picture.

    ``width`` and ``height`` are the SVG's own units [px]; the page scales them.
    """

    def __init__(self, name: str, *, width: int = 440, height: int = 290) -> None:
        self.name = name
        with mpl.rc_context(FIGURE_STYLE):
            self.figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
            self.axes: Axes = self.figure.subplots()

    def log(self) -> None:
        """Makes the vertical axis logarithmic, labelled with plain numbers."""
        self.axes.set_yscale("log")
        decimal = ticker.FuncFormatter(lambda value, _: f"{value:g}")
        self.axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
        self.axes.yaxis.set_major_formatter(decimal)
        self.axes.yaxis.set_minor_locator(ticker.NullLocator())

    def legend(self, handles: Sequence[Artist] | None = None) -> None:
        """Puts a legend above the axes, where it covers nothing."""
        found = self.axes.get_legend_handles_labels()[0] if handles is None else handles
        place_legend(self.axes, found, [str(handle.get_label()) for handle in found], 11.5)

    def picture(self, *, title: str, alt: str, caption: str = "") -> Picture:
        """Finishes the Picture; ``alt`` says in words what a reader would see."""
        text = io.StringIO()
        self._tame_texts()
        with mpl.rc_context({**FIGURE_STYLE, "svg.hashsalt": self.name}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
            self.figure.savefig(text, format="svg", transparent=True)
        svg = inline(text.getvalue(), self.name, alt)
        return Picture(svg, alt, title, caption, self.name, self.figure)

    def _tame_texts(self) -> None:
        """Takes formulas and control characters out of texts: names come from a run's files."""
        for text in self.figure.findobj(Text):
            text.set_parse_math(False)
            text.set_text(printable(text.get_text()))


def place_legend(
    axes: Axes, handles: Sequence[Artist], labels: Sequence[str], letters: float
) -> None:
    """Places a legend above ``axes``, its letters of so many points, in the columns that fit."""
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    room = 0.86 * 72 * figure.get_figwidth() / letters  # in letters' heights
    longest = max(int((room - BESIDE_LABEL) / LETTER_WIDTH), 8)
    shown = [cut_short(printable(label), longest) for label in labels]
    columns = next((n for n in (3, 2) if _row_width(shown, n) <= room), 1)
    with mpl.rc_context(FIGURE_STYLE):
        axes.legend(
            handles, shown, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2,
            ncols=columns, handlelength=1.6, columnspacing=1.2,
            fontsize=letters,
        )  # fmt: skip


def _row_width(labels: Sequence[str], columns: int) -> float:
    """Computes a legend's width in letters' heights; its first columns are the longer ones."""
    rows, longer = divmod(len(labels), columns)
    starts = [at * rows + min(at, longer) for at in range(columns + 1)]
    parts = [labels[a:b] for a, b in itertools.pairwise(starts) if a < b]
    return sum(LETTER_WIDTH * max(map(len, part)) + BESIDE_LABEL for part in parts)


def cut_short(text: str, longest: int) -> str:
    """Shortens a text to at most so many letters.

    >>> cut_short("learning_rate=0.001", 8)
    'learnin…'
    """
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def inline(svg: str, name: str, alt: str) -> Markup:
    """Turns an SVG document into an element of a page: own ids, the page's colours and fonts."""
    body = re.search(r"<svg[^>]*>(.*)</svg>", svg, re.S)
    box = re.search(r'viewBox="([^"]*)"', svg)
    if body is None or box is None:
        raise AssertionError("matplotlib wrote no SVG")
    inner = re.sub(
        r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body[1], flags=re.S
    )
    inner = re.sub(r'<g id="[^"]*"', "<g", inner)
    inner = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', inner)
    inner = re.sub(r"url\(#([^)]*)\)", rf"url(#{name}-\1)", inner)
    inner = inner.replace('xlink:href="#', f'href="#{name}-').replace("xlink:href", "href")
    inner = re.sub(r" font-family: [^;\"]*;", "", inner)
    for colour, variable in COLOUR_VARIABLES.items():
        inner = inner.replace(colour, variable)
    inner = re.sub(r"\n\s*", "\n", inner)
    head = Markup('<svg viewBox="{}" role="img" aria-label="{}">').format(box[1], printable(alt))
    return head + Markup(inner) + Markup("</svg>")


COLUMN_INCHES = 3.5
"""Gives the width [in] of a figure that is COLUMN_PIXELS wide on the page."""

COLUMN_PIXELS = 440
PAPER_LETTERS = 8 / 12
"""Scales the page's letters of 12 px to 8 pt."""

DOTS_PER_INCH = 300  # per inch


class FigureFormat(StrEnum):
    """Names the formats of files of figures."""

    PDF = "pdf"
    PNG = "png"


def write_figures(
    pictures: Sequence[Picture], folder: Path, formats: Sequence[FigureFormat]
) -> list[Path]:
    """Writes each figure in each format, called by its name, and returns the paths.

    The figures are changed: they are drawn anew, smaller and with smaller letters.

    Raises:
        DataError: the folder cannot be written.
    """
    written: list[Path] = []
    if not formats:
        return written
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in pictures:
            assert picture.figure is not None
            with mpl.rc_context({**FIGURE_STYLE, "pdf.fonttype": 42}):
                for_paper(picture.figure)
                for kind in dict.fromkeys(formats):
                    path = folder / f"{picture.name}.{kind.value}"
                    with created_aside(path) as file:
                        picture.figure.savefig(file, format=kind.value, dpi=DOTS_PER_INCH)
                    written.append(path)
    except OSError as error:
        raise DataError(f"cannot write figures into {folder}: {reason(error)}") from error
    return written


def figures_beside(page: Path) -> Path:
    """Returns the folder of a page's figures: ``report-figures`` beside ``report.html``."""
    return page.with_name(f"{page.stem}-figures")


def for_paper(figure: Figure) -> None:
    """Makes figure and letters as large as a paper wants them, on white."""
    width, height = figure.get_size_inches()
    scale = COLUMN_INCHES / (COLUMN_PIXELS / 72)
    figure.set_size_inches(width * scale, height * scale)
    for text in figure.findobj(Text):
        text.set_fontsize(float(text.get_fontsize()) * PAPER_LETTERS)
    for axes in figure.findobj(mpl.axes.Axes):
        if (legend := axes.get_legend()) is not None:
            labels = [text.get_text() for text in legend.get_texts()]
            handles = [handle for handle in legend.legend_handles if handle is not None]
            place_legend(axes, handles, labels, 11.5 * PAPER_LETTERS)
        axes.tick_params(labelsize=12 * PAPER_LETTERS, width=0.6, length=2.5, pad=2)
    figure.patch.set(facecolor="white", alpha=1.0)
