"""Reads and writes CosmoFlow's TFRecords, MLPerf's and SC18's, without TensorFlow.

A file of MLPerf's holds one `tf.train.Example` with ``x``, the bytes of little-endian int16 (D, H,
W, C), and ``y``, P numbers. It is gzip or plain, by its first bytes and not by its name. Of a plain
file the pieces of a box are read; its framing is checked, and the sum over the record where the
box is all of the volume. Gzip has no random access: each rank unpacks the whole sample, once,
and checks its sum.

Files of Mathuriya et al. 2018 hold many samples. A record is one `tf.train.Example` with
``data_raw``, the bytes of a cube (D, H, W) of counts, and ``label_raw``, those of its 2 or 3
physical parameters; both float64 in what the public code writes [NERSC/CosmoFlow], float32 by the
sizes that the paper gives (section IV-C: 64 samples of 8 MB in 512 MB). Of a cube's bytes only one
of the two can be meant. Files are plain: of a box the pieces are read; of every record the framing
is checked, and its sum where all of it is read.
"""

from __future__ import annotations

import itertools
import math
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

import google_crc32c
import numpy as np

from hyperslab.errors import DataError
from hyperslab.formats import targets
from hyperslab.formats.arrays.open import Catalog, StoredArray, scan_headers
from hyperslab.formats.arrays.source import ArrayFolder
from hyperslab.formats.files import Refuse, check_alike, list_files, naming, sift
from hyperslab.formats.source import PUBLIC_KEYS, Array, Extras, ScanOptions, Source, SourceView
from hyperslab.formats.storage import Storage
from hyperslab.formats.storage_order import DHW, DHWC
from hyperslab.formats.targets import Parameters, as_numbers
from hyperslab.formats.tfrecord import records
from hyperslab.formats.writer import SampleToWrite, Writer, open_gzip_writer
from hyperslab.geometry import Box

if TYPE_CHECKING:  # torch
    from hyperslab.comm import Grid

CHANNEL_REDSHIFTS = (0.0, 0.5, 1.5, 3.0)
"""Redshifts of MLPerf's universes, in the order of their channels: those of the public files."""

CHANNELS = len(CHANNEL_REDSHIFTS)

KEPT = 2
"""Unpacked samples in memory: neighbours in a mini-batch are not asked for again."""


class TfRecordFolder(ArrayFolder):
    """Shows files of one example each. A target is read with its volume, and then remembered."""

    suffixes = (".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz")
    summed_whole = True

    def __init__(self, catalog: Catalog) -> None:
        super().__init__(catalog)
        self._targets: dict[int, Array] = {}
        self._kept: OrderedDict[int, records.Example] = OrderedDict()
        self._lock = threading.Lock()  # of what is kept
        self._reading: dict[int, threading.Lock] = {}  # of each sample

    @classmethod
    def scan(
        cls, path: str | Path, grid: Grid, shape: tuple[int, ...] | None = None
    ) -> TfRecordFolder:
        """Returns the folder as the main rank sees it. All ranks call this.

        ``shape`` is the (D, H, W, C) of ``x``, which the files do not tell; without it they are
        MLPerf's cubes of four channels. The first file is read whole, of the others the framing.

        Raises:
            DataError: the folder is missing or holds no such file; a file is truncated, no
                TFRecord, of several records, or of another length than the first; the first has
                no ``x`` or ``y``, or ``x`` is not of the shape.
        """
        from hyperslab.comm.agreement import broadcast_from_main

        return cls(broadcast_from_main(lambda: _scan_single(Path(path), shape)))

    @classmethod
    def open_folder(cls, folder: Path, options: ScanOptions) -> Source:  # type: ignore[override]
        """Opens a folder of MLPerf's, or of SC18's if its first readable file is one."""
        if _is_sc18(folder):
            return Sc18Folder.open_folder(folder, options)
        return cls(_scan_single(folder, None, options.refuse))

    def read(self, sample: int, box: Box) -> Array:
        """Reads a box; of gzip from what was unpacked, once. Raises as `ArrayFolder.read`."""
        array = self.catalog.volumes[sample]
        with self._example(sample) as example:
            dtype = np.dtype(array.dtype)
            values = example.box(array.key, array.shape, dtype, DHWC.to_file(box))
        return DHWC.to_volume(values)

    def target(self, sample: int) -> Array:
        """Returns the targets; errors as `read`."""
        if sample not in self._targets:
            with self._example(sample):
                pass
        return self._targets[sample]

    def storage(self, sample: int) -> Storage:
        path = self.path(sample)
        plain = super().storage(sample)
        assert plain is not None, "it lies in one piece"
        with naming(path, "TFRecord"):
            if not records.is_gzip(path):
                return plain
            size = path.stat().st_size
        return replace(plain, size=size, compression="gzip", packed=True, whole=True)

    def close(self) -> None:
        with self._lock:
            self._kept.clear()

    @contextmanager
    def _example(self, sample: int) -> Iterator[records.Example]:
        """Gives the example: kept if it was unpacked, else in its open file.

        Threads read side by side, but one after the other of one sample, which is unpacked once.
        """
        with self._lock:
            reading = self._reading.setdefault(sample, threading.Lock())
        with reading, self.catalog.as_scanned(sample, self.catalog.volumes[sample]):
            with self._lock:
                kept = self._kept.get(sample)
                if kept is not None:
                    self._kept.move_to_end(sample)
            if kept is not None:
                yield kept
                return
            with records.opened_example(self.path(sample)) as example:
                if sample not in self._targets:
                    self._targets[sample] = _target(example, len(self.parameters.names))
                if example.body is None:  # it was unpacked
                    with self._lock:
                        self._kept[sample] = example
                        while len(self._kept) > KEPT:
                            self._kept.popitem(last=False)
                yield example


