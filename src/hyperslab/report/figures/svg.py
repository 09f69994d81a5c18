"""matplotlib figures as inline SVG that takes its colours from the page.

[Note: themed colours] A figure is drawn once, in marker colours that mean something (``INK``,
``FIRST`` ...). In the SVG each marker is replaced by a CSS variable, so the browser picks the
real colour, and one figure is legible on a light page, on a dark one and on paper.
"""

from __future__ import annotations

import io
import itertools
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import matplotlib as mpl
from markupsafe import Markup
from matplotlib import ticker
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from hyperslab.errors import printable

INK = "#0a0b01"
MUTED = "#0a0b02"
RULE = "#0a0b03"
FIRST = "#0a0b04"
SECOND = "#0a0b05"
THIRD = "#0a0b06"
FOURTH = "#0a0b07"
FIFTH = "#0a0b08"
SIXTH = "#0a0b09"
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
STYLE = {
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
"""Of an average letter, over its height."""

BESIDE_LABEL = 3.8
"""A legend's sample and the spaces around, over the height of its letters."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One figure of the page: its SVG, what it shows in words, and the text below it.

    ``figure`` is what it was drawn as, in marker colours; ``name`` is unique on a page.
    """

    svg: Markup
    alt: str
    title: str
    caption: str = ""
    name: str = ""
    figure: Figure | None = field(default=None, compare=False, repr=False)


class Canvas:
    """Axes to draw on, in the report's style; ``picture`` turns them into a Picture.

    ``width`` and ``height`` are the SVG's own units [px]; the page scales them.
    """

    def __init__(self, name: str, *, width: int = 440, height: int = 290) -> None:
        self.name = name
        with mpl.rc_context(STYLE):
            self.figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
            self.axes: Axes = self.figure.subplots()

    def log(self) -> None:
        """A logarithmic vertical axis, labelled with plain numbers."""
        self.axes.set_yscale("log")
        decimal = ticker.FuncFormatter(lambda value, _: f"{value:g}")
        self.axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
        self.axes.yaxis.set_major_formatter(decimal)
        self.axes.yaxis.set_minor_locator(ticker.NullLocator())

    def legend(self, handles: Sequence[Artist] | None = None) -> None:
        """A legend in the page's ink, above the axes so that it covers nothing."""
        found = self.axes.get_legend_handles_labels()[0] if handles is None else handles
        place_legend(self.axes, found, [str(handle.get_label()) for handle in found], 11.5)

    def picture(self, *, title: str, alt: str, caption: str = "") -> Picture:
        """The finished Picture; ``alt`` says in words what a reader would see."""
        text = io.StringIO()
        self._tame_texts()
        with mpl.rc_context({**STYLE, "svg.hashsalt": self.name}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
            self.figure.savefig(text, format="svg", transparent=True)
        svg = inline(text.getvalue(), self.name, alt)
        return Picture(svg, alt, title, caption, self.name, self.figure)

    def _tame_texts(self) -> None:
        """Names come from a run's files: no formulas in them, and no control characters."""
        for text in self.figure.findobj(Text):
            text.set_parse_math(False)
            text.set_text(printable(text.get_text()))


def place_legend(
    axes: Axes, handles: Sequence[Artist], labels: Sequence[str], letters: float
) -> None:
    """A legend above ``axes`` with letters of so many points, in as many columns as fit."""
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    room = 0.86 * 72 * figure.get_figwidth() / letters  # in letters' heights
    longest = max(int((room - BESIDE_LABEL) / LETTER_WIDTH), 8)
    shown = [cut_short(printable(label), longest) for label in labels]
    columns = next((n for n in (3, 2) if _row_width(shown, n) <= room), 1)
    with mpl.rc_context(STYLE):
        axes.legend(
            handles, shown, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2,
            ncols=columns, handlelength=1.6, columnspacing=1.2,
            fontsize=letters,
        )  # fmt: skip


def _row_width(labels: Sequence[str], columns: int) -> float:
    """Of a legend, over the height of its letters; its first columns have what is left over."""
    rows, longer = divmod(len(labels), columns)
    starts = [at * rows + min(at, longer) for at in range(columns + 1)]
    parts = [labels[a:b] for a, b in itertools.pairwise(starts) if a < b]
    return sum(LETTER_WIDTH * max(map(len, part)) + BESIDE_LABEL for part in parts)


def cut_short(text: str, longest: int) -> str:
    """A text of at most so many letters.

    >>> cut_short("learning_rate=0.001", 8)
    'learnin…'
    """
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def inline(svg: str, name: str, alt: str) -> Markup:
    """An SVG document as an element of an HTML page: own ids, page's colours and fonts."""
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
    for marker, variable in COLOUR_VARIABLES.items():
        inner = inner.replace(marker, variable)
    inner = re.sub(r"\n\s*", "\n", inner)
    head = Markup('<svg viewBox="{}" role="img" aria-label="{}">').format(box[1], printable(alt))
    return head + Markup(inner) + Markup("</svg>")
