"""Slices of one universe of a run's data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyperslab.comm.grid import SPATIAL_AXES
from hyperslab.geometry import Box
from hyperslab.report.run_folder import Run
from hyperslab.report.samples.volumes import first_volume


@dataclass(frozen=True, slots=True)
class Planes:
    """The three middle planes of a volume; each is named by the axis it is across.

    ``values`` are log(1 + count). ``planes["depth"]`` is (height, width), and so on.
    """

    sample: str
    shape: tuple[int, int, int]
    values: Mapping[str, NDArray[np.float64]]


def middle_planes(run: Run) -> Planes:
    """The three middle planes of one sample, first channel, as log(1 + count).

    Raises:
        DataError: the folder of universes is not there, holds none, or the file is broken.
    """
    source = first_volume(run)
    _, *extents = source.shape
    planes = {}
    try:
        for i, axis in enumerate(SPATIAL_AXES):
            lo = [0, 0, 0, 0]
            hi = [1, *extents]
            lo[i + 1] = extents[i] // 2
            hi[i + 1] = lo[i + 1] + 1
            values = source.read(0, Box(tuple(lo), tuple(hi))).squeeze((0, i + 1))
            planes[axis] = np.log1p(values.astype(np.float64))
    finally:
        source.close()
    return Planes(source.names[0], (extents[0], extents[1], extents[2]), planes)
