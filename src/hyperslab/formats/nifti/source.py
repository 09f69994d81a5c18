"""A folder of NIfTI files as a `Source` (the extra `medical`): CTs with labels, as published.

A volume is (1, D, H, W): D grows from inferior to superior, H from posterior to anterior, W from
left to right, which are NIfTI's RAS+ axes in the order z, y, x. A file's own axes are permuted and
flipped to the closest of these, and so is the box that is read. Labels are found by LiTS's and the
Medical Segmentation Decathlon's names, see `pairs`. A ``.nii.gz`` has no random access: each box
unpacks all that lies before its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hyperslab.comm import Grid
from hyperslab.comm.agreement import from_main
from hyperslab.errors import DataError
from hyperslab.formats.extras import Extras
from hyperslab.formats.io_cost import BUFFER, Storage
from hyperslab.formats.nifti.header import (
    NIFTI,
    NiftiHeader,
    affine_of,
    dtype_of,
    load_image,
    order_of,
    orientation,
    read_pair_header,
    voxels,
)
from hyperslab.formats.nifti.pairs import Pair, find
from hyperslab.formats.shared.checks import ANY, naming
from hyperslab.formats.shared.fingerprint import Stamp, unchanged
from hyperslab.formats.shared.labels import LIVER, SCAN_KEYS, as_classes
from hyperslab.formats.shared.listing import Refuse, sift
from hyperslab.formats.source import Array, ScanOptions, Source
from hyperslab.geometry import Box


@dataclass(frozen=True, slots=True)
class Scans:
    """N volumes of ``shape`` (D, H, W) read as ``dtype``, each with the file of its labels.

    ``stamps``: of the two files of each, by its name.
    """

    folder: Path
    pairs: tuple[Pair, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    label_bytes: int
    stamps: Mapping[str, tuple[Stamp, Stamp]]


class NiftiFolder(Source):
    """Scans with a class for every voxel, all of one shape; volumes published without are left out.

    Values have slope and intercept applied (HU for a CT): int16 where the file's numbers are such
    and need none, else float32.
    """

    suffixes = (".nii", ".nii.gz")
    summed_whole = True

    def __init__(self, scans: Scans) -> None:
        self.scans = scans
        self.names = [pair.name for pair in scans.pairs]
        self.shape = (1, *scans.shape)
        self.dtype = scans.dtype
        self.classes = LIVER
        self.label_bytes = scans.label_bytes

    @classmethod
    def scan(cls, path: str | Path, grid: Grid, refuse: Refuse | None = None) -> NiftiFolder:
        """The folder as the main rank sees it. All ranks call this.

        With ``refuse`` files that are not what they should be are left out.

        Raises:
            DataError: the folder is missing or holds no scan with labels; a file is damaged, not
                3-D, oblique or does not say how it is oriented; labels are missing or lie
                elsewhere than their volume; or volumes differ in shape or type.
            HyperslabError: the extra ``medical`` is not installed.
        """
        return from_main(lambda: cls.open_folder(Path(path), ScanOptions(refuse=refuse)))

    @classmethod
    def open_folder(cls, folder: Path, options: ScanOptions) -> NiftiFolder:
        return cls(_scan(folder, options.refuse))

    def __reduce__(self) -> tuple[Any, ...]:
        return NiftiFolder, (self.scans,)

    def where(self, sample: int) -> str:
        return str(self.scans.pairs[sample].image)

    def read(self, sample: int, box: Box) -> Array:
        """Read one box.

        Raises:
            DataError: the file has gone, is damaged, or has changed since the folder was scanned.
        """
        path = self.scans.pairs[sample].image
        name = self.names[sample]
        with unchanged(path, name, self.scans.stamps[name][0]):
            values = _read(path, self.scans.shape, box)
        if values.dtype != self.dtype:
            raise DataError(
                f"{self.where(sample)}: is read as {values.dtype} but was {self.dtype} when the "
                "folder was scanned"
            )
        return values

    def labels(self, sample: int, box: Box) -> Array:
        """The classes of one box; errors as `read`, and labels that are no classes."""
        path = self.scans.pairs[sample].labels
        name = self.names[sample]
        with unchanged(path, name, self.scans.stamps[name][1]):
            values = _read(path, self.scans.shape, Box((0, *box.lo), (1, *box.hi)))
        return as_classes(values, f"{path}: {box}")

    def storage(self, sample: int) -> Storage:
        path = self.scans.pairs[sample].image
        with naming(path, NIFTI, ANY):
            image = load_image(path)
            order = order_of(orientation(path, image)).reversed  # the file's first index is fastest
            itemsize = image.get_data_dtype().itemsize
        size = path.stat().st_size
        packed = path.suffix == ".gz"
        plain = Storage(order, image.shape[::-1], itemsize, size, buffer=BUFFER)
        return replace(plain, compression="gzip", packed=True) if packed else plain

    def extras(self, sample: int) -> Extras:
        path = self.scans.pairs[sample].image
        with naming(path, NIFTI, ANY):
            image = load_image(path)
            affine = affine_of(image, orientation(path, image))[:, [2, 1, 0, 3]]
        return Extras(SCAN_KEYS, affine=affine)

    def files(self, sample: int) -> tuple[Path, ...]:
        return self.scans.pairs[sample].image, self.scans.pairs[sample].labels

    def alone(self, sample: int) -> NiftiFolder:
        return NiftiFolder(replace(self.scans, pairs=self.scans.pairs[sample : sample + 1]))


def _read(path: Path, shape: tuple[int, ...], box: Box) -> Array:
    """The box (1, d, h, w) of a file, along the patient's axes."""
    with naming(path, NIFTI, ANY):
        image = load_image(path)
        order = order_of(orientation(path, image))
        if order.volume_shape(image.shape)[1:] != shape:
            raise DataError(
                f"{path}: has {order.volume_shape(image.shape)[1:]} voxels but had {shape} when "
                "the folder was scanned"
            )
        stored = order.to_file(box, image.shape)
        if stored == Box.whole(image.shape):
            with voxels(path, image) as whole:
                return order.to_volume(np.asarray(whole[stored.slices()], dtype_of(image)))
        return order.to_volume(np.asarray(image.dataobj[stored.slices()], dtype_of(image)))


def _scan(folder: Path, refuse: Refuse | None = None) -> Scans:
    pairs = [pair for pair in find(folder) if not pair.test]
    if not pairs:
        raise DataError(f"{folder}: holds test volumes only, which have no labels")
    stamps: dict[str, tuple[Stamp, Stamp]] = {}

    def header(pair: Pair) -> NiftiHeader:
        if pair.problem:
            raise DataError(pair.problem)
        stamps[pair.name] = (_stamp(pair.image), _stamp(pair.labels))  # later changes are noticed
        return read_pair_header(pair)

    found = sift(pairs, header, refuse)
    one, (shape, dtype, label_bytes) = found[0]

    def alike(entry: tuple[Pair, NiftiHeader]) -> None:
        pair, header = entry
        if header[:2] != (shape, dtype):
            raise DataError(
                f"{pair.image}: is {header[1]} {header[0]} but {one.image.name} is {dtype} "
                f"{shape}; `hyperslab convert lits` brings volumes to one shape and type"
            )

    good = tuple(pair for (pair, _), _ in sift(found, alike, refuse))
    return Scans(folder, good, shape, dtype, label_bytes, stamps)


def _stamp(path: Path) -> Stamp:
    with naming(path, NIFTI, ANY):
        return Stamp.of(path)
