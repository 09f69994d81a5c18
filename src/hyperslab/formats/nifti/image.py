"""NIfTI files: volumes in one orientation, and masks back in the orientation of their volume.

In memory a volume is (D, H, W): D grows from inferior to superior, H from posterior to anterior, W
from left to right (NIfTI's RAS+ axes in the order z, y, x). The axes of the file are permuted and
flipped to the closest ones of these, never rotated: an oblique scan stays oblique, and its affine
says so.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.atomic_files import created_aside
from hyperslab.errors import DataError
from hyperslab.formats.nifti import lattice
from hyperslab.formats.nifti.header import (
    NIFTI,
    affine_of,
    dtype_of,
    load_image,
    order_of,
    orientation,
    voxels,
)
from hyperslab.formats.parameters import Floats
from hyperslab.formats.shared import optional
from hyperslab.formats.shared.checks import ANY, naming

NIFTI_SUFFIXES = (".nii", ".nii.gz")

FASTEST = 1
"""Of gzip: nibabel's."""

CANONICAL = ((0, 1), (1, 1), (2, 1))


@dataclass(frozen=True, slots=True)
class CtVolume:
    """One volume of a NIfTI file.

    ``values`` (D, H, W), of `read_channels` (C, D, H, W): int16 where the file's numbers are such,
    else float32, slope and intercept applied (HU for a CT). ``affine`` (4, 4) maps (d, h, w, 1) to
    (x, y, z, 1) [mm] in RAS+. The file's own are ``header``, ``stored_shape`` and ``stored_affine``
    (of i, j, k).
    """

    path: Path
    values: NDArray[Any]
    affine: Floats
    header: Any
    stored_shape: tuple[int, ...]
    stored_affine: Floats

    @property
    def spacing(self) -> Floats:
        """The size of a voxel along D, H and W [mm]."""
        return lattice.spacing(self.affine)

    @property
    def orientation(self) -> str:
        """Where the file's axes i, j, k point: ``"LPS"`` is left, posterior, superior."""
        return "".join(optional.nibabel().aff2axcodes(self.stored_affine))


def read(path: Path) -> CtVolume:
    """Read a volume.

    Raises:
        DataError: the file is no NIfTI file or damaged, is not 3-D, has no voxels, holds NaN or
            infinite values or one and the same everywhere, or does not say how it is oriented.
        HyperslabError: the extra ``medical`` is not installed.
    """
    volume = _load(path)
    _check_values(volume)
    return volume


def read_channels(paths: Sequence[Path]) -> CtVolume:
    """Read a volume (C, D, H, W): channels along a file's fourth dim, or each in a file.

    Raises:
        DataError: as `read`, but a file may be 4-D; or the files differ in shape or place, or have
            several channels each.
    """
    first, *others = [_load(path, channels=True) for path in paths]
    for path, other in zip(paths[1:], others, strict=True):
        if other.values.shape != first.values.shape or len(other.values) != 1:
            raise DataError(
                f"{path}: is {other.values.shape} (C, D, H, W) but {paths[0].name} is "
                f"{first.values.shape}; each channel has a file, and all have one shape"
            )
        _check_place(other, first)
    if others:
        values = np.concatenate([volume.values for volume in (first, *others)])
        first = replace(first, values=values)
    _check_values(first)
    return first


def read_labels(path: Path, like: CtVolume, classes: int) -> NDArray[np.uint8]:
    """Read the class of every voxel (D, H, W) of the volume ``like``: 0 .. classes - 1.

    The file may store its axes otherwise than the volume's; the voxels must be at the same places,
    to half a voxel.

    Raises:
        DataError: as `read`; or another shape or place than ``like``; or other numbers.
    """
    labels = _load(path, channels=True)
    if len(labels.values) != 1:
        raise DataError(f"{path}: has {len(labels.values)} channels; needs one label a voxel")
    labels = replace(labels, values=labels.values[0])
    if labels.values.shape != like.values.shape:
        ours, theirs = (" x ".join(map(str, v.values.shape)) for v in (labels, like))
        raise DataError(f"{path}: has {ours} voxels (D x H x W) but {like.path.name} has {theirs}")
    _check_place(labels, like)
    whole = _whole(path, labels.values)
    low = whole.min()
    high = whole.max()
    if low < 0 or high >= classes:
        raise DataError(f"{path}: holds labels {low:g} to {high:g}; needs 0 to {classes - 1}")
    return whole.astype(np.uint8)


