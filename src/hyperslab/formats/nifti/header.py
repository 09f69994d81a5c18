"""The header of a NIfTI file: its type, its orientation and its affine, checked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import DataError
from hyperslab.formats.nifti.pairs import Pair
from hyperslab.formats.shared import optional
from hyperslab.formats.shared.checks import ANY, naming
from hyperslab.formats.shared.packed_file import check_packed, opened_to_end
from hyperslab.formats.shared.storage_order import StorageOrder

NiftiHeader = tuple[tuple[int, ...], np.dtype[Any], int]
"""Shape (D, H, W) and type of a volume, and the bytes of a label."""

NIFTI = "NIfTI"

OBLIQUE = 35.0
"""How far [degrees] an axis may be from the patient's: gantries tilt by up to 30."""


def load_image(path: Path) -> Any:
    """The file's header and a proxy of its voxels.

    Raises:
        DataError: it is no NIfTI file; call it within `naming` for what the library raises.
    """
    nibabel = optional.nibabel()
    image = nibabel.load(path, mmap=False)
    if not isinstance(image, nibabel.Nifti1Image):
        raise DataError(f"{path}: is no NIfTI file but a {type(image).__name__}")
    if image.get_data_dtype().kind not in "iuf":
        raise DataError(f"{path}: holds {image.get_data_dtype()} voxels; needs numbers")
    if is_packed(path):
        check_packed(path, _end(image))
    return image


def _end(image: Any) -> int:
    """Where in the file the voxels end [B]."""
    size = math.prod(image.shape) * image.get_data_dtype().itemsize
    return int(image.dataobj.offset) + size


def is_packed(path: Path) -> bool:
    """By the name, as nibabel takes it."""
    return path.name.endswith(".gz")


@contextmanager
def voxels(path: Path, image: Any) -> Iterator[Any]:
    """The proxy of all voxels of an image, of which afterwards the sum of gzip is compared.

    Raises:
        DataError: see `opened_to_end`.
        EOFError: the file ends too early.
    """
    if not is_packed(path):
        if path.stat().st_size < _end(image):
            raise EOFError(f"it has {path.stat().st_size} of {_end(image)} bytes")
        yield image.dataobj
        return
    with opened_to_end(path) as file:
        holder = optional.nibabel().FileHolder(fileobj=file)
        yield type(image).from_file_map({"image": holder}, mmap=False).dataobj


def dtype_of(image: Any) -> np.dtype[Any]:
    """int16 where the file's numbers are such and are not scaled, else float32."""
    scaled = (image.dataobj.slope, image.dataobj.inter) != (1, 0)
    exact = np.can_cast(image.get_data_dtype(), np.int16) and not scaled
    return np.dtype(np.int16 if exact else np.float32)


def orientation(path: Path, image: Any) -> NDArray[Any]:
    """How the file's axes become RAS+, once it is clear that the file says so.

    Raises:
        DataError: it does not, is not 3-D, has no voxels or is oblique.
    """
    extents = " x ".join(map(str, image.shape))
    if len(image.shape) != 3:
        raise DataError(f"{path}: is {len(image.shape)}-D, {extents}; needs one volume")
    if 0 in image.shape:
        raise DataError(f"{path}: is empty: {extents} voxels")
    if not (image.header["sform_code"] > 0 or image.header["qform_code"] > 0):
        raise DataError(
            f"{path}: does not say where left is (sform_code and qform_code are 0); set one of them"
        )
    sizes = np.linalg.norm(image.affine[:3, :3], axis=0)
    if not (np.isfinite(image.affine).all() and (sizes > 0).all()):
        raise DataError(f"{path}: its affine has no inverse: {image.affine[:3].tolist()}")
    found = optional.nibabel().io_orientation(image.affine)
    if not np.isnan(found).any():
        cosines = np.abs(image.affine[found[:, 0].astype(int), range(3)]) / sizes
        if cosines.min() >= math.cos(math.radians(OBLIQUE)):
            return found
    raise DataError(
        f"{path}: an axis is more than {OBLIQUE:g} degrees from the patient's; resample it first"
    )


def order_of(turn: NDArray[Any]) -> StorageOrder:
    """The order of a file's dims (i, j, k), given how they become RAS+.

    >>> order_of(np.array([[0, 1], [1, 1], [2, 1]]))  # x, y and z are W, H and D
    StorageOrder(dims='WHD', flipped='')
    """
    dims = "".join("WHD"[int(axis)] for axis, _ in turn)
    return StorageOrder(dims, "".join("WHD"[int(axis)] for axis, flip in turn if flip < 0))


def shape_of(image: Any, turn: NDArray[Any]) -> tuple[int, ...]:
    """The shape (D, H, W) of the volume."""
    return order_of(turn).volume_shape(image.shape)[1:]


def affine_of(image: Any, turn: NDArray[Any]) -> NDArray[Any]:
    """From (x, y, z, 1) of the turned file to [mm]."""
    return image.affine @ optional.nibabel().orientations.inv_ornt_aff(turn, image.shape)


def read_pair_header(pair: Pair) -> NiftiHeader:
    """What a source needs to know of a volume and its labels.

    Raises:
        DataError: one of the two is not what it should be, or they do not belong together.
    """
    with naming(pair.image, NIFTI, ANY):
        image = load_image(pair.image)
        turn = orientation(pair.image, image)
        shape = shape_of(image, turn)
        dtype = dtype_of(image)
        affine = affine_of(image, turn)
    with naming(pair.labels, NIFTI, ANY):
        labels = load_image(pair.labels)
        turn = orientation(pair.labels, labels)
        if shape_of(labels, turn) != shape:
            raise DataError(
                f"{pair.labels}: has {shape_of(labels, turn)} voxels (D, H, W) but "
                f"{pair.image.name} has {shape}"
            )
        corners = np.array(list(np.ndindex(2, 2, 2))) * (np.array(shape[::-1]) - 1)
        indices = np.c_[corners, np.ones(8)].T
        off = np.abs(np.linalg.inv(affine) @ affine_of(labels, turn) @ indices - indices).max()
        if not off <= 0.5:
            raise DataError(
                f"{pair.labels}: its affine is off by {off:.3g} voxels from {pair.image.name}'s"
            )
    return shape, dtype, labels.get_data_dtype().itemsize
