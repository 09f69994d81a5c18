"""Draws planes of volumes: true voxel shape, a scale, a colour bar, letters of sides.

`PlaneCanvas` draws one plane; `universe_slices` shows a universe with the cut of the grid drawn
in, `scan_slices` a scan with its true and its predicted mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import matplotlib.patheffects as effects
import numpy as np
from matplotlib import ticker
from matplotlib.colors import to_rgba
from numpy.typing import NDArray

from hyperslab.comm.grid import SPATIAL_AXES
from hyperslab.geometry import Cut, Window
from hyperslab.studies.number_format import number, times
from hyperslab.studies.report.canvas import FIGURE_STYLE, Canvas, Picture
from hyperslab.studies.report.samples import MiddlePlanes, PlaneValues, Scan, Voxels

CUT_COLOUR = "#7fd4ff"  # on the picture itself, so the same on a light and on a dark page
LETTER_COLOUR = "#ffffff"
LETTER_OUTLINE = (effects.withStroke(linewidth=3, foreground="black"),)
LONGER_SIDE = 190
"""Gives the longer side of a plane [px]."""

THINNEST = 8
"""Draws a plane that is thinner than its length over this thicker than it is."""

LEFT = 64
BELOW = 48
BESIDE = 88  # for the colour bar
ABOVE = 8
BETWEEN_TICKS = 45  # at least

ValueRange = tuple[float, float]


class PlaneCanvas:
    """Draws a plane in voxels, and puts their sizes in.

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
        self.canvas = _plane_canvas(name, right / bottom)
        self.axes = self.canvas.axes
        self.origin = "lower" if upwards else "upper"
        self.extent = (0.0, right, 0.0, bottom) if upwards else (0.0, right, bottom, 0.0)
        self.axes.set(xlabel=voxels.title(columns), ylabel=voxels.title(rows))
        self.axes.grid(visible=False)
        if voxels.ends:
            first, last = voxels.ends[rows]
            ends = (first, last) if upwards else (last, first)
            self._letters(ends, voxels.ends[columns])

    def values(
        self, values: NDArray[Any], limits: ValueRange, *, colours: str, quantity: str
    ) -> None:
        """Draws the plane itself, and its colour bar; ``quantity`` is what the values are."""
        low, high = limits
        image = self._image(values, cmap=colours, vmin=low, vmax=high)
        with mpl.rc_context(FIGURE_STYLE):
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
        """Draws a layer of (rows, columns, RGBA) on the plane."""
        self._image(colours)

    def outline(self, chosen: NDArray[np.bool_], colour: str) -> None:
        """Draws a line around the voxels that are chosen."""
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
        """Draws the bounds of ``cut`` as lines and its halos as bands.

        ``along`` is the axis of the picture, "x" or "y", that the cut divides.
        """
        line = self.axes.axvline if along == "x" else self.axes.axhline
        band = self.axes.axvspan if along == "x" else self.axes.axhspan
        size = self.wide if along == "x" else self.high
        for bound in cut.bounds[1:-1]:
            line(bound * size, color=CUT_COLOUR, linewidth=1.6, path_effects=LETTER_OUTLINE)
        for lo, hi in halos:
            band(lo * size, hi * size, color=CUT_COLOUR, alpha=alpha, linewidth=0)

    def zoom(self, x: float, y: float, reach: float) -> None:
        """Shows what is up to ``reach`` around (x, y), all counted in voxels."""
        self.axes.set_xlim((x - reach) * self.wide, (x + reach) * self.wide)
        self.axes.set_ylim((y + reach) * self.high, (y - reach) * self.high)

    def _image(self, values: NDArray[Any], **options: Any) -> Any:
        options |= {"origin": self.origin, "extent": self.extent, "interpolation": "none"}
        return self.axes.imshow(values, aspect="auto", **options)

    def _letters(self, rows: tuple[str, str], columns: tuple[str, str]) -> None:
        """Letters the patient's sides at the picture's edges, as viewers of scans do."""
        sides = ((0.5, 0.06, rows[0]), (0.5, 0.94, rows[1]))
        for x, y, letter in (*sides, (0.05, 0.5, columns[0]), (0.95, 0.5, columns[1])):
            self.axes.text(
                x, y, letter, transform=self.axes.transAxes, ha="center", va="center",
                color=LETTER_COLOUR, fontweight="bold", path_effects=LETTER_OUTLINE,
            )  # fmt: skip