def write_mask(path: Path, mask: NDArray[np.uint8], like: CtVolume) -> None:
    """Write a mask (d, h, w) on any lattice over the extent of ``like``, on like's own lattice.

    Resampled to the nearest; orientation, shape, affine and the rest of the header are those of the
    file that ``like`` was read from. The name appears when the file is complete.

    Raises:
        DataError: the name does not end in .nii or .nii.gz, or the file cannot be written.
    """
    orientations = optional.nibabel().orientations
    mask = lattice.nearest(mask.astype(np.uint8), like.values.shape[-3:]).transpose(2, 1, 0)
    back = orientations.ornt_transform(CANONICAL, orientations.io_orientation(like.stored_affine))
    header = like.header.copy()
    header["cal_min"] = header["cal_max"] = 0  # the window in which a viewer shows the CT
    save_image(path, orientations.apply_orientation(mask, back), np.dtype(np.uint8), None, header)


def save_image(
    path: Path,
    values: NDArray[Any],
    dtype: np.dtype[Any],
    affine: Floats | None,
    header: Any,
) -> None:
    """Write the values (i, j, k) as ``dtype``; without ``affine`` the header's is kept.

    Raises:
        DataError: see `write_mask`.
    """
    nibabel = optional.nibabel()
    suffix = next((s for s in reversed(NIFTI_SUFFIXES) if path.name.endswith(s)), None)
    if suffix is None:
        raise DataError(f"{path}: the name of a NIfTI file ends in {' or '.join(NIFTI_SUFFIXES)}")
    kind = nibabel.Nifti2Image if isinstance(header, nibabel.Nifti2Header) else nibabel.Nifti1Image
    image = kind(values, affine, header, dtype=dtype)
    try:
        with created_aside(path, concurrent=True) as file:
            if suffix == ".nii":
                image.to_stream(file)
                return
            with gzip.GzipFile("", "wb", FASTEST, file, mtime=0) as pack:
                image.to_stream(pack)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error


def _load(path: Path, *, channels: bool = False) -> CtVolume:
    """A volume (D, H, W), or with ``channels`` (C, D, H, W)."""
    with naming(path, NIFTI, ANY):
        image = load_image(path)
        turned = orientation(path, image, channels=channels)
        order = order_of(turned, len(image.shape))
        with voxels(path, image) as proxy:
            values = order.to_volume(_values(image, proxy))
        affine = affine_of(image, turned)[:, [2, 1, 0, 3]]
    if not channels:
        (values,) = values
    return CtVolume(path, values, affine, image.header, image.shape, image.affine)


def _check_values(volume: CtVolume) -> None:
    """Refuse a volume that cannot be one.

    Raises:
        DataError: NaN or infinite values, or one and the same everywhere.
    """
    low = volume.values.min()
    high = volume.values.max()
    if not (math.isfinite(low) and math.isfinite(high)):
        raise DataError(f"{volume.path}: holds NaN or infinite values")
    if low == high:
        raise DataError(f"{volume.path}: is empty: every voxel is {low:g}")


def _values(image: Any, proxy: Any) -> NDArray[Any]:
    """The numbers (i, j, k) of a proxy of the image, slope and intercept applied."""
    dtype = dtype_of(image)
    if (proxy.slope, proxy.inter) != (1, 0):
        return np.asarray(proxy, dtype)
    return proxy.get_unscaled().astype(dtype, copy=False)


def _whole(path: Path, labels: NDArray[Any]) -> NDArray[Any]:
    if labels.dtype.kind == "i":
        return labels
    whole = np.rint(labels)
    if not np.abs(labels - whole).max() < 1e-3:  # NaN too; a slope may round
        raise DataError(f"{path}: holds labels that are no whole numbers")
    return whole


def _check_place(one: CtVolume, like: CtVolume) -> None:
    """Nothing, if the voxels of a volume are where those of ``like``, of one shape, are.

    Raises:
        DataError: their corners are more than half a voxel of ``like`` apart.
    """
    corners = np.array(list(np.ndindex(2, 2, 2))) * (np.array(like.values.shape[-3:]) - 1)
    indices = np.c_[corners, np.ones(8)].T
    there = np.linalg.inv(like.affine) @ one.affine @ indices
    off = float(np.abs(there - indices).max())
    if not off <= 0.5:
        raise DataError(
            f"{one.path}: its affine is off by {off:.3g} voxels from {like.path.name}'s"
        )
