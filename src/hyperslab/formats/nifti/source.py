"""Reads and writes folders of NIfTI files: scans with labels, as published (the extra `medical`).

Axes are those of `image`, and the box that is read is turned as they are. Channels are along a
file's fourth dim, or each has a file. `lists` finds the files that belong together. A ``.nii.gz``
has no random access: each box unpacks all that lies before its end.

Files are written with the names of LiTS or the Decathlon, along the patient's axes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hyperslab.errors import DataError
from hyperslab.formats import files, optional
from hyperslab.formats.nifti import resample
from hyperslab.formats.nifti.image import (
    NIFTI,
    NIFTI_SUFFIXES,
    NiftiFile,
    check_channels,
    check_lattice,
    open_nifti,
)
from hyperslab.formats.nifti.lists import DATASET_JSON, Pair, ScanList, find_pairs, read_list
from hyperslab.formats.source import Array, Extras, ScanOptions, Source
from hyperslab.formats.storage import FILE_BUFFER, Storage
from hyperslab.formats.targets import LIVER, SCAN_KEYS, as_classes
from hyperslab.formats.writer import SampleToWrite, Writer, open_gzip_writer
from hyperslab.geometry import Box


@dataclass(frozen=True, slots=True)
class ScanHeader:
    """Holds what a source needs to know of a volume (C, D, H, W) and its labels.

    ``stamps``: of the volume's files, and that of the labels last, from before they were read.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    voxel: tuple[float, ...]  # (D, H, W) [mm]
    label_bytes: int
    stamps: tuple[files.Stamp, ...]


class NiftiFolder(Source):
    """Shows scans with a class for every voxel; volumes published without are left out.

    Values have slope and intercept applied (HU for a CT): int16 where the numbers of all files are
    such and need none, else float32.
    """

    suffixes = NIFTI_SUFFIXES
    lists = (".json", ".csv")
    summed_whole = True

    def __init__(self, listed: ScanList, headers: Sequence[ScanHeader]) -> None:
        self.headers = tuple(headers)
        self.names = [pair.name for pair in listed.pairs]
        shapes = tuple(header.shape for header in headers)
        self.shape = max(shapes, key=math.prod)
        self.shapes = shapes if len(set(shapes)) > 1 else ()
        self.dtype = np.result_type(*(header.dtype for header in headers))
        self.classes = listed.classes
        self.label_bytes = max(header.label_bytes for header in headers)
        self.channel_names = listed.channels
        self.splits = {name: listed.splits[name] for name in self.names if name in listed.splits}
        self.listed = replace(listed, splits=self.splits)  # which can be pickled

    @classmethod
    def open_folder(cls, folder: Path, options: ScanOptions) -> NiftiFolder:
        """Opens a folder, or a list itself: a .json or .csv file."""
        listed = listed_scans(folder, options.allowed)
        pairs = [pair for pair in listed.pairs if not pair.test]
        if not pairs:
            raise DataError(f"{folder}: holds test volumes only, which have no labels")
        found = files.sift(pairs, read_scan_header, options.refuse)
        channels = len(listed.channels) or found[0][1].shape[0]

        def alike(entry: tuple[Pair, ScanHeader]) -> None:
            pair, header = entry
            if header.shape[0] != channels:
                words = ", ".join(listed.channels) or f"{found[0][0].image.name} has {channels}"
                raise DataError(
                    f"{pair.image}: has {header.shape[0]} channels, not {channels}: {words}"
                )

        good = [entry for entry, _ in files.sift(found, alike, options.refuse)]
        kept = replace(listed, pairs=tuple(pair for pair, _ in good))
        return cls(kept, [header for _, header in good])

    def where(self, sample: int) -> str:
        return str(self.listed.pairs[sample].image)

    def read(self, sample: int, box: Box) -> Array:
        """Reads a box, channel by channel where each has a file. Raises as `ArrayFolder.read`."""
        pair = self.listed.pairs[sample]
        shape = self.shape_of(sample)
        if not pair.channels:
            return self._values(sample, 0, shape, box)
        inner = Box((0, *box.lo[1:]), (1, *box.hi[1:]))
        one = (1, *shape[1:])
        parts = [self._values(sample, c, one, inner) for c in range(box.lo[0], box.hi[0])]
        return np.concatenate(parts)

    def _values(self, sample: int, file: int, shape: tuple[int, ...], box: Box) -> Array:
        """Reads a box of the ``file``-th of the sample's files, which has ``shape``."""
        path = self.listed.pairs[sample].images[file]
        values = self._read(sample, file, path, shape, box)
        if not np.can_cast(values.dtype, self.dtype):
            raise DataError(
                f"{path}: is read as {values.dtype} but was {self.dtype} when the folder was "
                "scanned"
            )
        return values.astype(self.dtype, copy=False)

    def _read(self, sample: int, file: int, path: Path, shape: tuple[int, ...], box: Box) -> Array:
        with files.unchanged(path, self.names[sample], self.headers[sample].stamps[file]):
            found = open_nifti(path)
            if found.shape != shape:
                raise DataError(
                    f"{path}: has {found.shape[1:]} voxels but had {shape[1:]} when the folder "
                    "was scanned"
                )
            return found.read(box)

    def labels(self, sample: int, box: Box) -> Array:
        """Reads the classes of one box; errors as `read`, and labels that are no classes."""
        path = self.listed.pairs[sample].labels
        shape = (1, *self.shape_of(sample)[1:])
        values = self._read(sample, -1, path, shape, Box((0, *box.lo), (1, *box.hi)))
        return as_classes(values, f"{path}: {box}")

    def storage(self, sample: int) -> Storage:
        """Describes the first channel's file, where each has its own."""
        file = open_nifti(self.listed.pairs[sample].image)
        order = file.order.reversed  # the file's first index is fastest
        shape = file.image.shape[::-1]
        size = file.path.stat().st_size
        plain = Storage(order, shape, file.itemsize, size, buffer=FILE_BUFFER)
        return replace(plain, compression="gzip", packed=True) if file.packed else plain

    def extras(self, sample: int) -> Extras:
        return Extras(SCAN_KEYS, affine=open_nifti(self.listed.pairs[sample].image).affine)

    def voxel_size(self, sample: int) -> tuple[float, ...]:
        return self.headers[sample].voxel

    def files(self, sample: int) -> tuple[Path, ...]:
        pair = self.listed.pairs[sample]
        return *pair.images, pair.labels

    def alone(self, sample: int) -> NiftiFolder:
        pair = self.listed.pairs[sample]
        found = NiftiFolder(replace(self.listed, pairs=(pair,)), self.headers[sample : sample + 1])
        found.dtype = self.dtype  # of all
        return found


