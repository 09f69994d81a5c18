"""Draws matplotlib figures as inline SVG for a page, and as PDF and PNG files for a paper.

A figure is drawn once, in the style of ``templates/figures.mplstyle``. Its colours can be seen on
white and on a dark page; what is black has the colour of the page's own letters there.

Files for a paper are ink on white, with letters of 8 pt. A figure of the page's usual width
becomes as wide as a column; smaller ones become smaller, so that some of them stand side by
side, and wide ones go over two columns. Letters are as large in all.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib import ticker
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from numpy.typing import NDArray

from hyperslab.errors import DataError, printable, system_errors_as
from hyperslab.util.atomic_files import created_aside

FIGURE_STYLE = mpl.rc_params_from_file(
    Path(__file__).with_name("templates") / "figures.mplstyle", use_default_template=False
)

# The first four are of the palette of Okabe and Ito (2008), which people with any common colour
# blindness can tell apart; figures with more of them differ in line style, too.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#8c5a3a")
FIRST, SECOND, THIRD = SERIES[:3]
DASHES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (2, 1)))
INK = "#000000"  # on a page that of its letters: style.css
MUTED = "#6b727b"  # axes, and what others are compared with
FEW_POINTS = 20  # shorter curves have their points marked: a single one has no line

LETTERS = 12.0
PAPER_LETTERS = 8.0
LEGEND_SHARE = 11.5 / 12  # scale of the letters of legends

COLUMN_PIXELS = 440
COLUMN_INCHES = 3.5  # the width [in] of a figure that is COLUMN_PIXELS wide on the page

DOTS_PER_INCH = 300


def series_style(place: int) -> dict[str, Any]:
    """Returns colour and line style of a curve: figures are to be read without colours, too.

    Where colours begin again each has another line style than before.
    """
    dashes = DASHES[(place + place // len(SERIES)) % len(DASHES)]
    return {"color": SERIES[place % len(SERIES)], "linestyle": dashes}


@dataclass(frozen=True, slots=True)
class Picture:
    """Holds a figure of the page: its SVG, what it shows in words, and the text below it.

    ``figure`` is what it was drawn as; ``name`` is unique on a page.
    """

    svg: Markup
    alt: str
    title: str
    caption: str
    name: str
    figure: Figure = field(compare=False, repr=False)


class Canvas:
    """Gives axes to draw on, in the report's style; ``picture`` turns them into a Picture.

    ``width`` and ``height`` are the SVG's own units [px]; the page scales them.
    """

    def __init__(self, name: str, *, width: int = COLUMN_PIXELS, height: int = 290) -> None:
        self.name = name
        with mpl.rc_context(FIGURE_STYLE):
            self.figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
            self.axes: Axes = self.figure.subplots()

    def curve(self, x: NDArray[Any], y: NDArray[Any], **style: Any) -> None:
        """Draws a curve, its points marked where there are few."""
        marker = "o" if len(x) < FEW_POINTS else ""
        self.axes.plot(x, y, **{"marker": marker, "markersize": 4, **style})

    def square(self, reach: float) -> None:
        """Makes axes for predictions against truths, up to ``reach``, with the line y = x."""
        ends = (-reach, reach)
        self.axes.plot(ends, ends, color=MUTED, linewidth=1, linestyle="--")
        self.axes.set(xlim=ends, ylim=ends, xlabel="true", ylabel="predicted")
        self.axes.set_aspect("equal")
        self.axes.locator_params(nbins=5)

    def log(self, marked: Sequence[float] = (1.0, 2.0, 5.0)) -> None:
        """Makes the vertical axis logarithmic, labelled with plain numbers (``marked``)."""
        self.axes.set_yscale("log")
        self.axes.yaxis.set_major_locator(ticker.LogLocator(subs=marked, numticks=8))
        self.axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        self.axes.yaxis.set_minor_locator(ticker.NullLocator())

    def log_if_wide(self, *values: NDArray[Any]) -> None:
        """Makes the axis logarithmic where values are positive and spread by more than 4."""
        every = np.concatenate(values)
        every = every[np.isfinite(every)]
        if len(every) and every.min() > 0 and every.max() > 4 * every.min():
            few = every.max() < 1e4 * every.min()
            self.log((1.0, 2.0, 5.0) if few else (1.0,))

    def whole_ticks(self, axis: Literal["x", "y"] = "x") -> None:
        """Puts ticks at whole numbers alone."""
        self.axes.locator_params(axis=axis, integer=True, nbins=6, min_n_ticks=1)

    def legend(self, handles: Sequence[Artist] | None = None) -> None:
        """Puts a legend above the axes, where it covers nothing."""
        found = self.axes.get_legend_handles_labels()[0] if handles is None else handles
        labels = [str(handle.get_label()) for handle in found]
        _place_legend(self.axes, found, labels, LETTERS * LEGEND_SHARE)

    def picture(self, *, title: str, alt: str, caption: str = "") -> Picture:
        """Finishes the Picture; ``alt`` says in words what a reader would see."""
        return Picture(self._draw(alt), alt, title, caption, self.name, self.figure)

    def _draw(self, alt: str) -> Markup:
        # Names come from a run's files: no formulas in them, and no control characters.
        for text in self.figure.findobj(Text):
            text.set_parse_math(False)
            text.set_text(printable(text.get_text()))
        file = io.StringIO()
        with mpl.rc_context({**FIGURE_STYLE, "svg.hashsalt": self.name}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
            self.figure.savefig(file, format="svg", transparent=True)
        return _inline(file.getvalue(), alt)


def _place_legend(
    axes: Axes, handles: Sequence[Artist], labels: Sequence[str], letters: float
) -> None:
    """Places a legend above ``axes``, its letters of so many points, in the columns that fit."""
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    room = 0.86 * figure.bbox.width
    # An average letter is 0.56 of its height wide; sample and spaces take 3.8 heights.
    longest = max(int((0.86 * 72 * figure.get_figwidth() / letters - 3.8) / 0.56), 8)
    shown = [cut_short(printable(label), longest) for label in labels]
    for columns in (3, 2, 1):
        with mpl.rc_context(FIGURE_STYLE):
            legend = axes.legend(
                handles, shown, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2,
                ncols=columns, handlelength=1.6, columnspacing=1.2, fontsize=letters,
            )  # fmt: skip
        if legend.get_window_extent().width <= room:
            break


def cut_short(text: str, longest: int) -> str:
    """Shortens a text to at most so many letters.

    >>> cut_short("learning_rate=0.001", 8)
    'learnin…'
    """
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _inline(svg: str, alt: str) -> Markup:
    """Turns an SVG document into an element of a page, with the page's fonts."""
    body = re.search(r"<svg[^>]*>(.*)</svg>", svg, re.S)
    box = re.search(r'viewBox="([^"]*)"', svg)
    if body is None or box is None:
        raise AssertionError("matplotlib wrote no SVG")
    inner = re.sub(
        r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body[1], flags=re.S
    )
    # Groups are counted from 1 in each figure; other ids are hashes with the figure's own salt.
    inner = re.sub(r'<g id="[^"]*"', "<g", inner).replace("xlink:href", "href")
    inner = re.sub(r" font-family: [^;\"]*;", "", inner)
    inner = re.sub(r"\n\s*", "\n", inner)
    head = Markup('<svg viewBox="{}" role="img" aria-label="{}">').format(box[1], printable(alt))
    return head + Markup(inner) + Markup("</svg>")


