"""Reads NIfTI headers and volumes in one orientation, and writes masks back in the volume's own.

In memory a volume is (D, H, W): D grows from inferior to superior, H from posterior to anterior,
W from left to right (NIfTI's RAS+ axes in the order z, y, x). The axes of the file are permuted
and flipped to the closest ones of these, never rotated: an oblique scan stays oblique, and its
affine says so.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import DataError
from hyperslab.formats import optional
from hyperslab.formats.files import ANY, check_gzip_size, naming, open_gzip_to_end
from hyperslab.formats.nifti import resample
from hyperslab.formats.nifti.lists import Pair
from hyperslab.formats.storage_order import StorageOrder
from hyperslab.formats.targets import Floats
from hyperslab.util.atomic_files import created_aside


@dataclass(frozen=True, slots=True)
class NiftiHeader:
    """Holds shape (C, D, H, W), type and voxels' size (D, H, W) [mm] of a scan; a label's bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    voxel: tuple[float, ...]
    label_bytes: int


NIFTI = "NIfTI"

MILLIMETRES = {1: 1e3, 3: 1e-3}
"""Millimetres in the header's unit, which may be metres or microns (nifti1.h, `xyzt_units`)."""

OBLIQUE = 35.0
"""The largest angle [degrees] of an axis to the patient's: gantries tilt by up to 30."""


def load_image(path: Path) -> Any:
    """Loads the file's header and a proxy of its voxels.

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
        check_gzip_size(path, _end_of_voxels(image))
    return image


def _end_of_voxels(image: Any) -> int:
    """Returns the place in the file where the voxels end [B]."""
    size = math.prod(image.shape) * image.get_data_dtype().itemsize
    return int(image.dataobj.offset) + size


def is_packed(path: Path) -> bool:
    """Tells by the name if a file is packed, as nibabel does."""
    return path.name.endswith(".gz")


@contextmanager
def voxel_proxy(path: Path, image: Any) -> Iterator[Any]:
    """Gives the proxy of all voxels of an image; afterwards the sum of gzip is compared.

    Raises:
        DataError: see `open_gzip_to_end`.
        EOFError: the file ends too early.
    """
    if not is_packed(path):
        if path.stat().st_size < _end_of_voxels(image):
            raise EOFError(f"it has {path.stat().st_size} of {_end_of_voxels(image)} bytes")
        yield image.dataobj
        return
    with open_gzip_to_end(path) as file:
        holder = optional.nibabel().FileHolder(fileobj=file)
        yield type(image).from_file_map({"image": holder}, mmap=False).dataobj


def dtype_of(image: Any) -> np.dtype[Any]:
    """Returns int16 where the file's numbers are such and are not scaled, else float32."""
    scaled = (image.dataobj.slope, image.dataobj.inter) != (1, 0)
    exact = np.can_cast(image.get_data_dtype(), np.int16) and not scaled
    return np.dtype(np.int16 if exact else np.float32)