def _plane_canvas(name: str, ratio: float) -> Canvas:
    """Makes a canvas for a plane that is ``ratio`` times as wide as high, with a colour bar.

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


def limits_of(planes: Sequence[NDArray[Any]], shares: tuple[float, float]) -> ValueRange:
    """Computes one range of values for all planes: the percentiles ``shares`` of finite ones."""
    every = np.concatenate([plane.ravel() for plane in planes])
    every = every[np.isfinite(every)]
    if not len(every):
        return 0.0, 1.0
    low, high = np.percentile(every, shares)
    return float(low), float(max(high, low + 1e-6))


def place_words(index: int, extent: int, axis: str, voxels: Voxels) -> str:
    """Says where a plane lies: ``Plane 17 of 32, at 66.0 Mpc/h``."""
    words = f"Plane {index + 1} of {extent}"
    if not voxels.unit:
        return words
    return f"{words}, at {(index + 0.5) * voxels.sizes[axis]:.4g} {voxels.unit}"


ENLARGED_VOXELS = 12
"""Counts the voxels either side of a cut in the enlarged picture."""


def cuts_of(shape: Sequence[int], grid: Mapping[str, int]) -> dict[str, Cut]:
    """Cuts a volume along each axis; one part where it is not cut."""
    return {
        axis: Cut.balanced(axis, extent, grid.get(axis, 1))
        for axis, extent in zip(SPATIAL_AXES, shape, strict=True)
    }


def universe_slices(
    planes: MiddlePlanes, cuts: Mapping[str, Cut], window: Window | None
) -> list[Picture]:
    """Draws the middle planes, each with the cuts that cross it, and one cut enlarged.

    ``window`` is the first convolution's; it gives the halo.
    """
    limits = limits_of(list(planes.values.values()), (1, 99.8))
    pictures = [_universe_plane(planes, across, cuts, window, limits) for across in SPATIAL_AXES]
    first = next((axis for axis in SPATIAL_AXES if cuts[axis].parts > 1), None)
    if first is not None and window is not None:
        pictures.append(_enlarged(planes, cuts[first], window, limits))
    return pictures


def halo_intervals(cut: Cut, window: Window) -> list[tuple[int, int]]:
    """Lists the intervals along ``cut`` that some shard reads and does not own.

    >>> halo_intervals(Cut.balanced("depth", 8, 2), Window(3, before=1, after=1))
    [(4, 5), (3, 4)]
    """
    found = []
    outputs = window.cut_outputs(cut, window.outputs(cut.extent))
    for (lo, hi), out in zip(cut.intervals, outputs.intervals, strict=True):
        reads = window.reads(out)
        found += [(max(reads[0], 0), lo), (hi, min(reads[1], cut.extent))]
    return [(lo, hi) for lo, hi in found if lo < hi]


def halo_words(cuts: Mapping[str, Cut], window: Window) -> str:
    """Says how wide the halo is; empty where nothing is cut."""
    wide = [hi - lo for cut in cuts.values() for lo, hi in halo_intervals(cut, window)]
    if not wide:
        return ""
    return f"{max(wide)} voxel{'s' if max(wide) > 1 else ''}"


def _universe_plane(
    planes: MiddlePlanes,
    across: str,
    cuts: Mapping[str, Cut],
    window: Window | None,
    limits: ValueRange,
) -> Picture:
    rows, columns = (axis for axis in SPATIAL_AXES if axis != across)
    canvas = _drawn_cuts(planes, f"slice-{across}", across, limits)
    for axis, along in ((rows, "y"), (columns, "x")):
        canvas.cut(cuts[axis], along=along, halos=_shared_range(cuts[axis], window), alpha=0.35)
    crossing = [f"{cuts[a].parts} along {a}" for a in (rows, columns) if cuts[a].parts > 1]
    parts = cuts[rows].parts * cuts[columns].parts
    extent = planes.shape[SPATIAL_AXES.index(across)]
    where = place_words(extent // 2, extent, across, planes.voxels)
    shards = f"cut into {parts} shards: {times(crossing)}" if crossing else "not cut here"
    return canvas.canvas.picture(
        title=f"Across {across}",
        alt=f"Middle plane of a volume across {across}, {shards}.",
        caption=f"{where}, {shards}.",
    )


def _enlarged(planes: MiddlePlanes, cut: Cut, window: Window, limits: ValueRange) -> Picture:
    """Draws the voxels around the first bound of ``cut``, halo and all."""
    across = "height" if cut.axis == "depth" else "depth"
    rows, columns = (axis for axis in SPATIAL_AXES if axis != across)
    canvas = _drawn_cuts(planes, "slice-zoom", across, limits)
    upright = cut.axis == columns
    canvas.cut(cut, along="x" if upright else "y", halos=_shared_range(cut, window), alpha=0.45)
    bound = cut.bounds[1]
    extents = dict(zip(SPATIAL_AXES, planes.shape, strict=True))
    other = extents[rows if upright else columns] / 2
    x, y = (bound, other) if upright else (other, bound)
    canvas.zoom(x, y, min(ENLARGED_VOXELS, min(extents.values()) / 2))
    wide = halo_words({cut.axis: cut}, window)
    return canvas.canvas.picture(
        title="A cut, enlarged",
        alt=f"The voxels around a cut along {cut.axis}; a halo of {wide} lies on each side.",
        caption=f"Shaded: the halo of the first convolution, {wide}, "
        f"which each of the two neighbours gets from the other.",
    )


def _drawn_cuts(planes: MiddlePlanes, name: str, across: str, limits: ValueRange) -> PlaneCanvas:
    rows, columns = (axis for axis in SPATIAL_AXES if axis != across)
    values = planes.values[across]
    canvas = PlaneCanvas(
        name, values.shape, planes.voxels, rows=rows, columns=columns, upwards=False
    )
    canvas.values(values, limits, colours="magma", quantity=planes.quantity)
    return canvas


def _shared_range(cut: Cut, window: Window | None) -> list[tuple[int, int]]:
    return halo_intervals(cut, window) if window is not None and cut.parts > 1 else []


# On the picture itself, so the same on a light and on a dark page; none is a grey.
CLASS_COLOURS = ("#ff9d00", "#ff4fa3", "#00d6a1", "#ffe600", "#9f8bff", "#ff6b4a")
MASK_ALPHA = 0.4
"""Makes the predicted mask transparent, so that the scan below stays visible."""


def class_colour(index: int) -> str:
    """Gives class ``index``, 1 or more, its colour; beyond the last they begin again."""
    return CLASS_COLOURS[(index - 1) % len(CLASS_COLOURS)]


def scan_slices(
    scan: Scan,
    classes: Sequence[str],
    window: ValueRange | None,
    cuts: Mapping[str, Cut],
    place: int,
) -> list[Picture]:
    """Draws the three planes of a scan, the ``place``-th that is shown."""
    limits = window or limits_of(list(scan.values.values()), (1, 99))
    return [_mask_plane(scan, across, classes, limits, cuts, place) for across in SPATIAL_AXES]


def _mask_plane(
    scan: Scan,
    across: str,
    classes: Sequence[str],
    window: ValueRange,
    cuts: Mapping[str, Cut],
    place: int,
) -> Picture:
    rows, columns = (axis for axis in SPATIAL_AXES if axis != across)
    values = scan.values[across]
    # Up is up: the indices grow towards head, front and right.
    name = f"mask-{place}-{across}"
    canvas = PlaneCanvas(name, values.shape, scan.voxels, rows=rows, columns=columns, upwards=True)
    canvas.values(values, window, colours="gray", quantity=scan.quantity)
    true = scan.true[across]
    predicted = scan.predicted[across]
    canvas.over(_tinted(predicted))
    for index in range(1, len(classes)):
        if (true == index).any():
            canvas.outline(true == index, class_colour(index))
    for axis, along in ((rows, "y"), (columns, "x")):
        canvas.cut(cuts[axis], along=along)
    extent = scan.shape[SPATIAL_AXES.index(across)]
    scores = [
        f"{name} {number(dice)}"
        for index, name in enumerate(classes)
        if index and (dice := _plane_dice(true == index, predicted == index)) is not None
    ]
    found = f"Dice here: {', '.join(scores)}." if scores else "Nothing but background here."
    return canvas.canvas.picture(
        title=f"Across {across}",
        alt=f"Plane of {scan.sample} across {across} with the true and the predicted mask. {found}",
        caption=f"{place_words(scan.at[across], extent, across, scan.voxels)}. {found}",
    )


def _tinted(classes: PlaneValues) -> PlaneValues:
    """Paints each class in its colour (rows, columns, RGBA), the background transparent."""
    picture = np.zeros((*classes.shape, 4), np.float32)
    for index in np.unique(classes[classes > 0]):
        picture[classes == index] = to_rgba(class_colour(int(index)), MASK_ALPHA)
    return picture


def _plane_dice(true: PlaneValues, predicted: PlaneValues) -> float | None:
    """Computes Dice in this plane; None where the class neither is nor is predicted."""
    union = int(true.sum()) + int(predicted.sum())
    return 2 * int((true & predicted).sum()) / union if union else None