class FigureFormat(StrEnum):
    """Names the formats of files of figures."""

    PDF = "pdf"
    PNG = "png"


def write_figures(
    pictures: Sequence[Picture], folder: Path, formats: Sequence[FigureFormat]
) -> None:
    """Writes each figure in each format, called by its name.

    The figures are changed: they are drawn anew, smaller and with smaller letters.
    """
    if not formats:
        return
    with system_errors_as(DataError, f"cannot write figures into {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for picture in pictures:
            for_paper(picture.figure)
            for kind in dict.fromkeys(formats):
                path = folder / f"{picture.name}.{kind.value}"
                with created_aside(path) as file, mpl.rc_context(FIGURE_STYLE):
                    picture.figure.savefig(file, format=kind.value, dpi=DOTS_PER_INCH)


def figures_beside(page: Path) -> Path:
    """Returns the folder of a page's figures: ``report-figures`` beside ``report.html``."""
    return page.with_name(f"{page.stem}-figures")


def for_paper(figure: Figure) -> None:
    """Makes figure and letters as large as a paper wants them, on white."""
    width, height = figure.get_size_inches() * COLUMN_INCHES / (COLUMN_PIXELS / 72)
    figure.set_size_inches(width, height)
    for text in figure.findobj(Text):
        text.set_fontsize(float(text.get_fontsize()) * PAPER_LETTERS / LETTERS)
    for axes in figure.findobj(Axes):
        if (legend := axes.get_legend()) is not None:
            labels = [text.get_text() for text in legend.get_texts()]
            handles = [handle for handle in legend.legend_handles if handle is not None]
            _place_legend(axes, handles, labels, PAPER_LETTERS * LEGEND_SHARE)
        axes.tick_params(labelsize=PAPER_LETTERS, width=0.6, length=2.5, pad=2)
    figure.patch.set(facecolor="white", alpha=1.0)