def _is_sc18(folder: Path) -> bool:
    """Tells if the first record that is whole names its volume so."""
    for name in list_files(folder, TfRecordFolder.suffixes):
        path = folder / name
        try:
            if not records.is_gzip(path):
                with path.open("rb") as file:
                    return DATA_KEY in records.example_at(file, 0, str(path))[0].features
        except (OSError, EOFError, ValueError, DataError):
            continue  # the scan will say what is wrong with it
    return False


def _scan_single(
    folder: Path, shape: tuple[int, ...] | None, refuse: Refuse | None = None
) -> Catalog:
    files = list_files(folder, TfRecordFolder.suffixes)
    about: list[tuple[str, int, tuple[int, ...], int]] = []  # of the first, which is read whole

    def look(name: str) -> None:
        path = Path(name)
        with naming(path, "TFRecord"):
            found = records.record_length(path)
            if not about:
                with records.opened_example(path) as example:
                    stored = _shape(path, len(example.bytes("x")), shape)
                    file = path.relative_to(folder).as_posix()
                    about.append((file, found, stored, len(_target(example, None))))
        check_alike(path, {"record size": found}, about[0][0], {"record size": about[0][1]})

    good, stamps = scan_headers(folder, files, (), look, refuse)
    _, _, stored, count = about[0]
    return Catalog(
        folder=folder,
        files=tuple(file for file, _ in good),
        volumes=(StoredArray("x", stored, "<i2"),) * len(good),
        names=tuple(file.removesuffix(".gz").rpartition(".")[0] for file, _ in good),
        stamps=stamps,
        order=DHWC,
        targets=np.empty((len(good), 0)),  # each is read with its volume
        parameters=Parameters.normalised(targets.universe_names(count)),
        redshifts=CHANNEL_REDSHIFTS if stored[-1] == CHANNELS else (),
    )


def _shape(path: Path, size: int, shape: tuple[int, ...] | None) -> tuple[int, ...]:
    width = round((size / 2 / CHANNELS) ** (1 / 3))
    stored = tuple(shape or (width, width, width, CHANNELS))
    if len(stored) != 4 or min(stored) < 1 or 2 * math.prod(stored) != size:
        wanted = f"shape={stored}" if shape else f"a cube of {CHANNELS} channels"
        raise DataError(
            f"{path}: 'x' has {size} bytes, which are not int16 of {wanted}; open "
            "TfRecordFolder.scan(path, grid, shape=(D, H, W, C))"
        )
    return stored


def _target(example: records.Example, count: int | None) -> Array:
    where = f"{example.where}: 'y'"
    values = as_numbers(example.floats("y"), where)
    if values.size != (count or values.size):
        raise DataError(f"{where} is {values.tolist()}; needs {count} finite numbers")
    return values