def orientation_of(path: Path, image: Any, *, channels: bool = False) -> NDArray[Any]:
    """Finds how the file's axes become RAS+, once it is clear that the file says so.

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
    """Orders a file's dims (i, j, k), given how they become RAS+; a fourth is the channels'.

    >>> order_of(np.array([[0, 1], [1, 1], [2, 1]]))  # x, y and z are W, H and D
    StorageOrder(dims='WHD', flipped='')
    """
    dims = "".join("WHD"[int(axis)] for axis, _ in turn)
    flipped = "".join("WHD"[int(axis)] for axis, flip in turn if flip < 0)
    return StorageOrder(dims + "C" * (ndim - 3), flipped)


def shape_of(image: Any, turn: NDArray[Any]) -> tuple[int, ...]:
    """Returns the shape (C, D, H, W) of the volume."""
    return order_of(turn, len(image.shape)).volume_shape(image.shape)


def affine_of(image: Any, turn: NDArray[Any]) -> NDArray[Any]:
    """Maps (x, y, z, 1) of the turned file to [mm], which a file without a known unit has."""
    unit = MILLIMETRES.get(int(image.header["xyzt_units"]) & 7, 1.0)
    back = optional.nibabel().orientations.inv_ornt_aff(turn, image.shape[:3])
    return np.diag([unit, unit, unit, 1.0]) @ image.affine @ back


def read_pair_header(pair: Pair) -> NiftiHeader:
    """Reads what a source needs to know of a volume and its labels.

    Raises:
        DataError: a file is not what it should be, or they do not belong together.
    """
    shape, dtype, affine, _ = _read_header(pair.image)
    for path in pair.channels:
        other, kind, place, _ = _read_header(path)
        if (shape[0], other[0]) != (1, 1):
            raise DataError(f"{path}: a channel of {pair.image.name} has its own file and is 3-D")
        _check_affines(path, other, place, pair.image, shape, affine)
        dtype = np.promote_types(dtype, kind)
    labels, _, place, label_bytes = _read_header(pair.labels)
    if labels[0] != 1:
        raise DataError(f"{pair.labels}: has {labels[0]} channels; needs one label a voxel")
    _check_affines(pair.labels, labels, place, pair.image, shape, affine)
    voxel = tuple(np.linalg.norm(affine[:3, 2::-1], axis=0).tolist())
    return NiftiHeader((max(shape[0], len(pair.images)), *shape[1:]), dtype, voxel, label_bytes)


def _read_header(path: Path) -> tuple[tuple[int, ...], np.dtype[Any], NDArray[Any], int]:
    """Reads shape (C, D, H, W), type, affine of (x, y, z, 1), and the bytes of a stored voxel."""
    with naming(path, NIFTI, ANY):
        image = load_image(path)
        turn = orientation_of(path, image, channels=True)
        affine = affine_of(image, turn)
        return shape_of(image, turn), dtype_of(image), affine, image.get_data_dtype().itemsize


def _check_affines(
    path: Path,
    found: tuple[int, ...],
    place: NDArray[Any],
    like: Path,
    shape: tuple[int, ...],
    affine: NDArray[Any],
) -> None:
    """Accepts voxels of ``path`` that are where those of the file ``like`` are.

    Raises:
        DataError: they are others, or half a voxel away.
    """
    if found[1:] != shape[1:]:
        raise DataError(f"{path}: has {found[1:]} voxels (D, H, W) but {like.name} has {shape[1:]}")
    _check_place(path, place, like, affine, shape[:0:-1])


def _check_place(
    path: Path, place: Floats, like: Path, affine: Floats, extents: Sequence[int]
) -> None:
    """Accepts an affine that puts voxels of these ``extents`` where that of ``like`` does.

    Raises:
        DataError: the corners are more than half a voxel of ``like`` apart.
    """
    corners = np.array(list(np.ndindex(2, 2, 2))) * (np.array(extents) - 1)
    indices = np.c_[corners, np.ones(8)].T
    off = float(np.abs(np.linalg.inv(affine) @ place @ indices - indices).max())
    if not off <= 0.5:
        raise DataError(f"{path}: its affine is off by {off:.3g} voxels from {like.name}'s")


NIFTI_SUFFIXES = (".nii", ".nii.gz")

FASTEST = 1
"""The level of gzip that nibabel takes."""

CANONICAL = ((0, 1), (1, 1), (2, 1))


@dataclass(frozen=True, slots=True)
class CtVolume:
    """Holds one volume of a NIfTI file.

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
        """Returns the size of a voxel along D, H and W [mm]."""
        return resample.spacing(self.affine)

    @property
    def orientation(self) -> str:
        """The directions of the file's axes i, j, k: ``"LPS"`` is left, posterior, superior."""
        return "".join(optional.nibabel().aff2axcodes(self.stored_affine))


def read_volume(path: Path) -> CtVolume:
    """Reads a volume.

    Raises:
        DataError: the file is no NIfTI file or damaged, is not 3-D, has no voxels, holds NaN or
            infinite values or one and the same everywhere, or does not say how it is oriented.
        HyperslabError: the extra ``medical`` is not installed.
    """
    volume = _load(path)
    _check_values(volume)
    return volume


