"""Converts CT scans: from NIfTI to HDF5 on one lattice, or to NIfTI with one size of voxels.

`convert_scans` writes each volume to one HDF5 file; a final name means a finished file. The keys
are those of LBANN's LiTS files: ``volume`` (1, D, H, W) int16 [HU] and ``segmentation`` (1, D,
H, W) uint8. The attributes say where each voxel was:

- ``classes``: the names of the labels 0, 1, 2, ...
- ``affine`` (4, 4): (d, h, w, 1) of this file to (x, y, z, 1) [mm], RAS+
- ``spacing`` (3,): the size of a voxel along D, H, W [mm]
- ``source``, ``source_shape`` (3,), ``source_affine`` (4, 4), ``source_orientation``: the NIfTI
  file's name, shape and affine by its own indices i, j, k, and where these point ("LPS": left,
  ...)
- ``source_bytes``, ``label_bytes``: the sizes of the two NIfTI files [B]

`respace_scans` makes a new data set with a `dataset.json`. What a network learns of sizes it
learns in voxels, so scans of different spacings are brought to one [mm]. Files are plain NIfTI,
of which each rank reads its box alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import DataError, system_errors_as
from hyperslab.formats import optional
from hyperslab.formats.arrays.writer import check_small_file, write_small_file
from hyperslab.formats.files import STRICT, AccessPolicy, check_finite, lock_folder
from hyperslab.formats.nifti import image, resample
from hyperslab.formats.nifti.image import NiftiFile
from hyperslab.formats.nifti.source import (
    DATASET_JSON,
    Pair,
    listed_scans,
    open_pair,
    whole_labels,
    write_dataset_json,
)
from hyperslab.formats.storage import default_chunk_side
from hyperslab.formats.targets import LIVER, SCAN_KEYS
from hyperslab.util.worker_pool import map_tasks

LatticeShape = tuple[int, int, int]

SOURCE_ATTRIBUTES = ("source", "source_bytes", "label_bytes")


def as_hu(values: NDArray[np.float32]) -> NDArray[np.int16]:
    """Rounds, and clips to what int16 can say."""
    limits = np.iinfo(np.int16)
    return np.rint(values).clip(limits.min, limits.max).astype(np.int16)


def read_scan(pair: Pair, classes: int) -> tuple[NiftiFile, NDArray[Any], NDArray[np.uint8]]:
    """Reads the values (C, D, H, W) of a scan, and the class of every voxel (D, H, W).

    The file is that of the first channel.

    Raises:
        DataError: as `open_pair`; or a file is damaged, or holds NaN or infinite values, one and
            the same everywhere, or labels that are not 0 .. classes - 1.
    """
    images, masks = open_pair(pair)
    parts = [image.read() for image in images]
    values = np.concatenate(parts) if len(parts) > 1 else parts[0]
    low, high = check_finite(values, f"{pair.image}:")
    if low == high:
        raise DataError(f"{pair.image}: is empty: every voxel is {low:g}")
    (labels,) = whole_labels(masks.read())
    if labels.dtype.kind == "f" and not (labels == np.rint(labels)).all():  # NaN too
        raise DataError(f"{pair.labels}: holds labels that are not whole numbers")
    low, high = labels.min(), labels.max()
    if low < 0 or high >= classes:
        raise DataError(
            f"{pair.labels}: holds labels {low:g} to {high:g}; needs 0 to {classes - 1}"
        )
    return images[0], values, labels.astype(np.uint8)


def write_scan_file(
    path: Path,
    pair: Pair,
    file: NiftiFile,
    values: NDArray[Any],
    labels: NDArray[np.uint8],
    shape: LatticeShape,
) -> None:
    """Writes a volume and its labels on a lattice of ``shape`` (D, H, W), all of it or nothing.

    ``file``, ``values`` and ``labels`` (both (D, H, W)) are what `read_scan` found in ``pair``.

    Raises:
        DataError: the folder cannot be written or the disk is full.
    """
    affine = resample.resampled_affine(file.affine, values.shape, shape)
    chunks = (1, *(default_chunk_side(extent) for extent in shape))

    def fill(out: h5py.File) -> None:
        volume = as_hu(resample.blurred_linear(values, shape))
        out.create_dataset("volume", data=volume[None], chunks=chunks, fletcher32=True)
        segmentation = resample.nearest(labels, shape)
        out.create_dataset("segmentation", data=segmentation[None], chunks=chunks, fletcher32=True)
        out.attrs.update(
            classes=np.array(LIVER, "S"),
            affine=affine,
            spacing=resample.spacing(affine),
            **_source_attributes(pair),
            source_shape=file.image.shape[:3],
            source_affine=file.image.affine,
            source_orientation="".join(optional.nibabel().aff2axcodes(file.image.affine)),
        )

    write_small_file(path, fill)


def check_scan_file(path: Path, pair: Pair, shape: LatticeShape) -> None:
    """Refuses ``path`` if it is not the volume of ``pair`` on a lattice of ``shape``."""
    remedy = "delete it or convert into another folder"
    shapes, found = check_small_file(path, SCAN_KEYS, "a converted volume", remedy)
    for stored in shapes:
        if stored[1:] != shape:
            raise DataError(f"{path} was made with size {stored[1:]}, not {shape}: {remedy}")
    for key, value in _source_attributes(pair).items():
        if key not in found or found[key] != value:
            raise DataError(
                f"{path} was made from another file ({key} is {found.get(key)}, now {value}): "
                f"{remedy}"
            )


def _source_attributes(pair: Pair) -> dict[str, str | int]:
    """Collects what identifies a file later; a date would change when it is copied."""
    sizes = (path.stat().st_size for path in (pair.image, pair.labels))
    return dict(zip(SOURCE_ATTRIBUTES, (pair.image.name, *sizes), strict=True))


@dataclass(frozen=True, slots=True)
class ScanOutcome:
    """Reports what became of a pair; ``reason`` names the file and what is wrong with it."""

    pair: Pair
    state: Literal["converted", "kept", "skipped"]
    reason: str = ""


def convert_scans(
    pairs: Sequence[Pair],
    folder: Path,
    *,
    shape: LatticeShape,
    workers: int = 1,
    done: Callable[[ScanOutcome], None] = lambda outcome: None,
) -> list[ScanOutcome]:
    """Converts each pair to ``{name}.hdf5`` in ``folder``, on a lattice of ``shape`` (D, H, W).

    A volume that is not what it should be is skipped and the others go on. Files that are there
    already are kept. ``done`` is called for each pair, kept ones first, the others as they end. A
    worker holds one volume at a time.

    Raises:
        DataError: if ``shape`` or ``workers`` is not positive, if a file in the folder is not the
            volume that it would be (before anything is converted), if another conversion fills
            the folder, or if it cannot be written.
        HyperslabError: if the extra ``medical`` is not installed, or a worker process dies.
    """
    optional.nibabel()
    if min(shape) < 1 or workers < 1:
        raise DataError(f"size {shape}, {workers} workers: need at least 1")

    def is_there(pair: Pair) -> bool:
        path = _path(folder, pair)
        if not path.exists():
            return False
        check_scan_file(path, pair, shape)
        return True

    with lock_folder(folder, "conversion"):
        return _make_missing(pairs, is_there, _convert, (folder, shape), done, workers)


def _make_missing(
    pairs: Sequence[Pair],
    is_there: Callable[[Pair], bool],
    convert: Callable[..., ScanOutcome],
    how: tuple[Any, ...],
    done: Callable[[ScanOutcome], None],
    workers: int = 1,
) -> list[ScanOutcome]:
    """Converts the scans that are not there; all are looked at before anything is converted."""
    there = [pair for pair in pairs if not pair.problem and is_there(pair)]
    kept = [ScanOutcome(pair, "kept") for pair in there]
    todo = [(pair, *how) for pair in pairs if pair not in there]
    outcomes = []
    with closing(map_tasks(convert, todo, workers)) as made:
        for outcome in itertools.chain(kept, made):
            outcomes.append(outcome)
            done(outcome)
    return outcomes


def _convert(pair: Pair, folder: Path, shape: LatticeShape) -> ScanOutcome:
    try:
        file, values, labels = read_scan(pair, len(LIVER))
        if len(values) > 1:
            raise DataError(f"{pair.image}: has {len(values)} channels; needs one volume")
    except DataError as error:
        return ScanOutcome(pair, "skipped", str(error))
    write_scan_file(_path(folder, pair), pair, file, values[0], labels, shape)
    return ScanOutcome(pair, "converted")


def _path(folder: Path, pair: Pair) -> Path:
    return folder / f"{pair.name}.hdf5"


VoxelSize = tuple[float, float, float]
"""Its size along D, H and W [mm]."""


def respace_scans(
    path: Path,
    folder: Path,
    voxel: VoxelSize,
    *,
    allowed: AccessPolicy = STRICT,
    done: Callable[[ScanOutcome], None] = lambda outcome: None,
) -> list[ScanOutcome]:
    """Bring the scans of ``path``, a folder or a list, to about ``voxel`` [mm], into ``folder``.

    A scan keeps its extent, of which a whole number of voxels is made: `blurred_linear` of its
    values, the nearest of its labels. ``imagesTr``, ``labelsTr`` and a ``dataset.json`` are filled;
    scans that are there are kept. What is not what it should be is skipped, and the others go on.

    Raises:
        DataError: a size is not positive, the list is no good, a scan in the folder is of another
            size or file (before anything is converted), or the folder cannot be written.
        HyperslabError: the extra ``medical`` is not installed.
    """
    if not (np.isfinite(voxel).all() and min(voxel) > 0):
        raise DataError(f"spacing {voxel}: needs three sizes [mm] above 0")
    listed = listed_scans(path, allowed)
    source = path if path.is_dir() else path.parent
    if source.resolve() == folder.resolve():
        raise DataError(f"{folder}: holds the scans or their list: write the new ones elsewhere")
    is_there = functools.partial(_is_respaced, folder=folder, voxel=voxel)
    how = folder, voxel, len(listed.classes)
    with system_errors_as(DataError, f"cannot write into {folder}", named=False):
        folder.mkdir(parents=True, exist_ok=True)  # before the lock does: its errors are ours
        with lock_folder(folder, "conversion"):
            outcomes = _make_missing(listed.pairs, is_there, _respace, how, done)
            skipped = [outcome.pair for outcome in outcomes if outcome.state == "skipped"]
            good = [_respaced_pair(pair, folder) for pair in listed.pairs if pair not in skipped]
            names = (listed.classes, listed.channels)
            if good:
                write_dataset_json(folder / DATASET_JSON, good, *names, listed.splits)
    return outcomes


def _respaced_pair(pair: Pair, folder: Path) -> Pair:
    file = f"{pair.name}.nii"
    return Pair(pair.name, folder / "imagesTr" / file, folder / "labelsTr" / file)


def _is_respaced(pair: Pair, folder: Path, voxel: VoxelSize) -> bool:
    """Tells if a scan is there already.

    Raises:
        DataError: it is, and is of another size or of other files.
    """
    made = _respaced_pair(pair, folder)
    if not (made.image.exists() and made.labels.exists()):
        return False
    before = image.open_nifti(pair.image)
    shape, affine = _respaced_lattice(before.shape[1:], before.affine, voxel)
    found = image.open_nifti(made.image)
    remedy = "delete it or convert into another folder"
    if found.shape[1:] != shape or not np.allclose(found.affine, affine, rtol=1e-5, atol=1e-3):
        raise DataError(f"{made.image} was made with another spacing or of another scan: {remedy}")
    if found.image.header["descrip"].item() != _sizes_of_files(pair):
        raise DataError(f"{made.image} was made from other files than {pair.image}: {remedy}")
    return True


def _respaced_lattice(
    extents: tuple[int, ...], affine: NDArray[np.float64], voxel: VoxelSize
) -> tuple[tuple[int, ...], NDArray[np.float64]]:
    """Returns the extents (D, H, W) of a scan with voxels of about that size, and their affine."""
    sizes = zip(extents, resample.spacing(affine), voxel, strict=True)
    shape = tuple(max(1, round(float(n * size / wanted))) for n, size, wanted in sizes)
    return shape, resample.resampled_affine(affine, extents, shape)


def _sizes_of_files(pair: Pair) -> bytes:
    """Returns words that identify the files of a scan later; a date would change with a copy."""
    sizes = [path.stat().st_size for path in (*pair.images, pair.labels)]
    return f"of {sum(sizes[:-1])} and {sizes[-1]} bytes".encode()


def _respace(pair: Pair, folder: Path, voxel: VoxelSize, classes: int) -> ScanOutcome:
    made = _respaced_pair(pair, folder)
    try:
        file, values, labels = read_scan(pair, classes)
    except DataError as error:
        return ScanOutcome(pair, "skipped", str(error))
    new, affine = _respaced_lattice(values.shape[1:], file.affine, voxel)
    affine = affine[:, [2, 1, 0, 3]]
    resampled = np.stack([resample.blurred_linear(channel, new) for channel in values])
    stored = as_hu(resampled) if values.dtype == np.int16 else resampled
    xyz = stored.transpose(3, 2, 1, 0)
    for path in (made.image, made.labels):
        path.parent.mkdir(parents=True, exist_ok=True)
    header = optional.nibabel().Nifti1Header()
    header["descrip"] = _sizes_of_files(pair)
    mask = resample.nearest(labels, new).transpose(2, 1, 0)
    image.save_image(made.labels, mask, mask.dtype, affine, None)
    image.save_image(made.image, xyz if len(stored) > 1 else xyz[..., 0], xyz.dtype, affine, header)
    return ScanOutcome(pair, "converted")
