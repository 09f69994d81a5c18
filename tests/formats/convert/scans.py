"""NIfTI files written by hand."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

nib = pytest.importorskip("nibabel", reason="the extra `medical` is not installed")

ORIENTATIONS = [
    "".join(letters)
    for axes in itertools.permutations(("RL", "AP", "SI"))
    for letters in itertools.product(*axes)
]
"""All 48, as the directions of the axes i, j, k."""

SPACING = (0.7, 0.8, 2.5)  # along x, y, z [mm]


def affine_of(spacing: tuple[float, ...] = SPACING, tilt: float = 0.0) -> NDArray[np.float64]:
    """RAS+, the axes turned by ``tilt`` degrees about x."""
    c, s = np.cos(np.radians(tilt)), np.sin(np.radians(tilt))
    affine = np.eye(4)
    affine[:3, :3] = np.array([[1, 0, 0], [0, c, -s], [0, s, c]]) @ np.diag(spacing)
    affine[:3, 3] = -100, 20, 7
    return affine


def numbers(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.int16]:
    return np.random.default_rng(seed).integers(-1024, 2000, shape).astype(np.int16)


def classes(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 3, shape).astype(np.uint8)


def write(
    path: Path,
    xyz: NDArray[Any],
    orientation: str = "RAS",
    *,
    affine: NDArray[np.float64] | None = None,
    kind: Any = nib.Nifti1Image,
    **header: Any,
) -> Path:
    """Write values (x, y, z) of RAS+ with the axes in the order and directions given."""
    image = kind(xyz, affine_of() if affine is None else affine, dtype=header.pop("dtype", None))
    turn = nib.orientations.ornt_transform(
        nib.io_orientation(image.affine), nib.orientations.axcodes2ornt(orientation)
    )
    image = image.as_reoriented(turn)
    for key, value in header.items():
        image.header[key] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    image.to_filename(path)
    return path
