"""Writes the chapter on volumes: a universe and how the grid cuts it, or scans with their masks.

Planes are drawn in the true shape of their voxels, with a scale, a colour bar and letters of the
patient's sides: `PlaneCanvas` draws one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import matplotlib.patheffects as effects
import numpy as np
from matplotlib import ticker
from matplotlib.colors import to_rgba
from numpy.typing import NDArray

from hyperslab.comm.grid import SPATIAL_AXES
from hyperslab.errors import HyperslabError
from hyperslab.geometry import Cut, Window
from hyperslab.models.cosmoflow import variant_of
from hyperslab.studies.number_format import number, times
from hyperslab.studies.report.canvas import FIGURE_STYLE, Canvas, Picture
from hyperslab.studies.report.html import Block, Chapter, Figures, Heading, Legend, Notice
from hyperslab.studies.report.samples import Planes, PlaneValues, Scan, middle_planes, scans
from hyperslab.studies.run_folder import Run

# On the picture itself, so the same on a light and on a dark page; of the classes none is a grey.
CUT_COLOUR = "#7fd4ff"
CLASS_COLOURS = ("#ff9d00", "#ff4fa3", "#00d6a1", "#ffe600", "#9f8bff", "#ff6b4a")
LETTER_COLOUR = "#ffffff"
# Not quite black, so that it stays as it is on a dark page.
LETTER_OUTLINE = (effects.withStroke(linewidth=3, foreground="#010101"),)

MASK_ALPHA = 0.4
"""Makes the predicted mask transparent, so that the scan below stays visible."""

LONGER_SIDE = 190
"""Gives the longer side of a plane [px]."""

THINNEST = 8
"""Draws a plane that is thinner than its length over this thicker than it is."""

LEFT = 64
BELOW = 48
BESIDE = 88  # for the colour bar
ABOVE = 8
BETWEEN_TICKS = 45  # at least

ENLARGED_VOXELS = 12
"""Counts the voxels either side of a cut in the enlarged picture."""

ValueRange = tuple[float, float]


def volumes(run: Run) -> Chapter:
    """Shows scans with their masks, or the planes of one universe with the grid's cuts."""
    if run.segments:
        return Chapter("masks", "Scans, true and predicted", list(_scan_blocks(run)))
    return Chapter("universe", "A universe, and how it is cut", list(_universe_blocks(run)))


class PlaneCanvas(Canvas):
    """Draws the plane ``across`` an axis in the true shape of its voxels, and a colour bar.

    ``upwards`` has the first row at the bottom. The margins are fixed: an automatic layout does
    not see the colour bar, which is as high as the plane and no higher.
    """

    def __init__(
        self,
        name: str,
        planes: Planes,
        across: str,
        limits: ValueRange,
        *,
        colours: str,
        upwards: bool,
    ) -> None:
        values = planes.values[across]
        voxels = planes.voxels
        rows, columns = self.sides = [axis for axis in SPATIAL_AXES if axis != across]
        self.high = voxels.sizes[rows]
        self.wide = voxels.sizes[columns]
        bottom = values.shape[0] * self.high
        right = values.shape[1] * self.wide
        wide = max(LONGER_SIDE * min(1.0, right / bottom), LONGER_SIDE / THINNEST)
        high = max(LONGER_SIDE * min(1.0, bottom / right), LONGER_SIDE / THINNEST)
        width = LEFT + wide + BESIDE
        height = BELOW + high + ABOVE
        super().__init__(name, width=round(width), height=round(height))
        self.figure.set_layout_engine("none")
        self.axes.set_position((LEFT / width, BELOW / height, wide / width, high / height))
        self.origin = "lower" if upwards else "upper"
        self.extent = (0.0, right, 0.0, bottom) if upwards else (0.0, right, bottom, 0.0)
        self.axes.set(xlabel=voxels.title(columns), ylabel=voxels.title(rows))
        self.axes.grid(visible=False)
        for axis, pixels in ((self.axes.xaxis, wide), (self.axes.yaxis, high)):
            axis.set_major_locator(ticker.MaxNLocator(max(int(pixels / BETWEEN_TICKS), 1)))
        image = self.image(values, cmap=colours, vmin=limits[0], vmax=limits[1])
        with mpl.rc_context(FIGURE_STYLE):
            beside = self.axes.inset_axes((1.05, 0, 0.05, 1))
            bar = self.figure.colorbar(image, cax=beside, label=planes.quantity)
        bar.locator = ticker.MaxNLocator(5)
        bar.outline.set_visible(False)
        beside.grid(visible=False)
        if voxels.ends:
            first, last = voxels.ends[rows]
            self._letters((first, last) if upwards else (last, first), voxels.ends[columns])
        self.where = f"Plane {planes.at[across] + 1} of {_extent(planes, across)}"
        if voxels.unit:
            centre = (planes.at[across] + 0.5) * voxels.sizes[across]
            self.where += f", at {centre:.4g} {voxels.unit}"

    def image(self, values: NDArray[Any], **options: Any) -> Any:
        """Draws a layer of values, or of (rows, columns, RGBA), on the plane."""
        options |= {"origin": self.origin, "extent": self.extent, "interpolation": "none"}
        return self.axes.imshow(values, aspect="auto", **options)

    def outline(self, chosen: NDArray[np.bool_], colour: str) -> None:
        """Draws a line around the voxels that are chosen."""
        if min(chosen.shape) < 2:
            return
        rows, columns = (np.arange(extent) + 0.5 for extent in chosen.shape)
        grid = (columns * self.wide, rows * self.high)
        self.axes.contour(*grid, chosen, [0.5], colors=[colour], linewidths=1.5)

    def cuts(
        self, cuts: Mapping[str, Cut], window: Window | None = None, alpha: float = 0.0
    ) -> None:
        """Draws the bounds of the ``cuts`` that cross the plane, and the halos of ``window``."""
        rows, columns = self.sides
        for axis, line, band, size in (
            (rows, self.axes.axhline, self.axes.axhspan, self.high),
            (columns, self.axes.axvline, self.axes.axvspan, self.wide),
        ):
            if axis not in cuts:
                continue
            for bound in cuts[axis].bounds[1:-1]:
                line(bound * size, color=CUT_COLOUR, linewidth=1.6, path_effects=LETTER_OUTLINE)
            for lo, hi in halo_intervals(cuts[axis], window) if window is not None else ():
                band(lo * size, hi * size, color=CUT_COLOUR, alpha=alpha, linewidth=0)

    def _letters(self, rows: tuple[str, str], columns: tuple[str, str]) -> None:
        """Letters the patient's sides at the picture's edges, as viewers of scans do."""
        sides = ((0.5, 0.06, rows[0]), (0.5, 0.94, rows[1]))
        for x, y, letter in (*sides, (0.05, 0.5, columns[0]), (0.95, 0.5, columns[1])):
            self.axes.text(
                x, y, letter, transform=self.axes.transAxes, ha="center", va="center",
                color=LETTER_COLOUR, fontweight="bold", path_effects=LETTER_OUTLINE,
            )  # fmt: skip