def read_channels(paths: Sequence[Path]) -> CtVolume:
    """Reads a volume (C, D, H, W): channels along a file's fourth dim, or each in a file.

    Raises:
        DataError: as `read_volume`, but a file may be 4-D; or the files differ in shape or place,
            or have several channels each.
    """
    first, *others = [_load(path, channels=True) for path in paths]
    for path, other in zip(paths[1:], others, strict=True):
        if other.values.shape != first.values.shape or len(other.values) != 1:
            raise DataError(
                f"{path}: is {other.values.shape} (C, D, H, W) but {paths[0].name} is "
                f"{first.values.shape}; each channel has a file, and all have one shape"
            )
        _check_place(path, other.affine, first.path, first.affine, first.values.shape[-3:])
    if others:
        values = np.concatenate([volume.values for volume in (first, *others)])
        first = replace(first, values=values)
    _check_values(first)
    return first


def read_labels(path: Path, like: CtVolume, classes: int) -> NDArray[np.uint8]:
    """Reads the class of every voxel (D, H, W) of the volume ``like``: 0 .. classes - 1.

    The file may store its axes otherwise than the volume's; the voxels must be at the same places,
    to half a voxel.

    Raises:
        DataError: as `read_volume`; or another shape or place than ``like``; or other numbers.
    """
    labels = _load(path, channels=True)
    if len(labels.values) != 1:
        raise DataError(f"{path}: has {len(labels.values)} channels; needs one label a voxel")
    labels = replace(labels, values=labels.values[0])
    if labels.values.shape != like.values.shape:
        ours, theirs = (" x ".join(map(str, v.values.shape)) for v in (labels, like))
        raise DataError(f"{path}: has {ours} voxels (D x H x W) but {like.path.name} has {theirs}")
    _check_place(path, labels.affine, like.path, like.affine, like.values.shape[-3:])
    whole = _whole(path, labels.values)
    low = whole.min()
    high = whole.max()
    if low < 0 or high >= classes:
        raise DataError(f"{path}: holds labels {low:g} to {high:g}; needs 0 to {classes - 1}")
    return whole.astype(np.uint8)


def write_mask(path: Path, mask: NDArray[np.uint8], like: CtVolume) -> None:
    """Writes a mask (d, h, w) on any lattice over the extent of ``like``, on like's own lattice.

    Resampled to the nearest; orientation, shape, affine and the rest of the header are those of the
    file that ``like`` was read from. The name appears when the file is complete.

    Raises:
        DataError: the name does not end in .nii or .nii.gz, or the file cannot be written.
    """
    orientations = optional.nibabel().orientations
    mask = resample.nearest(mask.astype(np.uint8), like.values.shape[-3:]).transpose(2, 1, 0)
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
    """Writes the values (i, j, k) as ``dtype``; without ``affine`` the header's is kept.

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
    """Loads a volume (D, H, W), or with ``channels`` (C, D, H, W)."""
    with naming(path, NIFTI, ANY):
        image = load_image(path)
        turned = orientation_of(path, image, channels=channels)
        order = order_of(turned, len(image.shape))
        with voxel_proxy(path, image) as proxy:
            values = order.to_volume(_scaled_values(image, proxy))
        affine = affine_of(image, turned)[:, [2, 1, 0, 3]]
    if not channels:
        (values,) = values
    return CtVolume(path, values, affine, image.header, image.shape, image.affine)


def _check_values(volume: CtVolume) -> None:
    """Refuses a volume that cannot be one.

    Raises:
        DataError: NaN or infinite values, or one and the same everywhere.
    """
    low = volume.values.min()
    high = volume.values.max()
    if not (math.isfinite(low) and math.isfinite(high)):
        raise DataError(f"{volume.path}: holds NaN or infinite values")
    if low == high:
        raise DataError(f"{volume.path}: is empty: every voxel is {low:g}")


def _scaled_values(image: Any, proxy: Any) -> NDArray[Any]:
    """Reads the numbers (i, j, k) of a proxy of the image, slope and intercept applied."""
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
