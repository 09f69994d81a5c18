"""Slices of scans with the true and the predicted mask drawn in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import to_rgba

from hyperslab.comm.grid import SPATIAL_AXES
from hyperslab.geometry import Cut
from hyperslab.report.figures.plane import PlaneCanvas, Range, limits_of, place_words
from hyperslab.report.figures.svg import Picture
from hyperslab.report.number_format import number
from hyperslab.report.samples.scans import Scan, Slice

# On the picture itself, so the same on a light and on a dark page; none is a grey.
COLOURS = ("#ff9d00", "#ff4fa3", "#00d6a1", "#ffe600", "#9f8bff", "#ff6b4a")
ALPHA = 0.4
"""Of the predicted mask, so that the scan below stays visible."""


def colour(index: int) -> str:
    """Of class ``index``, 1 or more; beyond the last colour they begin again."""
    return COLOURS[(index - 1) % len(COLOURS)]


def planes(
    scan: Scan, classes: Sequence[str], window: Range | None, cuts: Mapping[str, Cut], place: int
) -> list[Picture]:
    """The three planes of a scan, the ``place``-th that is shown."""
    limits = window or limits_of(list(scan.values.values()), (1, 99))
    return [_plane(scan, across, classes, limits, cuts, place) for across in SPATIAL_AXES]


def _plane(
    scan: Scan,
    across: str,
    classes: Sequence[str],
    window: Range,
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
            canvas.outline(true == index, colour(index))
    for axis, along in ((rows, "y"), (columns, "x")):
        canvas.cut(cuts[axis], along=along)
    extent = scan.shape[SPATIAL_AXES.index(across)]
    scores = [
        f"{name} {number(dice)}"
        for index, name in enumerate(classes)
        if index and (dice := _dice(true == index, predicted == index)) is not None
    ]
    found = f"Dice here: {', '.join(scores)}." if scores else "Nothing but background here."
    return canvas.canvas.picture(
        title=f"Across {across}",
        alt=f"Plane of {scan.sample} across {across} with the true and the predicted mask. {found}",
        caption=f"{place_words(scan.at[across], extent, across, scan.voxels)}. {found}",
    )


def _tinted(classes: Slice) -> Slice:
    """Each class in its colour (rows, columns, RGBA), the background transparent."""
    picture = np.zeros((*classes.shape, 4), np.float32)
    for index in np.unique(classes[classes > 0]):
        picture[classes == index] = to_rgba(colour(int(index)), ALPHA)
    return picture


def _dice(true: Slice, predicted: Slice) -> float | None:
    """In this plane; None where the class neither is nor is predicted."""
    union = int(true.sum()) + int(predicted.sum())
    return 2 * int((true & predicted).sum()) / union if union else None
