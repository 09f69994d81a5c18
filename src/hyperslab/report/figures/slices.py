"""Slices of a universe with the cut of the grid drawn in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hyperslab.comm.grid import SPATIAL_AXES
from hyperslab.geometry import Cut, Window
from hyperslab.report.figures.plane import PlaneCanvas, Range, limits_of, place_words
from hyperslab.report.figures.svg import Picture
from hyperslab.report.number_format import times
from hyperslab.report.samples.universe import Planes

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
    limits = limits_of(list(planes.values.values()), (1, 99.8))
    pictures = [_plane(planes, across, cuts, window, limits) for across in SPATIAL_AXES]
    first = next((axis for axis in SPATIAL_AXES if cuts[axis].parts > 1), None)
    if first is not None and window is not None:
        pictures.append(_enlarged(planes, cuts[first], window, limits))
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


def _plane(
    planes: Planes, across: str, cuts: Mapping[str, Cut], window: Window | None, limits: Range
) -> Picture:
    rows, columns = (axis for axis in SPATIAL_AXES if axis != across)
    canvas = _drawn(planes, f"slice-{across}", across, limits)
    for axis, along in ((rows, "y"), (columns, "x")):
        canvas.cut(cuts[axis], along=along, halos=_shared(cuts[axis], window), alpha=0.35)
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


def _enlarged(planes: Planes, cut: Cut, window: Window, limits: Range) -> Picture:
    """The voxels around the first bound of ``cut``, halo and all."""
    across = "height" if cut.axis == "depth" else "depth"
    rows, columns = (axis for axis in SPATIAL_AXES if axis != across)
    canvas = _drawn(planes, "slice-zoom", across, limits)
    upright = cut.axis == columns
    canvas.cut(cut, along="x" if upright else "y", halos=_shared(cut, window), alpha=0.45)
    bound = cut.bounds[1]
    extents = dict(zip(SPATIAL_AXES, planes.shape, strict=True))
    other = extents[rows if upright else columns] / 2
    x, y = (bound, other) if upright else (other, bound)
    canvas.zoom(x, y, min(ZOOM, min(extents.values()) / 2))
    wide = halo_words({cut.axis: cut}, window)
    return canvas.canvas.picture(
        title="A cut, enlarged",
        alt=f"The voxels around a cut along {cut.axis}; a halo of {wide} lies on each side.",
        caption=f"Shaded: the halo of the first convolution, {wide}, "
        f"which each of the two neighbours gets from the other.",
    )


def _drawn(planes: Planes, name: str, across: str, limits: Range) -> PlaneCanvas:
    rows, columns = (axis for axis in SPATIAL_AXES if axis != across)
    values = planes.values[across]
    canvas = PlaneCanvas(
        name, values.shape, planes.voxels, rows=rows, columns=columns, upwards=False
    )
    canvas.values(values, limits, colours="magma", quantity=planes.quantity)
    return canvas


def _shared(cut: Cut, window: Window | None) -> list[tuple[int, int]]:
    return halos(cut, window) if window is not None and cut.parts > 1 else []
