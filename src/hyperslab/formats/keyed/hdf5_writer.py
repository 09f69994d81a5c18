"""HDF5 files: the public layout or that of scans, and LBANN's parts."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hyperslab.formats.keyed.writer import KeyedWriter
from hyperslab.formats.shared.chunking import Sides
from hyperslab.formats.shared.storage_order import LBANN_ORDER
from hyperslab.formats.source import Array, Source

SUMMED = ("v110", "v110")
"""The oldest version in which headers and indices have checksums: HDF5 1.10's, of 2016."""


class Hdf5Writer(KeyedWriter):
    """Samples in the public layout, scans as LBANN's LiTS files."""

    suffix = ".hdf5"

    @contextmanager
    def _created(self, path: Path) -> Iterator[Any]:
        with Sink(path) as sink:
            with SinkFile(sink) as file:
                yield file
            sink.check()

    def _create(
        self,
        file: Any,
        key: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        chunks: Sides,
        compression: str,
    ) -> Any:
        filters = None if compression == "none" else compression
        return file.create_dataset(
            key, shape, dtype, chunks=chunks, compression=filters, fletcher32=True
        )

    def _check(self, file: Any) -> None:
        file.sink.check()

    def _put(self, file: Any, key: str, array: Array | None) -> None:
        put_summed(file, key, np.asarray(array))

    def _put_names(self, file: Any, key: str, names: tuple[str, ...]) -> None:
        put_summed(file, key, _bytes(names))

    def _describe(self, file: Any, attributes: Mapping[str, Any]) -> None:
        for key, value in attributes.items():
            stored = _attribute(value)
            if isinstance(stored, str) or np.asarray(stored).dtype.kind in "biufS":
                file.attrs[key] = stored


class LbannWriter(Hdf5Writer):
    """Parts as LBANN's splitter writes them, in the storage type of the cube.

    It transposes the cube to (C, W, H, D) and counts the parts along the dims of that: part
    ``{base}_{ix}_{iy}_{iz}`` begins at (ix, iy, iz)·width along W, H and D. The cube itself is part
    0, 0, 0 of one. [LLNL/lbann, applications/physics/cosmology/cosmoflow/split_cosmoflow_sample.py]
    """

    order = LBANN_ORDER
    read_as = "lbann"
    labels = False

    def names(self, source: Source, root: str) -> Sequence[str]:
        return [self._name(source, sample) for sample in range(len(source.names))]

    @staticmethod
    def _name(source: Source, sample: int) -> str:
        part = source.part(sample)
        if part is not None:
            return f"{part.volume}_{'_'.join(map(str, reversed(part.place)))}"
        name = source.names[sample]
        return name if source.order == LBANN_ORDER else f"{name}_0_0_0"  # they are parts already

    def _keys(self, keys: tuple[str, str]) -> tuple[str, str]:
        return "full", "unitPar"


def put_summed(file: Any, key: str, array: Array) -> None:
    """A small data set with a checksum, which only what is in chunks has."""
    if array.size == 0 or array.ndim == 0:
        file[key] = array
    else:
        file.create_dataset(key, data=array, chunks=array.shape, fletcher32=True)


def read_summed(dataset: Any) -> None:
    """Read a data set with checksums, a row of chunks at a time, so that HDF5 compares them.

    Raises:
        OSError: one does not fit.
    """
    if dataset.fletcher32:
        for lo in range(0, dataset.shape[0], dataset.chunks[0]):
            dataset[lo : lo + dataset.chunks[0]]


class SinkFile(h5py.File):
    """An HDF5 file that is written to a sink."""

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink, "w", libver=SUMMED)
        self.sink = sink


class Sink(io.RawIOBase):
    """A file for HDF5 to write to.

    HDF5 cannot close a file to which it cannot write: it stays open, keeps its space on a full disk
    and crashes the process at its end. So a failure is never said to it but remembered for `check`,
    and what would be written after it is let fall.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("x+b", buffering=0)
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest and self._error is None:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._error = error
        return size

    def check(self) -> None:
        """Nothing, if all was written.

        Raises:
            OSError: something was not.
        """
        if self._error is not None:
            raise self._error

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer)

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(place, whence)

    def tell(self) -> int:
        return self._file.tell()

    def truncate(self, size: int | None = None) -> int:
        try:
            return self._file.truncate(size) if self._error is None else 0
        except OSError as error:
            self._error = error
            return 0

    def close(self) -> None:
        self._file.close()
        super().close()

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _attribute(value: Any) -> Any:
    """As h5py stores it: words as bytes."""
    words = value.tolist() if isinstance(value, np.ndarray) and value.dtype.kind == "O" else value
    if isinstance(words, list) and all(isinstance(word, str) for word in words):
        return _bytes(words)
    return value


def _bytes(words: Sequence[str]) -> Array:
    return np.array([word.encode() for word in words])
