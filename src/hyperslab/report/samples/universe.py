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
from hyperslab.report.samples.voxels import Voxels, voxels_of


@dataclass(frozen=True, slots=True)
class Planes:
    """The three middle planes of a volume; each is named by the axis it is across.

    ``values["depth"]`` is (height, width), and so on, of what ``quantity`` says.
    """

    sample: str
    shape: tuple[int, int, int]
    values: Mapping[str, NDArray[np.float64]]
    voxels: Voxels
    quantity: str


def middle_planes(run: Run) -> Planes:
    """The three middle planes of one sample, first channel; of counts log(1 + count).

    Raises:
        DataError: the folder of universes is not there, holds none, or the file is broken.
    """
    source = first_volume(run)
    _, *extents = source.shape_of(0)
    planes = {}
    counts = source.dtype.kind in "iu"
    try:
        for i, axis in enumerate(SPATIAL_AXES):
            lo = [0, 0, 0, 0]
            hi = [1, *extents]
            lo[i + 1] = extents[i] // 2
            hi[i + 1] = lo[i + 1] + 1
            values = source.read(0, Box(tuple(lo), tuple(hi))).squeeze((0, i + 1))
            planes[axis] = values.astype(np.float64)
        voxels = voxels_of(source, 0)
    finally:
        source.close()
    quantity = "value"
    if counts or min(float(plane.min()) for plane in planes.values()) >= 0:
        quantity = "log(1 + count)" if counts else "log(1 + value)"
        planes = {axis: np.log1p(plane.clip(min=0)) for axis, plane in planes.items()}
    shape = (extents[0], extents[1], extents[2])
    return Planes(source.names[0], shape, planes, voxels, quantity)
