"""Resamples volumes between lattices of voxels over one extent, and gives the lattices' affines.

A lattice of n voxels along a dim divides the extent into n equal cells and has its values at
their centres. The centre of cell j of s lies at (j + 1/2)·n/s - 1/2, counted in the cells of a
lattice of n. So no lattice is shifted against another, and halving averages pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.formats import optional
from hyperslab.formats.targets import Floats
from hyperslab.geometry import Box

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
    whole = Box.whole(shape)
    return blurred_linear_box(lambda box: values[box.slices()], values.shape, whole, shape)


def blurred_linear_box(
    read: Callable[[Box], NDArray[Any]], extents: Sequence[int], box: Box, shape: Sequence[int]
) -> NDArray[np.float32]:
    """Resamples as `blurred_linear` the values of a ``box`` of the lattice of ``shape``.

    ``read`` gives boxes (d, h, w) of the values, of which there are ``extents``; no more of them
    are read than the box needs, so ranks can share the work.
    """
    ratios = [old / new for old, new in zip(extents, shape, strict=True)]
    intervals = []
    for lo, hi, old, ratio in zip(box.lo, box.hi, extents, ratios, strict=True):
        # Four widths of the Gaussian hold all but 1e-4 of it: more than the kernel does.
        margin = 2 + math.ceil(4 * math.sqrt(_variance(ratio)))
        first = math.floor((lo + 0.5) * ratio - 0.5) - margin
        last = math.ceil((hi - 0.5) * ratio - 0.5) + margin
        intervals.append((max(0, first), min(old, last + 1)))
    held = Box.of(intervals)
    itk = optional.simple_itk()
    image = itk.GetImageFromArray(np.ascontiguousarray(read(held), np.float32))
    variances = [_variance(ratio) for ratio in ratios][::-1]
    if any(variances):
        image = itk.DiscreteGaussian(image, variances, WIDEST, 0.01, False)
    places = zip(box.lo, held.lo, ratios, strict=True)
    place = [(ratio - 1) / 2 + lo * ratio - first for lo, first, ratio in places][::-1]
    size = [int(extent) for extent in box.shape][::-1]
    found = itk.Resample(
        image,
        size,
        itk.Transform(),
        itk.sitkLinear,
        place,
        ratios[::-1],
        image.GetDirection(),
        0.0,
        itk.sitkFloat32,
    )
    return np.asarray(itk.GetArrayFromImage(found))


def _variance(ratio: float) -> float:
    """Computes the variance of the Gaussian of a dim that becomes ``ratio`` times as coarse."""
    return max(ratio**2 - 1, 0) / (8 * math.log(2))


def nearest(values: NDArray[Any], shape: Sequence[int]) -> NDArray[Any]:
    """Resamples (D, H, W) to a lattice of ``shape``, each from the cell its centre lies in.

    A centre on the border of two cells takes the later one.

    >>> nearest(np.array([[[7, 8, 9]]]), (1, 1, 5))
    array([[[7, 7, 8, 9, 9]]])
    """
    whole = Box.whole(shape)
    return nearest_box(lambda box: values[box.slices()], values.shape, whole, shape)


def nearest_box(
    read: Callable[[Box], NDArray[Any]], extents: Sequence[int], box: Box, shape: Sequence[int]
) -> NDArray[Any]:
    """Resamples as `nearest` the values of a ``box`` of the lattice of ``shape``.

    ``read`` gives boxes (d, h, w) of the values, of which there are ``extents``.
    """
    cells = [
        (2 * np.arange(lo, hi) + 1) * old // (2 * new)
        for lo, hi, old, new in zip(box.lo, box.hi, extents, shape, strict=True)
    ]
    held = Box.of([(int(cell[0]), int(cell[-1]) + 1) for cell in cells])
    values = read(held)
    for dim, cell in enumerate(cells):
        if len(cell) != values.shape[dim] or extents[dim] != shape[dim]:
            values = np.take(values, cell - held.lo[dim], dim)
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
