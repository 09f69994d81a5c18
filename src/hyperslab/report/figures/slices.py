"""Slices of a universe with the cut of the grid drawn in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.patheffects as effects
import numpy as np
from numpy.typing import NDArray

from hyperslab.comm.grid import SPATIAL_AXES
from hyperslab.geometry import Cut, Window
from hyperslab.report.figures.svg import Canvas, Picture
from hyperslab.report.number_format import times
from hyperslab.report.samples.universe import Planes

CUT_COLOUR = "#7fd4ff"  # on the picture itself, so the same on a light and on a dark page
OUTLINE = (effects.withStroke(linewidth=3, foreground="black"),)
ZOOM = 12
"""Voxels either side of a cut in the enlarged picture."""


def cuts_of(shape: Sequence[int], grid: Mapping[str, int]) -> dict[str, Cut]:
    """How a volume is cut along each axis; one part where it is not."""
    return {
        axis: Cut.balanced(axis, extent, grid.get(axis, 1))
        for axis, extent in zip(SPATIAL_AXES, shape, strict=True)
    }


def universe(planes: Planes, cuts: Mapping[str, Cut], window: Window | None) -> list[Picture]:
    """The middle planes, each with the cuts that cross it, and one cut enlarged.

    ``window`` is the first convolution's; it gives the halo.
    """
    pictures = [_plane(planes, across, cuts, window) for across in SPATIAL_AXES]
    first = next((axis for axis in SPATIAL_AXES if cuts[axis].parts > 1), None)
    if first is not None and window is not None:
        pictures.append(_enlarged(planes, cuts[first], window))
    return pictures


def halos(cut: Cut, window: Window) -> list[tuple[int, int]]:
    """The intervals along ``cut`` that some shard reads and does not own.

    >>> halos(Cut.balanced("depth", 8, 2), Window(3, before=1, after=1))
    [(4, 5), (3, 4)]
    """
    found = []
    outputs = window.cut_outputs(cut, window.outputs(cut.extent))
    for (lo, hi), out in zip(cut.intervals, outputs.intervals, strict=True):
        reads = window.reads(out)
        found += [(max(reads[0], 0), lo), (hi, min(reads[1], cut.extent))]
    return [(lo, hi) for lo, hi in found if lo < hi]


def halo_words(cuts: Mapping[str, Cut], window: Window) -> str:
    """The width of the halo in words; empty where nothing is cut."""
    wide = [hi - lo for cut in cuts.values() for lo, hi in halos(cut, window)]
    if not wide:
        return ""
    return f"{max(wide)} voxel{'s' if max(wide) > 1 else ''}"


def _plane(planes: Planes, across: str, cuts: Mapping[str, Cut], window: Window | None) -> Picture:
    rows, columns = (axis for axis in SPATIAL_AXES if axis != across)
    canvas = _image(f"slice-{across}", planes.values[across], rows, columns)
    draw_cut(canvas, cuts[rows], window, along="y")
    draw_cut(canvas, cuts[columns], window, along="x")
    crossing = [f"{cuts[a].parts} along {a}" for a in (rows, columns) if cuts[a].parts > 1]
    parts = cuts[rows].parts * cuts[columns].parts
    middle = planes.shape[SPATIAL_AXES.index(across)] // 2
    shards = f"cut into {parts} shards: {times(crossing)}" if crossing else "not cut here"
    return canvas.picture(
        title=f"Across {across}",
        alt=f"Middle plane of a universe across {across}, {shards}.",
        caption=f"Plane {middle} of {planes.shape[SPATIAL_AXES.index(across)]}, {shards}.",
    )


def _enlarged(planes: Planes, cut: Cut, window: Window) -> Picture:
    """The voxels around the first bound of ``cut``, halo and all."""
    across = "height" if cut.axis == "depth" else "depth"
    rows, columns = (axis for axis in SPATIAL_AXES if axis != across)
    canvas = _image("slice-zoom", planes.values[across], rows, columns)
    upright = cut.axis == columns
    draw_cut(canvas, cut, window, along="x" if upright else "y", alpha=0.45)
    bound = cut.bounds[1] - 0.5
    extents = dict(zip(SPATIAL_AXES, planes.shape, strict=True))
    other = extents[rows if upright else columns] / 2 - 0.5
    x, y = (bound, other) if upright else (other, bound)
    canvas.axes.set(xlim=(x - ZOOM, x + ZOOM), ylim=(y + ZOOM, y - ZOOM))
    wide = halo_words({cut.axis: cut}, window)
    return canvas.picture(
        title="A cut, enlarged",
        alt=f"The voxels around a cut along {cut.axis}; a halo of {wide} lies on each side.",
        caption=f"Shaded: the halo of the first convolution, {wide}, "
        f"which each of the two neighbours gets from the other.",
    )


def _image(name: str, values: NDArray[np.float64], rows: str, columns: str) -> Canvas:
    canvas = Canvas(name, width=240, height=240)
    low, high = np.percentile(values, [1, 99.8])
    canvas.axes.imshow(
        values, cmap="magma", vmin=low, vmax=max(high, low + 1e-6), interpolation="none"
    )
    canvas.axes.set(xlabel=columns, ylabel=rows)
    canvas.axes.grid(visible=False)
    canvas.axes.locator_params(nbins=5, integer=True)
    return canvas


def draw_cut(
    canvas: Canvas, cut: Cut, window: Window | None, *, along: str, alpha: float = 0.35
) -> None:
    """The bounds of ``cut`` as lines and its halos as bands, between voxels at half numbers.

    ``along`` is the axis of the picture, "x" or "y", that the cut divides.
    """
    line = canvas.axes.axvline if along == "x" else canvas.axes.axhline
    band = canvas.axes.axvspan if along == "x" else canvas.axes.axhspan
    for bound in cut.bounds[1:-1]:
        line(bound - 0.5, color=CUT_COLOUR, linewidth=1.6, path_effects=OUTLINE)
    for lo, hi in halos(cut, window) if window is not None and cut.parts > 1 else ():
        band(lo - 0.5, hi - 0.5, color=CUT_COLOUR, alpha=alpha, linewidth=0)