def limits_of(planes: Sequence[NDArray[Any]], shares: tuple[float, float]) -> ValueRange:
    """Computes one range of values for all planes: the percentiles ``shares`` of finite ones."""
    every = np.concatenate([plane.ravel() for plane in planes])
    every = every[np.isfinite(every)]
    if not len(every):
        return 0.0, 1.0
    low, high = np.percentile(every, shares)
    return float(low), float(max(high, low + 1e-6))


def _extent(planes: Planes, axis: str) -> int:
    return planes.shape[SPATIAL_AXES.index(axis)]


def _cuts_of(shape: Sequence[int], run: Run) -> dict[str, Cut]:
    """Cuts a volume along each axis, into no more parts than voxels; one where it is not cut."""
    return {
        axis: Cut.balanced(axis, extent, min(extent, run.grid.get(axis, 1)))
        for axis, extent in zip(SPATIAL_AXES, shape, strict=True)
    }


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


def _halo_words(cuts: Mapping[str, Cut], window: Window) -> str:
    """Says how wide the halo is; empty where nothing is cut."""
    wide = [hi - lo for cut in cuts.values() for lo, hi in halo_intervals(cut, window)]
    if not wide:
        return ""
    return f"{max(wide)} voxel{'s' if max(wide) > 1 else ''}"


def _universe_blocks(run: Run) -> Iterator[Block]:
    try:
        planes = middle_planes(run)
    except HyperslabError as error:
        yield Notice(f"No universe of this run can be shown: {error}")
        return
    window = _first_window(run, planes.shape)
    cuts = _cuts_of(planes.shape, run)
    text = (
        f"{planes.sample}, {planes.quantity} of the first channel. Every sample of "
        f"{times(planes.shape)} voxels "
    )
    first = next((cut for cut in cuts.values() if cut.parts > 1), None)
    if first is None:
        text += "is held whole by one rank."
    else:
        boxes = times(cut.parts for cut in cuts.values())
        text += f"is cut into {boxes} boxes ({times(cuts)}); each rank reads, keeps and computes "
        text += "its own."
    if window is not None and (halo := _halo_words(cuts, window)):
        text += f" For the first convolution neighbours exchange a halo of {halo} (shaded)."
    yield text
    limits = limits_of(list(planes.values.values()), (1, 99.8))
    pictures = [_universe_plane(planes, across, cuts, window, limits) for across in SPATIAL_AXES]
    if first is not None and window is not None:
        pictures.append(_enlarged(planes, first, window, limits))
    yield Figures(pictures, "medium")


