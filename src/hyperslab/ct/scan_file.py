"""One converted volume in one HDF5 file; a final name means a finished file.

The keys are those of LBANN's LiTS files: ``volume`` (1, D, H, W) int16 [HU] and ``segmentation``
(1, D, H, W) uint8. The attributes say where each voxel was:

- ``classes``: the names of the labels 0, 1, 2, ...
- ``affine`` (4, 4): (d, h, w, 1) of this file to (x, y, z, 1) [mm], RAS+
- ``spacing`` (3,): the size of a voxel along D, H, W [mm]
- ``source``, ``source_shape`` (3,), ``source_affine`` (4, 4), ``source_orientation``: the NIfTI
  file's name, shape and affine by its own indices i, j, k, and where these point ("LPS": left, ...)
- ``source_bytes``, ``label_bytes``: the sizes of the two NIfTI files [B]
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from hyperslab.atomic_files import write_bytes
from hyperslab.errors import DataError
from hyperslab.formats.keyed.hdf5_writer import SUMMED, read_summed
from hyperslab.formats.nifti import lattice
from hyperslab.formats.nifti.image import CtVolume
from hyperslab.formats.nifti.pairs import Pair
from hyperslab.formats.shared.chunking import chunk_side
from hyperslab.formats.shared.labels import LIVER

Shape = tuple[int, int, int]

SOURCE = ("source", "source_bytes", "label_bytes")


def as_hu(values: NDArray[np.float32]) -> NDArray[np.int16]:
    """Rounded, and clipped to what int16 can say."""
    limits = np.iinfo(np.int16)
    return np.rint(values).clip(limits.min, limits.max).astype(np.int16)


def make_folder(folder: Path) -> None:
    """Make a folder where there is none.

    Raises:
        DataError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot make the folder {folder}: {error.strerror}") from error


def write(path: Path, pair: Pair, scan: CtVolume, labels: NDArray[np.uint8], shape: Shape) -> None:
    """Write a volume and its labels on a lattice of ``shape`` (D, H, W), all of it or nothing.

    ``scan`` and ``labels`` (D, H, W) are what ``pair`` holds.

    Raises:
        DataError: the folder cannot be written or the disk is full.
    """
    image = _image(scan, labels, shape, _source(pair))
    try:
        write_bytes(path, image, concurrent=True)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error


def check_scan(path: Path, pair: Pair, shape: Shape) -> None:
    """Nothing, if ``path`` is the volume of ``pair`` on a lattice of ``shape``.

    Raises:
        DataError: it is another one, or no readable volume at all.
    """
    remedy = "delete it or convert into another folder"
    try:
        with h5py.File(path, "r", locking=False) as file:
            arrays = [file[key] for key in ("volume", "segmentation")]
            shapes = {array.shape[1:] for array in arrays}
            for array in arrays:
                read_summed(array)
            found = {key: file.attrs[key] for key in SOURCE}
    except (OSError, KeyError) as error:
        raise DataError(f"{path} is not a converted volume ({error}): {remedy}") from error
    if shapes != {shape}:
        raise DataError(f"{path} was made with size {shapes.pop()}, not {shape}: {remedy}")
    for key, value in _source(pair).items():
        if found[key] != value:
            raise DataError(
                f"{path} was made from another file ({key} is {found[key]}, now {value}): {remedy}"
            )


def _source(pair: Pair) -> dict[str, str | int]:
    """By what a file is known again; a date would change when it is copied."""
    sizes = (path.stat().st_size for path in (pair.image, pair.labels))
    return dict(zip(SOURCE, (pair.image.name, *sizes), strict=True))


def _image(
    scan: CtVolume, labels: NDArray[np.uint8], shape: Shape, source: dict[str, str | int]
) -> bytes:
    """The file's bytes, made in memory: what fails later is one plain write."""
    affine = lattice.resampled(scan.affine, scan.values.shape, shape)
    chunks = (1, *(chunk_side(extent) for extent in shape))
    with h5py.File("image", "w", driver="core", backing_store=False, libver=SUMMED) as file:
        volume = as_hu(lattice.blurred_linear(scan.values, shape))
        file.create_dataset("volume", data=volume[None], chunks=chunks, fletcher32=True)
        segmentation = lattice.nearest(labels, shape)
        file.create_dataset("segmentation", data=segmentation[None], chunks=chunks, fletcher32=True)
        file.attrs.update(
            classes=np.array(LIVER, "S"),
            affine=affine,
            spacing=lattice.spacing(affine),
            **source,
            source_shape=scan.stored_shape,
            source_affine=scan.stored_affine,
            source_orientation=scan.orientation,
        )
        file.flush()
        image: bytes = file.id.get_file_image()
    return image