PLAIN_SUFFIXES = (".tfrecord", ".tfrecords")

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
        return Parameters.normalised(targets.numbered_names(count))
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
        first: dict[bytes, str] = {}
        labels = zip(catalog.names, catalog.targets, strict=True)
        self.volumes = {name: first.setdefault(own.tobytes(), name) for name, own in labels}

    @classmethod
    def open_folder(cls, folder: Path, options: ScanOptions) -> Sc18Folder:
        """Opens a folder: all records are looked at, and none of the volumes is read."""
        return cls(_scan_many(folder, options.refuse))

    def where(self, sample: int) -> str:
        return f"{self.path(sample)}, record {self.catalog.volumes[sample].key}"

    def read(self, sample: int, box: Box) -> Array:
        """Reads a box of the record's bytes. Raises as `ArrayFolder.read`."""
        array = self.catalog.volumes[sample]
        with self.catalog.as_scanned(sample, array), self.path(sample).open("rb") as file:
            example, _ = records.example_at(file, array.at, self.where(sample))
            dtype = np.dtype(array.dtype)
            values = example.box(DATA_KEY, array.shape, dtype, DHW.to_file(box))
        return DHW.to_volume(values).astype(np.float32)

    def target(self, sample: int) -> Array:
        return sc18_target(self.parameters, self.catalog.targets[sample])

    def extras(self, sample: int) -> Extras:
        arrays = {"physPar": self.catalog.targets[sample], "redshifts": np.array(self.redshifts)}
        return Extras(PUBLIC_KEYS, self.parameters.names, self.target(sample), arrays)


@dataclass(frozen=True, slots=True)
class _Record:
    place: int  # [B]
    size: int  # of the voxels [B]
    labels: bytes


def _scan_many(folder: Path, refuse: Refuse | None) -> Catalog:
    def look(name: str) -> list[_Record]:
        path = Path(name)
        with naming(path, "TFRecord"):
            return _records(path)

    found, stamps = scan_headers(folder, list_files(folder, PLAIN_SUFFIXES), (), look, refuse)
    first, (one, *_) = found[0]
    stored, dtype = _cube(folder / first, one.size)
    wanted = {"size": one.size, "labels": _labels(folder / first, one.labels, dtype).size}

    def alike(entry: tuple[str, list[_Record]]) -> targets.Floats:
        file, held = entry
        for number, record in enumerate(held):
            labels = _labels(folder / file, record.labels, dtype)
            found = {"size": record.size, "labels": labels.size}
            check_alike(f"{folder / file}, record {number}", found, first, wanted)
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
        parameters=sc18_parameters(wanted["labels"]),
        redshifts=(0.0,),
    )


def _records(path: Path) -> list[_Record]:
    """Finds the place of every record's voxels, and its labels."""
    if records.is_gzip(path):
        raise DataError(f"{path}: is gzip, which has no records to find: unpack it with gunzip")
    found = []
    with path.open("rb") as file:
        for place, example in records.examples_in(file, path):
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


def _labels(path: Path, data: bytes, dtype: str) -> targets.Floats:
    if len(data) % np.dtype(dtype).itemsize or not data:
        raise DataError(f"{path}: {LABEL_KEY!r} has {len(data)} bytes, not those of {dtype}")
    return as_numbers(np.frombuffer(data, dtype), f"{path}: {LABEL_KEY!r}")


class TfRecordWriter(Writer):
    """Writes records of ``x``, the bytes of int16 (D, H, W, C), and ``y``, float32.

    Parts are named as by MLPerf's script, which cuts along D, then H, then W, counts the parts and
    puts the name of the cube's own folder before that of the cube: so that all can lie in one.
    [sparticlesteve/cosmoflow-benchmark and mlcommons/hpc, prepare.py: split_universe, process_file]
    """

    compressions = ("none", "gzip")
    named = False
    suffix = ".tfrecord"

    def misfit(self, source: Source) -> str:
        channels, *extents = source.shape
        if labels := super().misfit(source):
            return labels
        if source.dtype != np.int16:
            return f"{source.dtype.name} (MLPerf's hold int16)"
        if channels != CHANNELS or len(set(extents)) > 1:
            words = " x ".join(map(str, source.shape))
            return f"{words} (C x D x H x W) voxels (MLPerf's are cubes of {CHANNELS} channels)"
        if 2 * math.prod(source.shape) >= records.MESSAGE_LIMIT:
            return "samples of 2 GiB and more"
        return ""

    def names(self, source: Source, root: str) -> Sequence[str]:
        return [self._name(source, sample, root) for sample in range(len(source.names))]

    @staticmethod
    def _name(source: Source, sample: int, root: str) -> str:
        part = source.part(sample)
        if part is None:
            return source.names[sample]
        *folders, base = [root, *part.volume.split("/")]
        return f"{folders[-1]}_{base}_{part.number:03}"

    def stored_target(self, exact: Array) -> Array:
        return exact.astype(np.float32).astype(np.float64)

    def write(self, folder: Path, name: str, sample: SampleToWrite) -> None:
        size = 2 * math.prod(sample.source.shape)
        target = np.asarray(sample.target, "<f4").tobytes()
        after = feature_head(b"y", len(target), 2) + target
        pieces = (
            np.ascontiguousarray(DHWC.from_volume(slab), "<i2").tobytes()
            for _, slab in sample.values()
        )
        with open_gzip_writer(folder / f"{name}{self.suffix}", sample.compression) as file:
            write_example(file, b"", feature_head(b"x", size, 1), size, pieces, after)


