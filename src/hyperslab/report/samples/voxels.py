"""How large the voxels of a sample are, and where its axes point, as far as its files say so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hyperslab.comm.grid import SPATIAL_AXES
from hyperslab.formats.extras import Extras
from hyperslab.formats.selection import Selected
from hyperslab.formats.source import Source
from hyperslab.formats.subvolumes import Subvolumes
from hyperslab.universe.parameters import FIDUCIAL_H_0

DIRECTIONS = (("L", "R"), ("P", "A"), ("I", "S"))
"""The ends of x, y and z in RAS+: left and right, posterior and anterior, inferior and superior."""


@dataclass(frozen=True, slots=True)
class Voxels:
    """The size of a voxel by axis, in ``unit``, which is empty where sizes are counted in voxels.

    ``ends``: by axis, the letters of the patient's sides where it begins and ends; empty where
    they are not known.
    """

    sizes: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(SPATIAL_AXES, 1.0))
    unit: str = ""
    ends: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def title(self, axis: str) -> str:
        """Of an axis of a picture, such as ``height [mm]``."""
        return f"{axis} [{self.unit}]" if self.unit else axis


def voxels_of(source: Source, sample: int) -> Voxels:
    """Those of a sample, from the file's affine [mm], or from the side of a simulated universe.

    Raises:
        DataError: the file cannot be read.
    """
    while isinstance(source, (Subvolumes, Selected)):  # their parts have the voxels of the whole
        sample = sample // len(source.places) if isinstance(source, Subvolumes) else sample
        source = source.source
    extras = source.extras(sample)
    if extras.affine is not None:
        return of_affine(extras.affine)
    side = _side(extras)
    if side is None:
        return Voxels()
    extents = zip(SPATIAL_AXES, source.shape_of(sample)[1:], strict=True)
    return Voxels({axis: side / extent for axis, extent in extents}, "Mpc/h")


def of_affine(affine: object) -> Voxels:
    """From (d, h, w, 1) to (x, y, z, 1) [mm], RAS+, as each axis points for the most part.

    >>> of_affine([[0, 0, -2, 0], [0, 1, 0, 0], [5, 0, 0, 0], [0, 0, 0, 1]]).ends["width"]
    ('R', 'L')
    """
    turns = np.asarray(affine, np.float64)[:3, :3]
    sizes = np.linalg.norm(turns, axis=0)
    if not (np.isfinite(sizes).all() and (sizes > 0).all()):
        return Voxels()
    ends = {}
    for axis, column in zip(SPATIAL_AXES, turns.T, strict=True):
        main = int(np.abs(column).argmax())
        low, high = DIRECTIONS[main]
        ends[axis] = (low, high) if column[main] > 0 else (high, low)
    return Voxels(dict(zip(SPATIAL_AXES, sizes.tolist(), strict=True)), "mm", ends)


def _side(extras: Extras) -> float | None:
    """The side [Mpc/h] that `hyperslab simulate` notes, for this universe's own H_0."""
    box = extras.attributes.get("box_size")
    physical = extras.arrays.get("physPar")
    if not isinstance(box, (int, float)) or physical is None or "H_0" not in extras.names:
        return None
    side = float(box) * float(physical[extras.names.index("H_0")]) / FIDUCIAL_H_0
    return side if np.isfinite(side) and side > 0 else None
