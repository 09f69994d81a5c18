"""Reads TFRecords of Mathuriya et al. 2018 as a `Source`: many samples a file, without TensorFlow.

A record is one `tf.train.Example` with ``data_raw``, the bytes of a cube (D, H, W) of counts,
and ``label_raw``, those of its 2 or 3 physical parameters; both float64 in what the public code
writes [NERSC/CosmoFlow], float32 by the sizes that the paper gives (section IV-C: 64 samples of
8 MB in 512 MB). Of a cube's bytes only one of the two can be meant. Files are plain: of a box
the pieces are read; of every record the framing is checked, and its sum where all of it is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyperslab.errors import DataError
from hyperslab.formats.arrays.open import Catalog, StoredArray, scan_headers
from hyperslab.formats.arrays.source import ArrayFolder
from hyperslab.formats.files import Refuse, list_files, naming, sift
from hyperslab.formats.source import PUBLIC_KEYS, Array, Extras, ScanOptions
from hyperslab.formats.storage import DHW
from hyperslab.formats.targets import Floats, Parameters, as_numbers, numbered_names
from hyperslab.formats.tfrecord import records
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
    return Parameters.of_ranges(dict(itertools.islice(SC18_RANGES.items(), count)))


def sc18_target(parameters: Parameters, physical: Array) -> Array:
    """Returns the targets of physical labels."""
    return (np.asarray(physical, np.float64) - parameters.centre) / np.asarray(parameters.scale)


class Sc18Folder(ArrayFolder):
    """Shows samples ``{file}_{number}``, or ``{file}`` where it is the only one of its file.

    The catalogue has an array for each record: its key is the record's number in the file, it is
    ``at`` where the record begins, and its targets are the labels as stored. Values are given as
    float32, which counts are exactly. Records do not say which universe they are of, but the parts
    of one have the same labels: these stay in one split.
    """

    summed_whole = True

    def __init__(self, catalog: Catalog) -> None:
        super().__init__(catalog)
        self._universes: dict[bytes, str] = {}
        for name, labels in zip(catalog.names, catalog.targets, strict=True):
            self._universes.setdefault(labels.tobytes(), name)

    @classmethod
    def open_folder(cls, folder: Path, options: ScanOptions) -> Sc18Folder:
        """Opens a folder: all records are looked at, and none of the volumes is read."""
        return cls(_scan(folder, options.refuse))

    def where(self, sample: int) -> str:
        return f"{self.path(sample)}, record {self.catalog.volumes[sample].key}"

    def read(self, sample: int, box: Box) -> Array:
        """Reads a box of the record's bytes. Raises as `ArrayFolder.read`."""
        array = self.catalog.volumes[sample]
        with (
            self.catalog.as_scanned(sample, array),
            records.opened_example_at(self.path(sample), array.at, self.where(sample)) as example,
        ):
            dtype = np.dtype(array.dtype)
            values = example.box(DATA_KEY, array.shape, dtype, DHW.to_file(box))
        return DHW.to_volume(values).astype(np.float32)

    def target(self, sample: int) -> Array:
        return sc18_target(self.parameters, self.catalog.targets[sample])

    def volume(self, sample: int) -> str:
        name = self.names[sample]
        return self.volumes.get(name, self._universes[self.catalog.targets[sample].tobytes()])

    def extras(self, sample: int) -> Extras:
        arrays = {"physPar": self.catalog.targets[sample], "redshifts": np.array(self.redshifts)}
        return Extras(PUBLIC_KEYS, self.parameters.names, self.target(sample), arrays)


@dataclass(frozen=True, slots=True)
class _Record:
    place: int  # [B]
    size: int  # of the voxels [B]
    labels: bytes


def _scan(folder: Path, refuse: Refuse | None) -> Catalog:
    def look(name: str) -> list[_Record]:
        path = Path(name)
        with naming(path, "TFRecord"):
            return _records(path)

    found, stamps = scan_headers(folder, list_files(folder, SUFFIXES), (), look, refuse)
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
    stems = [(file.rpartition(".")[0], len(held)) for (file, held), _ in good]
    names = tuple(
        stem if count == 1 else f"{stem}_{number:03}"
        for stem, count in stems
        for number in range(count)
    )
    return Catalog(
        folder=folder,
        files=tuple(file for (file, held), _ in good for _ in held),
        volumes=tuple(
            StoredArray(str(number), stored, dtype, record.place)
            for (_, held), _ in good
            for number, record in enumerate(held)
        ),
        names=names,
        stamps=stamps,
        order=DHW,
        targets=np.concatenate([labels for _, labels in good]),
        parameters=sc18_parameters(count),
        redshifts=(0.0,),
    )


def _records(path: Path) -> list[_Record]:
    """Finds the place of every record's voxels, and its labels."""
    if records.is_gzip(path):
        raise DataError(f"{path}: is gzip, which has no records to find: unpack it with gunzip")
    found = []
    with records.opened_examples(path) as examples:
        for place, example in examples:
            size = len(example.bytes(DATA_KEY))
            labels = example.bytes(LABEL_KEY)
            if len(labels) > MOST_LABELS:
                raise DataError(f"{path}: {LABEL_KEY!r} has {len(labels)} bytes; needs a few")
            found.append(_Record(place, size, bytes(labels)))
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
    return as_numbers(np.frombuffer(data, dtype), f"{path}: {LABEL_KEY!r}")