def write_example(
    file: IO[bytes], before: bytes, head: bytes, size: int, pieces: Iterable[bytes], after: bytes
) -> None:
    """Writes one example in TensorFlow's framing.

    Its features: ``before``, one of ``size`` bytes, which has a ``head`` and comes in pieces, and
    ``after``.
    """
    rest = len(before) + len(head) + size + len(after)
    features = field_head(1, rest)  # Example.features
    length = struct.pack("<Q", len(features) + rest)
    file.write(length + struct.pack("<I", records.masked_crc(google_crc32c.value(length))))
    summed = 0
    for piece in itertools.chain([features + before + head], pieces, [after]):
        summed = google_crc32c.extend(summed, piece)
        file.write(piece)
    file.write(struct.pack("<I", records.masked_crc(summed)))


def feature_head(name: bytes, size: int, kind: int) -> bytes:
    """Encodes what stands before the ``size`` bytes of a feature: one string (1) or floats (2)."""
    head = field_head(1, size)  # the list's values
    head = field_head(kind, len(head) + size) + head  # the list
    head = field_head(1, len(name)) + name + field_head(2, len(head) + size) + head  # key and value
    return field_head(1, len(head) + size) + head  # Features.feature


def field_head(number: int, size: int) -> bytes:
    """Returns the tag of a field of bytes, and how many there are."""
    found = bytes([number << 3 | 2])
    while size > 127:
        found = found + bytes([size & 127 | 128])
        size = size >> 7
    return found + bytes([size])


FEWEST_LABELS = 2
"""Labels: their first data set had two."""


class Sc18Writer(Writer):
    """``data_raw`` and ``label_raw``, float64 as the public code reads them; 64 samples a file.

    Cubes of one channel. Labels are physical values, of the first two or three of `SC18_RANGES`.
    """

    per_file = 64
    suffix = ".tfrecord"

    def misfit(self, source: Source) -> str:
        if labels := super().misfit(source):
            return labels
        channels, *extents = source.shape
        if channels != 1:
            return f"{channels} channels (SC18's files hold one redshift: --redshifts 0)"
        if len(set(extents)) > 1:
            return f"{' x '.join(map(str, extents))} voxels (SC18's are cubes)"
        if 8 * math.prod(extents) >= records.MESSAGE_LIMIT:
            return "samples of 2 GiB and more"
        names = source.parameters.names
        known = tuple(SC18_RANGES)
        ours = tuple("n_s" if name == "N_spec" else name for name in names)
        if len(names) < FEWEST_LABELS or ours != known[: len(names)]:
            return (
                f"the parameters {', '.join(names)} (SC18's are {', '.join(known)}: "
                f"--targets {','.join(known)})"
            )
        if all(low == -1 and high == 1 for low, high in source.parameters.ranges.values()):
            return "targets whose physical values are not known"
        return ""

    def view(self, source: Source) -> Source:
        return source if self.misfit(source) else Sc18View(source)

    def write(self, folder: Path, name: str, sample: SampleToWrite) -> None:
        size = 8 * math.prod(sample.source.shape)
        physical = np.asarray(sample.extras.arrays["physPar"], "<f8").tobytes()
        label = feature_head(LABEL_KEY.encode(), len(physical), 1) + physical
        head = feature_head(DATA_KEY.encode(), size, 1)
        pieces = (np.ascontiguousarray(slab, "<f8").tobytes() for _, slab in sample.values())
        with (folder / f"{name}{self.suffix}").open("xb") as file:
            write_example(file, label, head, size, pieces, b"")


class Sc18View(SourceView):
    """A source as the format gives it back: float32 values, targets of the format's own ranges."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.dtype = np.dtype(np.float32)
        self.parameters = sc18_parameters(len(source.parameters.names))

    def read(self, sample: int, box: Box) -> Array:
        return self.source.read(sample, box).astype(np.float32)

    def target(self, sample: int) -> Array:
        return sc18_target(self.parameters, self._physical(sample))

    def _physical(self, sample: int) -> Array:
        stored = self.source.extras(sample).arrays.get("physPar")
        if stored is not None:
            return np.asarray(stored, np.float64)
        return self.source.parameters.physical(self.source.target(sample))

    def extras(self, sample: int) -> Extras:
        physical = {"physPar": self._physical(sample)}
        return Extras(names=self.parameters.names, target=self.target(sample), arrays=physical)
