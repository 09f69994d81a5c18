"""Resamples volumes between lattices of voxels over one extent, and gives the lattices' affines.

A lattice of n voxels along a dim divides the extent into n equal cells and has its values at
their centres. The centre of cell j of s lies at (j + 1/2)·n/s - 1/2, counted in the cells of a
lattice of n. So no lattice is shifted against another, and halving averages pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.formats import optional
from hyperslab.formats.targets import Floats

WIDEST = 4096
"""The widest kernel of a Gaussian [voxels]: more than any needs."""


def blurred_linear(values: NDArray[Any], shape: Sequence[int]) -> NDArray[np.float32]:
    """Resamples the values (D, H, W) to a lattice of ``shape``, by SimpleITK.

    Along dims that become coarser a Gaussian first takes away what the new lattice cannot show, of
    the width that makes the old cells as blurred as the new ones (Cardoso et al. 2015, Scale factor
    point spread function matching, equation 8); then values are linear between the nearest centres.
    Beyond the outermost centres they go on unchanged.

    >>> blurred_linear(np.array([[[0, 10, 20, 40]]]), (1, 1, 8)).tolist()
    [[[0.0, 2.5, 7.5, 12.5, 17.5, 25.0, 35.0, 40.0]]]
    >>> blurred_linear(np.array([[[5, 5, 5, 5]]]), (1, 1, 2)).tolist()
    [[[5.0, 5.0]]]

    Raises:
        HyperslabError: the extra ``medical`` is not installed.
    """
    if tuple(shape) == values.shape:
        return values.astype(np.float32, copy=False)
    itk = optional.library("SimpleITK")
    image = itk.GetImageFromArray(np.ascontiguousarray(values, np.float32))
    ratios = [old / new for old, new in zip(values.shape, shape, strict=True)][::-1]
    variances = [max(ratio**2 - 1, 0) / (8 * math.log(2)) for ratio in ratios]
    if any(variances):
        image = itk.DiscreteGaussian(image, variances, WIDEST, 0.01, False)
    place = [(ratio - 1) / 2 for ratio in ratios]
    size = [int(extent) for extent in shape][::-1]
    direction = image.GetDirection()
    found = itk.Resample(
        image, size, itk.Transform(), itk.sitkLinear, place, ratios, direction, 0.0, itk.sitkFloat32
    )
    return np.asarray(itk.GetArrayFromImage(found))


def nearest(values: NDArray[Any], shape: Sequence[int]) -> NDArray[Any]:
    """Resamples (D, H, W) to a lattice of ``shape``, each from the cell its centre lies in.

    A centre on the border of two cells takes the later one.

    >>> nearest(np.array([[[7, 8, 9]]]), (1, 1, 5))
    array([[[7, 7, 8, 9, 9]]])
    """
    for dim, size in enumerate(shape):
        extent = values.shape[dim]
        if size != extent:
            values = np.take(values, (2 * np.arange(size) + 1) * extent // (2 * size), dim)
    return values


def resampled_affine(affine: Floats, old: Sequence[int], new: Sequence[int]) -> Floats:
    """Computes the affine (4, 4) of a lattice ``new`` over the extent of ``old``.

    Both map indices in the order of the shapes, which are the numbers of voxels.
    """
    ratio = np.asarray(old) / np.asarray(new)
    indices = np.diag([*ratio, 1.0])
    indices[:-1, -1] = (ratio - 1) / 2
    return affine @ indices


def spacing(affine: Floats) -> Floats:
    """Computes the distance of neighbouring voxels along each dim, in the affine's unit."""
    return np.sqrt((affine[:3, :3] ** 2).sum(0))
