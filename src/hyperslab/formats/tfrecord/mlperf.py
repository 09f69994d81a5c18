"""Reads a folder of MLPerf's CosmoFlow TFRecords as a `Source`, without TensorFlow.

A file holds one `tf.train.Example` with ``x``, the bytes of little-endian int16 (D, H, W, C),
and ``y``, P numbers. It is gzip or plain, by its first bytes and not by its name. Of a plain
file the pieces of a box are read; its framing is checked, and the sum over the record where the
box is all of the volume. Gzip has no random access: each rank unpacks the whole sample, once,
and checks its sum.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from hyperslab.comm import Grid
from hyperslab.comm.agreement import broadcast_from_main
from hyperslab.errors import DataError
from hyperslab.formats.arrays.open import Catalog, StoredArray, scan_headers
from hyperslab.formats.arrays.source import ArrayFolder
from hyperslab.formats.files import Refuse, list_files, naming
from hyperslab.formats.source import Array, ScanOptions, Source
from hyperslab.formats.storage import DHWC, Storage
from hyperslab.formats.targets import Parameters, as_numbers, universe_names
from hyperslab.formats.tfrecord import records
from hyperslab.formats.tfrecord.sc18 import DATA_KEY, Sc18Folder
from hyperslab.geometry import Box

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
        self._lock = threading.Lock()

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
        return cls(broadcast_from_main(lambda: _scan(Path(path), shape)))

    @classmethod
    def open_folder(cls, folder: Path, options: ScanOptions) -> Source:  # type: ignore[override]
        """Opens a folder of MLPerf's, or of SC18's if its first readable file is one."""
        if _is_sc18(folder):
            return Sc18Folder.open_folder(folder, options)
        return cls(_scan(folder, None, options.refuse))

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
        """Gives the example: kept if it was unpacked, else in its open file."""
        with self._lock, self.catalog.as_scanned(sample, self.catalog.volumes[sample]):
            if sample in self._kept:
                self._kept.move_to_end(sample)
                yield self._kept[sample]
                return
            with records.opened_example(self.path(sample)) as example:
                if sample not in self._targets:
                    self._targets[sample] = _target(example, len(self.parameters.names))
                if example.unpacked:
                    self._kept[sample] = example
                    while len(self._kept) > KEPT:
                        self._kept.popitem(last=False)
                yield example


def _is_sc18(folder: Path) -> bool:
    """Tells if the first record that is whole names its volume so."""
    for file in list_files(folder, TfRecordFolder.suffixes):
        path = folder / file
        try:
            if not records.is_gzip(path):
                with records.opened_examples(path) as examples:
                    return DATA_KEY in next(examples)[1].features
        except (OSError, EOFError, ValueError, DataError):
            continue  # the scan will say what is wrong with it
    return False


def _scan(folder: Path, shape: tuple[int, ...] | None, refuse: Refuse | None = None) -> Catalog:
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
        if found != about[0][1]:
            raise DataError(
                f"{path}: its record has {found} bytes but that of {about[0][0]} has "
                f"{about[0][1]}; all files of a data set are stored alike"
            )

    good, stamps = scan_headers(folder, files, (), look, refuse)
    _, _, stored, targets = about[0]
    return Catalog(
        folder=folder,
        files=tuple(file for file, _ in good),
        volumes=(StoredArray("x", stored, "<i2"),) * len(good),
        names=tuple(file.removesuffix(".gz").rpartition(".")[0] for file, _ in good),
        stamps=stamps,
        order=DHWC,
        targets=np.empty((len(good), 0)),  # each is read with its volume
        parameters=Parameters.normalised(universe_names(targets)),
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