def _first_window(run: Run, shape: Sequence[int]) -> Window | None:
    """Returns the first convolution's window; None for a network that is not one of ours."""
    try:
        first = variant_of(str(run.setting("model.variant")), shape[0]).convolutions[0]
    except ValueError:
        return None
    return Window(first.kernel, stride=first.stride, before=first.padding, after=first.padding)


def _universe_plane(
    planes: Planes,
    across: str,
    cuts: Mapping[str, Cut],
    window: Window | None,
    limits: ValueRange,
) -> Picture:
    """Draws a middle plane with the cuts that cross it."""
    name = f"slice-{across}"
    canvas = PlaneCanvas(name, planes, across, limits, colours="magma", upwards=False)
    canvas.cuts(cuts, window, alpha=0.35)
    crossing = [f"{cuts[a].parts} along {a}" for a in canvas.sides if cuts[a].parts > 1]
    parts = int(np.prod([cuts[axis].parts for axis in canvas.sides]))
    shards = f"cut into {parts} shards: {times(crossing)}" if crossing else "not cut here"
    return canvas.picture(
        title=f"Across {across}",
        alt=f"Middle plane of a volume across {across}, {shards}.",
        caption=f"{canvas.where}, {shards}.",
    )


def _enlarged(planes: Planes, cut: Cut, window: Window, limits: ValueRange) -> Picture:
    """Draws the voxels around the first bound of ``cut``, halo and all."""
    across = "height" if cut.axis == "depth" else "depth"
    canvas = PlaneCanvas("slice-zoom", planes, across, limits, colours="magma", upwards=False)
    canvas.cuts({cut.axis: cut}, window, alpha=0.45)
    reach = min(ENLARGED_VOXELS, min(planes.shape) / 2)
    y, x = (
        cut.bounds[1] if axis == cut.axis else _extent(planes, axis) / 2 for axis in canvas.sides
    )
    canvas.axes.set_xlim((x - reach) * canvas.wide, (x + reach) * canvas.wide)
    canvas.axes.set_ylim((y + reach) * canvas.high, (y - reach) * canvas.high)
    wide = _halo_words({cut.axis: cut}, window)
    return canvas.picture(
        title="A cut, enlarged",
        alt=f"The voxels around a cut along {cut.axis}; a halo of {wide} lies on each side.",
        caption=f"Shaded: the halo of the first convolution, {wide}, "
        f"which each of the two neighbours gets from the other.",
    )


def class_colour(index: int) -> str:
    """Gives class ``index``, 1 or more, its colour; beyond the last they begin again."""
    return CLASS_COLOURS[(index - 1) % len(CLASS_COLOURS)]


def _scan_blocks(run: Run) -> Iterator[Block]:
    try:
        found = scans(run)
    except HyperslabError as error:
        yield Notice(f"No scan of this run can be shown: {error}")
        return
    if not found:
        yield Notice("The masks are those of an evaluation:", f"hyperslab evaluate {run.path}")
        return
    text = (
        "Test samples that the network never saw, on the lattice on which it sees them, in the "
        "planes through the centre of what is not background. Lines: the true mask. Filled: the "
        "predicted one."
    )
    if any(cut.parts > 1 for cut in _cuts_of(found[0].shape, run).values()):
        text += " Straight lines: where the grid cuts the volume."
    yield text
    classes = list(run.scores)
    yield Legend([(class_colour(i), name) for i, name in enumerate(classes) if i])
    window = run.setting("data.window")
    for place, scan in enumerate(found):
        cuts = _cuts_of(scan.shape, run)
        limits = tuple(window) if window else limits_of(list(scan.values.values()), (1, 99))
        yield Heading(scan.sample)
        names = {across: f"mask-{place}-{across}" for across in SPATIAL_AXES}
        pictures = [_mask_plane(scan, a, names[a], classes, limits, cuts) for a in SPATIAL_AXES]
        yield Figures(pictures, "medium")


def _mask_plane(
    scan: Scan,
    across: str,
    name: str,
    classes: Sequence[str],
    window: ValueRange,
    cuts: Mapping[str, Cut],
) -> Picture:
    """Draws a plane of a scan with its true and its predicted mask."""
    # Up is up: the indices grow towards head, front and right.
    canvas = PlaneCanvas(name, scan, across, window, colours="gray", upwards=True)
    true = scan.true[across]
    predicted = scan.predicted[across]
    canvas.image(_tinted(predicted))
    for index in range(1, len(classes)):
        if (true == index).any():
            canvas.outline(true == index, class_colour(index))
    canvas.cuts(cuts)
    scores = [
        f"{name} {number(dice)}"
        for index, name in enumerate(classes)
        if index and (dice := _plane_dice(true == index, predicted == index)) is not None
    ]
    found = f"Dice here: {', '.join(scores)}." if scores else "Nothing but background here."
    return canvas.picture(
        title=f"Across {across}",
        alt=f"Plane of {scan.sample} across {across} with the true and the predicted mask. {found}",
        caption=f"{canvas.where}. {found}",
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
