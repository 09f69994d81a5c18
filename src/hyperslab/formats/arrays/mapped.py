"""Reads arrays where a `DataMap` says they are, by key or many in one file: each rank its box.

`Fields` shows several sources as one, their channels one after another: arrays of several files,
or under several keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hyperslab.errors import DataError, printable
from hyperslab.formats.arrays.keyed import Hdf5Opener, KeyedOpener, StoredArray, ZarrOpener
from hyperslab.formats.arrays.layouts import recognise_published
from hyperslab.formats.arrays.open import ArrayAt, kind_of_file, read_array_box, stamped_file
from hyperslab.formats.arrays.scan import (
    ARRAY_SUFFIXES,
    SHOWN_AS,
    MappedArrays,
    as_labels,
    scan_arrays,
)
from hyperslab.formats.files import naming, unchanged
from hyperslab.formats.source import OWN_DATA, Array, DataMap, ScanOptions, Source
from hyperslab.formats.storage import Storage
from hyperslab.geometry import Box


class Fields(Source):
    """The samples of several sources, which have one field each: their channels, one after another.

    Raises:
        DataError: the sources differ in samples, extents or targets.
    """

    targets_apart = True

    def __init__(self, sources: Sequence[Source], titles: Sequence[str]) -> None:
        self.sources = tuple(sources)
        self.titles = tuple(titles)
        first = self.sources[0]
        for source, title in zip(self.sources[1:], self.titles[1:], strict=True):
            _check_alike(first, source, self.titles[0], title)
        self.counts = tuple(source.shape[0] for source in self.sources)
        self.names = first.names
        self.shape = (sum(self.counts), *first.shape[1:])
        self.dtype = np.result_type(*(source.dtype for source in self.sources))
        self.parameters = first.parameters
        self.classes = first.classes
        self.label_bytes = first.label_bytes
        if set(self.counts) == {1}:
            self.channel_names = self.titles
        self.remark = f"{first.remark}; channels: {', '.join(map(printable, self.titles))}"

    def read(self, sample: int, box: Box) -> Array:
        parts = []
        begin = 0
        for source, count in zip(self.sources, self.counts, strict=True):
            lo, hi = max(box.lo[0], begin), min(box.hi[0], begin + count)
            if lo < hi:
                inner = Box((lo - begin, *box.lo[1:]), (hi - begin, *box.hi[1:]))
                parts.append(source.read(sample, inner).astype(self.dtype, copy=False))
            begin += count
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def target(self, sample: int) -> Array:
        return self.sources[0].target(sample)

    def labels(self, sample: int, box: Box) -> Array:
        return self.sources[0].labels(sample, box)

    def where(self, sample: int) -> str:
        return self.sources[0].where(sample)

    def files(self, sample: int) -> tuple[Path, ...]:
        return tuple(path for source in self.sources for path in source.files(sample))

    def alone(self, sample: int) -> Fields:
        return Fields([source.alone(sample) for source in self.sources], self.titles)

    def close(self) -> None:
        for source in self.sources:
            source.close()


def _check_alike(first: Source, other: Source, title: str, its: str) -> None:
    if len(first.names) != len(other.names) or first.shape[1:] != other.shape[1:]:
        raise DataError(
            f"{printable(title)} has {len(first.names)} volumes of {first.shape[1:]} voxels but "
            f"{printable(its)} has {len(other.names)} of {other.shape[1:]}; fields that become "
            f"channels need as many volumes, of one size ({OWN_DATA}, channels)"
        )
    for sample, (name, twin) in enumerate(zip(first.names, other.names, strict=True)):
        if first.classes or not len(first.parameters.names):
            alike = numbers_of_volume(name, title) == numbers_of_volume(twin, its)
        else:
            alike = np.array_equal(first.target(sample), other.target(sample))
        if not alike:
            raise DataError(
                f"{printable(name)!r} and {printable(twin)!r} are not two fields of one volume: "
                f"they belong to other rows ({OWN_DATA}, channels)"
            )


def numbers_of_volume(name: str, pattern: str) -> list[str]:
    """The numbers in a file's name that tell one volume from another; with or without suffix.

    Those of the ``pattern`` that found it are the field's: *z0/\\** and *z1/\\** are two of them.

    >>> numbers_of_volume("z1/run3_0007.npy", "z1/run*_*.npy")
    ['3', '0007']
    """
    suffix = next((suffix for suffix in ARRAY_SUFFIXES if pattern.endswith(suffix)), "")
    bare = pattern.removesuffix(suffix)
    for said in (bare, bare.rpartition("/")[2]):  # names may be those of files in a folder
        free = re.split(r"\*|\?|\[!?\]?[^]]*\]", said)
        found = re.match("(.*)".join(map(re.escape, free)), name)
        if found is not None:
            return re.findall(r"\d+", " ".join((*found.groups(), name[found.end() :])))
    return re.findall(r"\d+", name)


class MappedFolder(Source):
    """The samples of `MappedArrays`: files of one volume each, or of many, with their targets."""

    targets_apart = True

    def __init__(self, arrays: MappedArrays) -> None:
        self.arrays = arrays
        first = arrays.arrays[0]
        self.stacked = arrays.places[0][1] is not None
        self.stored = first.shape[int(self.stacked) :]
        self.names = arrays.names
        self.order = arrays.order
        self.shape = arrays.order.volume_shape(self.stored)
        self.dtype = np.dtype(SHOWN_AS[np.dtype(first.dtype).name])
        self.parameters = arrays.parameters
        self.classes = arrays.classes
        self.remark = arrays.remark
        if arrays.labels:
            self.label_bytes = np.dtype(arrays.labels[0].dtype).itemsize
        self.openers: dict[str, KeyedOpener] = {"HDF5": Hdf5Opener(), "Zarr": ZarrOpener()}

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the files for itself."""
        return MappedFolder, (self.arrays,)

    @classmethod
    def claims(cls, path: Path) -> bool:
        """Whether a folder, or a file, is such data by its names, whatever their suffixes say."""
        return recognise_published(path) is not None or (
            path.is_file() and kind_of_file(path) == "npy"
        )

    @classmethod
    def open_folder(cls, folder: Path, options: ScanOptions) -> Source:  # type: ignore[override]
        """The folder, or of several fields all as one source, see `Fields`."""
        return cls._opened(folder, options, None)

    @classmethod
    def of_volumes(cls, paths: Sequence[Path], options: ScanOptions, channels: int) -> Source:
        """The volumes of a file for a network that takes so many ``channels``.

        Their targets need not be there. Where fields are in files of their own ``paths`` has one
        for each.

        Raises:
            DataError: as `scan_arrays`.
        """
        said = replace((options.mapping or DataMap()).without_targets, files="")
        if not (said.fields and said.of_files):
            return cls._opened(paths[0], replace(options, mapping=said), channels)
        if len(paths) != len(said.fields):
            raise DataError(
                f"{paths[0]}: the network takes {len(said.fields)} files as channels, so no file "
                "alone is one of its volumes\n    give the folder in which they are, as "
                f"{' and '.join(map(printable, said.fields))}"
            )
        each = replace(options, mapping=replace(said, fields=()))
        shares = _shares(channels, len(paths))
        return Fields([cls(scan_arrays(path, each, shares)) for path in paths], said.fields)

    @classmethod
    def _opened(cls, path: Path, options: ScanOptions, channels: int | None) -> Source:
        said = options.mapping
        if said is None or not said.fields:
            return cls(scan_arrays(path, options, None if channels is None else (channels,)))
        shares = None if channels is None else _shares(channels, len(said.fields))
        maps = [replace(options, mapping=of) for of in said.of_fields]
        return Fields([cls(scan_arrays(path, of, shares)) for of in maps], said.fields)

    def where(self, sample: int) -> str:
        row = self.arrays.places[sample][1]
        return str(self._path(sample)) + ("" if row is None else f", row {row}")

    def target(self, sample: int) -> Array:
        return self.arrays.targets[sample]

    def read(self, sample: int, box: Box) -> Array:
        """The box, in one selection of the array.

        Raises:
            DataError: the file has gone, is damaged, or has changed since the folder was scanned.
        """
        arrays = self.arrays
        number, row = arrays.places[sample]
        stored = arrays.order.to_file(box)
        if row is not None:
            stored = Box((row, *stored.lo), (row + 1, *stored.hi))
        found = self._read(sample, arrays.arrays[number], stored)
        if row is not None:
            found = found[0]
        return arrays.order.to_volume(found.astype(found.dtype.newbyteorder("="), copy=False))

    def labels(self, sample: int, box: Box) -> Array:
        """The box, in one selection; raises as `read`."""
        number, row = self.arrays.places[sample]
        array = self.arrays.labels[number]
        stored = box
        if len(array.shape) == 4:
            first = row or 0
            stored = Box((first, *box.lo), (first + 1, *box.hi))
        found = self._read(sample, array, stored).reshape(box.shape)
        return as_labels(found, len(self.classes), f"{self.where(sample)}: {array.key!r}")

    def _read(self, sample: int, array: ArrayAt, stored: Box) -> Array:
        arrays = self.arrays
        file = arrays.files[arrays.places[sample][0]]
        path = arrays.folder / file
        kind = kind_of_file(path)
        if kind not in self.openers:
            with unchanged(path, self.names[sample], arrays.stamps[file]), naming(path, kind):
                return read_array_box(path, array, stored)
        wanted = StoredArray(
            path=path,
            kind=kind,
            key=array.key,
            shape=array.shape,
            dtype=np.dtype(array.dtype).name,
            sample=self.names[sample],
            stamped=stamped_file(path, array.key),
            stamp=arrays.stamps[file],
            reach=arrays.reach,
        )
        return self.openers[kind].read(wanted, stored.slices())

    def storage(self, sample: int) -> Storage | None:
        """Known of .npy and .npz in C's order, whose samples lie in one piece each."""
        array = self.arrays.arrays[self.arrays.places[sample][0]]
        if kind_of_file(self._path(sample)) in self.openers or array.fortran:
            return None
        item = np.dtype(array.dtype).itemsize
        size = item * math.prod(self.stored)
        return Storage(self.arrays.order, self.stored, item, size, bridged=True)

    def files(self, sample: int) -> tuple[Path, ...]:
        """The volume's, and the table."""
        table = self.arrays.table
        return (self._path(sample), *(() if table is None else (table,)))

    def alone(self, sample: int) -> MappedFolder:
        one = slice(sample, sample + 1)
        arrays = self.arrays
        return MappedFolder(
            replace(
                arrays,
                places=arrays.places[one],
                names=arrays.names[one],
                targets=arrays.targets[one],
            )
        )

    def close(self) -> None:
        for opener in self.openers.values():
            opener.close()

    def _path(self, sample: int) -> Path:
        return self.arrays.folder / self.arrays.files[self.arrays.places[sample][0]]


def _shares(channels: int, fields: int) -> range:
    """How many of the channels one of the fields may have, where each has one at least."""
    return range(1, max(1, channels - fields + 1) + 1)