def listed_scans(folder: Path, allowed: files.AccessPolicy) -> ScanList:
    """Lists the scans of a list, or of a folder with or without one."""
    path = folder / DATASET_JSON if folder.is_dir() else folder
    if folder.is_dir() and not path.is_file():
        return ScanList(tuple(find_pairs(folder)))
    return read_list(path, files.FileAccess(path.parent, allowed))


def open_pair(pair: Pair) -> tuple[list[NiftiFile], NiftiFile]:
    """Opens the files of a scan's channels, and that of its labels; they have to fit together."""
    images = [open_nifti(path) for path in pair.images]
    check_channels(images)
    labels = open_nifti(pair.labels)
    if labels.shape[0] != 1:
        raise DataError(f"{pair.labels}: has {labels.shape[0]} channels; needs one label a voxel")
    check_lattice(labels, images[0])
    return images, labels


def read_scan_header(pair: Pair) -> ScanHeader:
    """Reads the headers of a scan's files; refuses files that do not belong together."""
    if pair.problem:
        raise DataError(pair.problem)
    stamps = tuple(_stamp(path) for path in (*pair.images, pair.labels))
    images, labels = open_pair(pair)
    channels, *extents = images[0].shape
    dtype = np.result_type(*(image.dtype for image in images))
    voxel = tuple(resample.spacing(images[0].affine).tolist())
    shape = (max(channels, len(images)), *extents)
    return ScanHeader(shape, dtype, voxel, labels.itemsize, stamps)


def _stamp(path: Path) -> files.Stamp:
    with files.naming(path, NIFTI, files.ANY):
        return files.Stamp.of(path)


LITS_NAME = re.compile(r"volume-(\d+)")
MOST_VOXELS = 32767
MSD_NAME = re.compile(r"liver_(\d+)")


class NiftiWriter(Writer):
    """Writes one channel with labels, its axes along the patient's (RAS+)."""

    compressions = ("none", "gzip")
    labels = True

    def misfit(self, source: Source) -> str:
        if not source.classes:
            return "targets"
        if source.shape[0] != 1:
            return f"{source.shape[0]} channels"
        if source.dtype not in (np.dtype(np.int16), np.dtype(np.float32)):
            return f"{source.dtype.name}, which is read from it as float32"
        if max(source.shape) > MOST_VOXELS:
            return f"more than {MOST_VOXELS} voxels along a dim"
        if source.classes != LIVER:
            return f"the names of the classes {', '.join(source.classes)}"
        for name in source.names:
            if not any(kind.fullmatch(name.rpartition("/")[2]) for kind in (LITS_NAME, MSD_NAME)):
                return f"the name {name!r}: its files are known as volume-N or liver_N"
        return ""

    def names(self, source: Source, root: str) -> list[str]:
        return [name.rpartition("/")[2] for name in source.names]

    def files(self, name: str, compression: str) -> tuple[str, ...]:
        suffix = ".nii" if compression == "none" else ".nii.gz"
        if MSD_NAME.fullmatch(name):
            return f"labelsTr/{name}{suffix}", f"imagesTr/{name}{suffix}"
        return f"{name.replace('volume', 'segmentation')}{suffix}", f"{name}{suffix}"

    def write(self, folder: Path, name: str, sample: SampleToWrite) -> None:
        labels, volume = (folder / file for file in self.files(name, sample.compression))
        affine = sample.extras.affine
        xyz = np.eye(4) if affine is None else np.asarray(affine)[:, [2, 1, 0, 3]]
        header = optional.nibabel().Nifti1Header()
        header.set_data_shape(sample.source.shape[:0:-1])
        header.set_zooms(np.linalg.norm(xyz[:3, :3], axis=0))
        header.set_sform(xyz, code="scanner")
        header.set_xyzt_units("mm")
        for path, dtype, slabs in (
            (volume, sample.source.dtype, sample.values()),
            (labels, np.dtype(np.uint8), sample.labels()),
        ):
            with open_gzip_writer(path, sample.compression) as file:
                header.set_data_dtype(dtype)
                header.write_to(file)
                for _, slab in slabs:  # (x, y, z), x fastest, is (D, H, W) in the order of C
                    file.write(np.ascontiguousarray(slab).tobytes())
