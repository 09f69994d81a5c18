"""One plane of a volume as a picture: true voxel shape, a scale, a colour bar, letters of sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import matplotlib.patheffects as effects
import numpy as np
from matplotlib import ticker
from numpy.typing import NDArray

from hyperslab.geometry import Cut
from hyperslab.report.figures.svg import STYLE, Canvas
from hyperslab.report.samples.voxels import Voxels

CUT_COLOUR = "#7fd4ff"  # on the picture itself, so the same on a light and on a dark page
LETTER_COLOUR = "#ffffff"
OUTLINE = (effects.withStroke(linewidth=3, foreground="black"),)
LONGER_SIDE = 190
"""The longer side of a plane [px]."""

THINNEST = 8
"""A plane that is thinner than its length over this is drawn thicker than it is."""

LEFT = 64
BELOW = 48
BESIDE = 88  # for the colour bar
ABOVE = 8
BETWEEN_TICKS = 45  # at least

Range = tuple[float, float]


class PlaneCanvas:
    """A picture of a plane, to be drawn on in voxels: their sizes are put in here.

    ``rows`` and ``columns`` are the axes of the plane, ``upwards`` has the first row at the bottom.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        voxels: Voxels,
        *,
        rows: str,
        columns: str,
        upwards: bool,
    ) -> None:
        self.high = voxels.sizes[rows]
        self.wide = voxels.sizes[columns]
        bottom = shape[0] * self.high
        right = shape[1] * self.wide
        self.canvas = _canvas(name, right / bottom)
        self.axes = self.canvas.axes
        self.origin = "lower" if upwards else "upper"
        self.extent = (0.0, right, 0.0, bottom) if upwards else (0.0, right, bottom, 0.0)
        self.axes.set(xlabel=voxels.title(columns), ylabel=voxels.title(rows))
        self.axes.grid(visible=False)
        if voxels.ends:
            first, last = voxels.ends[rows]
            ends = (first, last) if upwards else (last, first)
            self._letters(ends, voxels.ends[columns])

    def values(self, values: NDArray[Any], limits: Range, *, colours: str, quantity: str) -> None:
        """The plane itself, and its colour bar; ``quantity`` is what the values are."""
        low, high = limits
        image = self._image(values, cmap=colours, vmin=low, vmax=high)
        with mpl.rc_context(STYLE):
            beside = self.axes.inset_axes((1.05, 0, 0.05, 1))
            bar = self.canvas.figure.colorbar(image, cax=beside, label=quantity)
        bar.locator = ticker.MaxNLocator(5)
        bar.outline.set_visible(False)
        beside.grid(visible=False)
        box = self.axes.get_position()
        for axis, inches in (
            (self.axes.xaxis, box.width * self.canvas.figure.get_figwidth()),
            (self.axes.yaxis, box.height * self.canvas.figure.get_figheight()),
        ):
            axis.set_major_locator(ticker.MaxNLocator(max(int(72 * inches / BETWEEN_TICKS), 1)))

    def over(self, colours: NDArray[np.float32]) -> None:
        """A layer of (rows, columns, RGBA) on the plane."""
        self._image(colours)

    def outline(self, chosen: NDArray[np.bool_], colour: str) -> None:
        """A line around the voxels that are chosen."""
        if min(chosen.shape) < 2:
            return
        rows, columns = (np.arange(extent) + 0.5 for extent in chosen.shape)
        grid = (columns * self.wide, rows * self.high)
        self.axes.contour(*grid, chosen, [0.5], colors=[colour], linewidths=1.5)

    def cut(
        self,
        cut: Cut,
        *,
        along: str,
        halos: Sequence[tuple[int, int]] = (),
        alpha: float = 0.0,
    ) -> None:
        """The bounds of ``cut`` as lines and its halos as bands.

        ``along`` is the axis of the picture, "x" or "y", that the cut divides.
        """
        line = self.axes.axvline if along == "x" else self.axes.axhline
        band = self.axes.axvspan if along == "x" else self.axes.axhspan
        size = self.wide if along == "x" else self.high
        for bound in cut.bounds[1:-1]:
            line(bound * size, color=CUT_COLOUR, linewidth=1.6, path_effects=OUTLINE)
        for lo, hi in halos:
            band(lo * size, hi * size, color=CUT_COLOUR, alpha=alpha, linewidth=0)

    def zoom(self, x: float, y: float, reach: float) -> None:
        """Show what is up to ``reach`` around (x, y), all counted in voxels."""
        self.axes.set_xlim((x - reach) * self.wide, (x + reach) * self.wide)
        self.axes.set_ylim((y + reach) * self.high, (y - reach) * self.high)

    def _image(self, values: NDArray[Any], **options: Any) -> Any:
        options |= {"origin": self.origin, "extent": self.extent, "interpolation": "none"}
        return self.axes.imshow(values, aspect="auto", **options)

    def _letters(self, rows: tuple[str, str], columns: tuple[str, str]) -> None:
        """Of the patient's sides, at the picture's edges, as viewers of scans have them."""
        sides = ((0.5, 0.06, rows[0]), (0.5, 0.94, rows[1]))
        for x, y, letter in (*sides, (0.05, 0.5, columns[0]), (0.95, 0.5, columns[1])):
            self.axes.text(
                x, y, letter, transform=self.axes.transAxes, ha="center", va="center",
                color=LETTER_COLOUR, fontweight="bold", path_effects=OUTLINE,
            )  # fmt: skip


def _canvas(name: str, ratio: float) -> Canvas:
    """Room for a plane that is ``ratio`` times as wide as high, its labels and its colour bar.

    The margins are fixed: an automatic layout does not see the colour bar, which is as high as
    the plane and no higher.
    """
    wide = max(LONGER_SIDE * min(1.0, ratio), LONGER_SIDE / THINNEST)
    high = max(LONGER_SIDE * min(1.0, 1 / ratio), LONGER_SIDE / THINNEST)
    width = LEFT + wide + BESIDE
    height = BELOW + high + ABOVE
    canvas = Canvas(name, width=round(width), height=round(height))
    canvas.figure.set_layout_engine("none")
    canvas.axes.set_position((LEFT / width, BELOW / height, wide / width, high / height))
    return canvas


def limits_of(planes: Sequence[NDArray[Any]], shares: tuple[float, float]) -> Range:
    """One range of values for all of them, the percentiles ``shares`` of what is finite."""
    every = np.concatenate([plane.ravel() for plane in planes])
    every = every[np.isfinite(every)]
    if not len(every):
        return 0.0, 1.0
    low, high = np.percentile(every, shares)
    return float(low), float(max(high, low + 1e-6))


def place_words(index: int, extent: int, axis: str, voxels: Voxels) -> str:
    """Where a plane lies: ``Plane 17 of 32, at 66.0 Mpc/h``."""
    words = f"Plane {index + 1} of {extent}"
    if not voxels.unit:
        return words
    return f"{words}, at {(index + 0.5) * voxels.sizes[axis]:.4g} {voxels.unit}"
