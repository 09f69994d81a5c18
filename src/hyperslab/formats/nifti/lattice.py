"""Lattices of voxels over one extent: resampling from one to another, and their affines.

A lattice of n voxels along a dim divides the extent into n equal cells and has its values at their
centres. The centre of cell j of s lies at (j + 1/2)·n/s - 1/2, counted in the cells of a lattice of
n. So no lattice is shifted against another, and halving averages pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.formats.parameters import Floats


def linear(values: NDArray[Any], shape: Sequence[int]) -> NDArray[np.float32]:
    """The values (D, H, W) on a lattice of ``shape``, linear between the nearest centres.

    Beyond the outermost centres the values go on unchanged.

    >>> linear(np.array([[[0, 10, 20, 40]]]), (1, 1, 2))
    array([[[ 5., 30.]]], dtype=float32)
    """
    for dim in sorted(range(values.ndim), key=lambda dim: shape[dim] / values.shape[dim]):
        values = _linear(values, dim, shape[dim])  # what shrinks most goes first: less to do
    return values.astype(np.float32, copy=False)


def nearest(values: NDArray[Any], shape: Sequence[int]) -> NDArray[Any]:
    """The values (D, H, W) on a lattice of ``shape``, each that of the cell its centre lies in.

    A centre on the border of two cells takes the later one.

    >>> nearest(np.array([[[7, 8, 9]]]), (1, 1, 5))
    array([[[7, 7, 8, 9, 9]]])
    """
    for dim, size in enumerate(shape):
        extent = values.shape[dim]
        if size != extent:
            values = np.take(values, (2 * np.arange(size) + 1) * extent // (2 * size), dim)
    return values


def resampled(affine: Floats, old: Sequence[int], new: Sequence[int]) -> Floats:
    """The affine (4, 4) of a lattice ``new`` over the extent of ``old``, which has ``affine``.

    Both map indices in the order of the shapes, which are the numbers of voxels.
    """
    ratio = np.asarray(old) / np.asarray(new)
    indices = np.diag([*ratio, 1.0])
    indices[:-1, -1] = (ratio - 1) / 2
    return affine @ indices


def spacing(affine: Floats) -> Floats:
    """The distance of neighbouring voxels along each dim, in the affine's unit."""
    return np.sqrt((affine[:3, :3] ** 2).sum(0))


def _linear(values: NDArray[Any], dim: int, size: int) -> NDArray[Any]:
    extent = values.shape[dim]
    if size == extent:
        return values
    place = ((np.arange(size) + 0.5) * (extent / size) - 0.5).clip(0, extent - 1)
    below = np.floor(place).astype(np.intp)
    weight = (place - below).astype(np.float32)
    weight = weight.reshape([size if d == dim else 1 for d in range(values.ndim)])
    result = np.take(values, below, dim).astype(np.float32)
    step = np.take(values, (below + 1).clip(max=extent - 1), dim).astype(np.float32)
    step -= result
    step *= weight
    result += step
    return result
