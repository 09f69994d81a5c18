"""The header of a NIfTI file: its type, its orientation and its affine, checked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class NiftiHeader:
    """Shape (C, D, H, W), type and voxels' size (D, H, W) [mm] of a scan; the bytes of a label."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    voxel: tuple[float, ...]
    label_bytes: int


NIFTI = "NIfTI"

MILLIMETRES = {1: 1e3, 3: 1e-3}
"""By the header's unit, as metres and microns have it (nifti1.h, `xyzt_units`)."""

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


def orientation(path: Path, image: Any, *, channels: bool = False) -> NDArray[Any]:
    """How the file's axes become RAS+, once it is clear that the file says so.

    With ``channels`` it may have a fourth dim, which they are along.

    Raises:
        DataError: it does not, is not 3-D, has no voxels or is oblique.
    """
    extents = " x ".join(map(str, image.shape))
    if len(image.shape) != 3 and not (channels and len(image.shape) == 4):
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


def order_of(turn: NDArray[Any], ndim: int = 3) -> StorageOrder:
    """The order of a file's dims (i, j, k), given how they become RAS+; a fourth is the channels'.

    >>> order_of(np.array([[0, 1], [1, 1], [2, 1]]))  # x, y and z are W, H and D
    StorageOrder(dims='WHD', flipped='')
    """
    dims = "".join("WHD"[int(axis)] for axis, _ in turn)
    flipped = "".join("WHD"[int(axis)] for axis, flip in turn if flip < 0)
    return StorageOrder(dims + "C" * (ndim - 3), flipped)


def shape_of(image: Any, turn: NDArray[Any]) -> tuple[int, ...]:
    """The shape (C, D, H, W) of the volume."""
    return order_of(turn, len(image.shape)).volume_shape(image.shape)


def affine_of(image: Any, turn: NDArray[Any]) -> NDArray[Any]:
    """From (x, y, z, 1) of the turned file to [mm], which a file without a known unit has."""
    unit = MILLIMETRES.get(int(image.header["xyzt_units"]) & 7, 1.0)
    back = optional.nibabel().orientations.inv_ornt_aff(turn, image.shape[:3])
    return np.diag([unit, unit, unit, 1.0]) @ image.affine @ back


def read_pair_header(pair: Pair) -> NiftiHeader:
    """What a source needs to know of a volume and its labels.

    Raises:
        DataError: a file is not what it should be, or they do not belong together.
    """
    shape, dtype, affine, _ = _read_header(pair.image)
    for path in pair.channels:
        other, kind, place, _ = _read_header(path)
        if (shape[0], other[0]) != (1, 1):
            raise DataError(f"{path}: a channel of {pair.image.name} has its own file and is 3-D")
        _check_place(path, other, place, pair.image, shape, affine)
        dtype = np.promote_types(dtype, kind)
    labels, _, place, label_bytes = _read_header(pair.labels)
    if labels[0] != 1:
        raise DataError(f"{pair.labels}: has {labels[0]} channels; needs one label a voxel")
    _check_place(pair.labels, labels, place, pair.image, shape, affine)
    voxel = tuple(np.linalg.norm(affine[:3, 2::-1], axis=0).tolist())
    return NiftiHeader((max(shape[0], len(pair.images)), *shape[1:]), dtype, voxel, label_bytes)


def _read_header(path: Path) -> tuple[tuple[int, ...], np.dtype[Any], NDArray[Any], int]:
    """Shape (C, D, H, W), type, affine of (x, y, z, 1), and the bytes of a stored voxel."""
    with naming(path, NIFTI, ANY):
        image = load_image(path)
        turn = orientation(path, image, channels=True)
        affine = affine_of(image, turn)
        return shape_of(image, turn), dtype_of(image), affine, image.get_data_dtype().itemsize


def _check_place(
    path: Path,
    found: tuple[int, ...],
    place: NDArray[Any],
    like: Path,
    shape: tuple[int, ...],
    affine: NDArray[Any],
) -> None:
    """Nothing, if the voxels of ``path`` are where those of the file ``like`` are.

    Raises:
        DataError: they are others, or half a voxel away.
    """
    if found[1:] != shape[1:]:
        raise DataError(f"{path}: has {found[1:]} voxels (D, H, W) but {like.name} has {shape[1:]}")
    corners = np.array(list(np.ndindex(2, 2, 2))) * (np.array(shape[:0:-1]) - 1)
    indices = np.c_[corners, np.ones(8)].T
    off = np.abs(np.linalg.inv(affine) @ place @ indices - indices).max()
    if not off <= 0.5:
        raise DataError(f"{path}: its affine is off by {off:.3g} voxels from {like.name}'s")
