"""Reads TFRecords of Mathuriya et al. 2018 as a `Source`: many samples a file, without TensorFlow.

A record is one `tf.train.Example` with ``data_raw``, the bytes of a cube (D, H, W) of counts,
and ``label_raw``, those of its 2 or 3 physical parameters; both float64 in what the public code
writes [NERSC/CosmoFlow], float32 by the sizes that the paper gives (section IV-C: 64 samples of
8 MB in 512 MB). Of a cube's bytes only one of the two can be meant. Files are plain: of a box
the pieces are read; of every record the framing is checked, and its sum where all of it is read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hyperslab.errors import DataError
from hyperslab.formats.files import Refuse, Stamp, list_files, naming, sift, unchanged
from hyperslab.formats.source import PUBLIC_KEYS, Array, Extras, ScanOptions, Source
from hyperslab.formats.storage import Storage, read_strided
from hyperslab.formats.storage_order import DHW
from hyperslab.formats.targets import Floats, Parameters, numbered_names
from hyperslab.formats.tfrecord import records
from hyperslab.formats.tfrecord.records import FileBytes
from hyperslab.geometry import Box

SUFFIXES = (".tfrecord", ".tfrecords")

DATA_KEY = "data_raw"
LABEL_KEY = "label_raw"

MOST_LABELS = 8192
"""[B]"""

SC18_RANGES: Mapping[str, tuple[float, float]] = {
    "Omega_m": (0.25, 0.35),
    "sigma_8": (0.78, 0.95),
    "n_s": (0.9, 1.0),
}
"""Ranges of the labels, in their order (section IV-C); the ends are -1 and 1 of the targets."""


def sc18_parameters(count: int) -> Parameters:
    """Describes ``count`` labels: the first ones of `SC18_RANGES`, or numbers without a name."""
    if count > len(SC18_RANGES):
        return Parameters.normalised(numbered_names(count))
    named = list(SC18_RANGES.items())[:count]
    centre = tuple((lo + hi) / 2 for _, (lo, hi) in named)
    scale = tuple((hi - lo) / 2 for _, (lo, hi) in named)
    return Parameters(tuple(name for name, _ in named), centre, scale)


def sc18_target(parameters: Parameters, physical: Array) -> Array:
    """Returns the targets of physical labels."""
    return (np.asarray(physical, np.float64) - parameters.centre) / np.asarray(parameters.scale)


@dataclass(frozen=True, slots=True)
class Sc18Records:
    """N records in some files, each a cube of ``stored`` voxels of ``dtype``.

    ``places``: of each record the number of its file, its own in that, where its voxels begin
    there, and where all of it begins and ends [B].
    """

    folder: Path
    files: tuple[str, ...]
    names: tuple[str, ...]
    stored: tuple[int, ...]
    dtype: str
    places: tuple[tuple[int, int, int, int, int], ...]
    labels: Floats  # (N, P)
    stamps: Mapping[str, Stamp]  # by file


class Sc18Folder(Source):
    """Samples ``{file}_{number}``, or ``{file}`` where it is the only one of its file.

    Values are given as float32, which counts are exactly. Records do not say which universe they
    are of, but the parts of one have the same labels: these stay in one split.
    """

    redshifts = (0.0,)
    summed_whole = True

    def __init__(self, catalog: Sc18Records) -> None:
        self.catalog = catalog
        self.names = catalog.names
        self.order = DHW
        self.shape = (1, *catalog.stored)
        self.dtype = np.dtype(np.float32)
        self.parameters = sc18_parameters(catalog.labels.shape[1])
        first: dict[bytes, str] = {}
        for name, labels in zip(catalog.names, catalog.labels, strict=True):
            first.setdefault(labels.tobytes(), name)
        self._universes = first

    def __reduce__(self) -> tuple[Any, ...]:
        return Sc18Folder, (self.catalog,)

    @classmethod
    def open_folder(cls, folder: Path, options: ScanOptions) -> Sc18Folder:
        """Opens a folder: all records are looked at, and none of the volumes is read."""
        return cls(_scan(folder, options.refuse))

    def where(self, sample: int) -> str:
        return f"{self._path(sample)}, record {self.catalog.places[sample][1]}"

    def read(self, sample: int, box: Box) -> Array:
        """Read one box.

        Raises:
            DataError: the file has gone, or has changed since the folder was scanned.
        """
        number, _, start, lo, hi = self.catalog.places[sample]
        stored = DHW.to_file(box)
        path = self._path(sample)
        stamp = self.catalog.stamps[self.catalog.files[number]]
        dtype = np.dtype(self.catalog.dtype)
        with (
            unchanged(path, self.names[sample], stamp),
            naming(path, "TFRecord"),
            path.open("rb") as file,
        ):
            if stored == Box.whole(self.catalog.stored):
                records.Example(path, {}, FileBytes(file.fileno(), lo, hi)).check()
            values = read_strided(file.fileno(), start, self.catalog.stored, dtype, stored)
        return DHW.to_volume(values).astype(np.float32)

    def target(self, sample: int) -> Array:
        return sc18_target(self.parameters, self.catalog.labels[sample])

    def volume(self, sample: int) -> str:
        name = self.names[sample]
        return self.volumes.get(name, self._universes[self.catalog.labels[sample].tobytes()])

    def storage(self, sample: int) -> Storage:
        stored = self.catalog.stored
        itemsize = np.dtype(self.catalog.dtype).itemsize
        return Storage(DHW, stored, itemsize, math.prod(stored) * itemsize, bridged=True)

    def extras(self, sample: int) -> Extras:
        arrays = {"physPar": self.catalog.labels[sample], "redshifts": np.array(self.redshifts)}
        return Extras(PUBLIC_KEYS, self.parameters.names, self.target(sample), arrays)

    def files(self, sample: int) -> tuple[Path, ...]:
        return (self._path(sample),)

    def alone(self, sample: int) -> Sc18Folder:
        one = slice(sample, sample + 1)
        catalog = self.catalog
        place = catalog.places[sample]
        return Sc18Folder(
            replace(
                catalog,
                files=(catalog.files[place[0]],),
                names=catalog.names[one],
                places=((0, *place[1:]),),
                labels=catalog.labels[one],
            )
        )

    def _path(self, sample: int) -> Path:
        return self.catalog.folder / self.catalog.files[self.catalog.places[sample][0]]


@dataclass(frozen=True, slots=True)
class _Record:
    start: int  # of the voxels [B]
    size: int  # of the voxels [B]
    labels: bytes
    lo: int  # of all of it [B]
    hi: int


def _scan(folder: Path, refuse: Refuse | None) -> Sc18Records:
    stamps: dict[str, Stamp] = {}

    def look(file: str) -> list[_Record]:
        path = folder / file
        with naming(path, "TFRecord"):
            stamps[file] = Stamp.of(path)  # a change from now on is noticed
            return _records(path)

    found = sift(list_files(folder, SUFFIXES), look, refuse)
    first, (one, *_) = found[0]
    stored, dtype = _cube(folder / first, one.size)
    count = _labels(folder / first, one.labels, dtype).size

    def alike(entry: tuple[str, list[_Record]]) -> Floats:
        file, held = entry
        for number, record in enumerate(held):
            labels = _labels(folder / file, record.labels, dtype)
            if (record.size, labels.size) != (one.size, count):
                raise DataError(
                    f"{folder / file}, record {number}: holds {record.size} bytes and "
                    f"{labels.size} labels, but the first of {first} {one.size} and {count}; all "
                    "records of a data set are stored alike"
                )
        return np.array([_labels(folder / file, record.labels, dtype) for record in held])

    good = sift(found, alike, refuse)
    files = tuple(file for (file, _), _ in good)
    stems = [(file.rpartition(".")[0], len(held)) for (file, held), _ in good]
    names = tuple(
        stem if count == 1 else f"{stem}_{number:03}"
        for stem, count in stems
        for number in range(count)
    )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(
            f"{folder}: two records would have the name {twice[0]!r}, by their files and places in "
            "them; a sample is known by its name: rename one of the files"
        )
    return Sc18Records(
        folder=folder,
        files=files,
        names=names,
        stored=stored,
        dtype=dtype,
        places=tuple(
            (i, number, record.start, record.lo, record.hi)
            for i, ((_, held), _) in enumerate(good)
            for number, record in enumerate(held)
        ),
        labels=np.concatenate([labels for _, labels in good]),
        stamps=stamps,
    )


def _records(path: Path) -> list[_Record]:
    """Finds the place of every record's voxels, and its labels."""
    if records.is_gzip(path):
        raise DataError(f"{path}: is gzip, which has no records to find: unpack it with gunzip")
    found = []
    with records.opened_examples(path) as examples:
        for example in examples:
            data = example.bytes(DATA_KEY)
            assert isinstance(data, FileBytes), "the file is not packed"
            body = example.body
            assert body is not None, "the file is not packed"
            labels = example.bytes(LABEL_KEY)
            if len(labels) > MOST_LABELS:
                raise DataError(f"{path}: {LABEL_KEY!r} has {len(labels)} bytes; needs a few")
            found.append(_Record(data.lo, len(data), bytes(labels), body.lo, body.hi))
    return found


def _cube(path: Path, size: int) -> tuple[tuple[int, ...], str]:
    """Returns the shape and the type of so many bytes."""
    for dtype in ("<f8", "<f4"):
        width = round((size / np.dtype(dtype).itemsize) ** (1 / 3))
        if width > 0 and width**3 * np.dtype(dtype).itemsize == size:
            return (width, width, width), dtype
    raise DataError(f"{path}: {DATA_KEY!r} has {size} bytes, not those of a cube of float64")


def _labels(path: Path, data: bytes, dtype: str) -> Floats:
    if len(data) % np.dtype(dtype).itemsize or not data:
        raise DataError(f"{path}: {LABEL_KEY!r} has {len(data)} bytes, not those of {dtype}")
    labels = np.frombuffer(data, dtype).astype(np.float64)
    if not np.isfinite(labels).all():
        raise DataError(f"{path}: {LABEL_KEY!r} is {labels.tolist()}; needs finite numbers")
    return labels
