"""The figures of a page as files for a paper: PDF and PNG, ink on white, letters of 8 pt.

A figure of the page's usual width becomes as wide as a column; smaller ones become smaller, so that
some of them stand side by side, and wide ones go over two columns. Letters are as large in all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text

from hyperslab.atomic_files import created_aside
from hyperslab.errors import DataError, reason
from hyperslab.report.figures.svg import (
    FIFTH,
    FIRST,
    FOURTH,
    INK,
    MUTED,
    RULE,
    SECOND,
    SIXTH,
    STYLE,
    THIRD,
    Picture,
    place_legend,
)

COLUMN = 3.5
"""The width [in] of a figure that is COLUMN_PIXELS wide on the page."""

COLUMN_PIXELS = 440
PAPER_LETTERS = 8 / 12
"""What becomes of the page's letters of 12 px."""

DOTS = 300  # per inch
PALETTE = {
    INK: "#000000",
    MUTED: "#444444",
    RULE: "#cccccc",
    FIRST: "#0072b2",
    SECOND: "#b84a00",
    THIRD: "#00785a",
    FOURTH: "#a8437f",
    FIFTH: "#8a6d00",
    SIXTH: "#6b4226",
}
COLOURED = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor")


class FigureFormat(StrEnum):
    """Of files of figures."""

    PDF = "pdf"
    PNG = "png"


def write_figures(
    pictures: Sequence[Picture], folder: Path, formats: Sequence[FigureFormat]
) -> list[Path]:
    """Write each figure in each format, called by its name, and return the paths.

    The figures are changed: they are drawn anew, smaller and in other colours.

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
            with mpl.rc_context({**STYLE, "pdf.fonttype": 42}):
                for_paper(picture.figure)
                for kind in dict.fromkeys(formats):
                    path = folder / f"{picture.name}.{kind.value}"
                    with created_aside(path) as file:
                        picture.figure.savefig(file, format=kind.value, dpi=DOTS)
                    written.append(path)
    except OSError as error:
        raise DataError(f"cannot write figures into {folder}: {reason(error)}") from error
    return written


def figures_beside(page: Path) -> Path:
    """The folder of a page's figures: ``report-figures`` beside ``report.html``."""
    return page.with_name(f"{page.stem}-figures")


def for_paper(figure: Figure) -> None:
    """Size, letters and colours."""
    width, height = figure.get_size_inches()
    scale = COLUMN / (COLUMN_PIXELS / 72)
    figure.set_size_inches(width * scale, height * scale)
    for text in figure.findobj(Text):
        text.set_fontsize(float(text.get_fontsize()) * PAPER_LETTERS)
    for axes in figure.findobj(mpl.axes.Axes):
        if (legend := axes.get_legend()) is not None:
            labels = [text.get_text() for text in legend.get_texts()]
            handles = [handle for handle in legend.legend_handles if handle is not None]
            place_legend(axes, handles, labels, 11.5 * PAPER_LETTERS)
        axes.tick_params(
            labelsize=12 * PAPER_LETTERS, color=PALETTE[MUTED], labelcolor=PALETTE[INK],
            grid_color=PALETTE[RULE], width=0.6, length=2.5, pad=2,
        )  # fmt: skip
    recolour(figure, PALETTE)
    figure.patch.set(facecolor="white", alpha=1.0)


def recolour(figure: Figure, palette: Mapping[str, str]) -> None:
    """Give everything that is in a marker colour the real one; opacities stay."""
    for artist in figure.findobj():
        for kind in COLOURED:
            read = getattr(artist, f"get_{kind}", None)
            if read is None:
                continue
            found = read()
            real = _real(found, palette)
            if real is not None:
                getattr(artist, f"set_{kind}")(real)


def _real(found: Any, palette: Mapping[str, str]) -> Any:
    """The real colour, or array of them; None where none is a marker."""
    if isinstance(found, np.ndarray) and found.ndim == 2:
        rows = [_real(tuple(row), palette) or tuple(row) for row in found]
        return rows if any(tuple(a) != tuple(b) for a, b in zip(rows, found, strict=True)) else None
    try:
        marker = to_hex(found)
        opacity = to_rgba(found)[3]
    except (ValueError, TypeError):
        return None
    return to_rgba(palette[marker], opacity) if marker in palette else None
