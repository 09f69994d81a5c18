"""Writes samples as HDF5 files, Zarr v3 groups or .npy files.

HDF5 and Zarr (the extra `zarr`) have the same keys: universes as the public files have them,
channels last, scans as LBANN's LiTS files; or HDF5 parts as LBANN's splitter writes them.
numpy's own files come with a table of targets.
"""

from __future__ import annotations

import csv
import io
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np

from hyperslab.errors import DataError, system_errors_as
from hyperslab.formats import optional, storage_order
from hyperslab.formats.arrays.scan import TARGET_SUFFIX, TARGETS_FILE
from hyperslab.formats.manifest import Entry
from hyperslab.formats.source import Array, Source
from hyperslab.formats.targets import SCAN_KEYS
from hyperslab.formats.writer import SampleToWrite, Slabs, Writer
from hyperslab.geometry import Box
from hyperslab.util.atomic_files import append_whole, write_bytes


class KeyedWriter(Writer):
    """Writes universes as the public files have them, channels last; scans as LBANN has them."""

    order: ClassVar[storage_order.StorageOrder] = storage_order.DHWC
    compressions: ClassVar[tuple[str, ...]] = ("none", "gzip")
    labels = True
    chunked = True

    def write(self, folder: Path, name: str, sample: SampleToWrite) -> None:
        with self._created(folder / (name + self.suffix)) as file:
            if sample.source.classes:
                self._write_scan(file, sample)
            else:
                self._write_universe(file, sample)

    def _write_universe(self, file: Any, sample: SampleToWrite) -> None:
        extras = sample.extras
        volume, target = self._keys(extras.keys)
        self._stream(file, volume, self.order, sample, sample.values())
        self._put(file, target, extras.target)
        for key, array in extras.arrays.items():
            self._put(file, key, array)
        self._put_names(file, "namePar", extras.names)
        # The shape of what is no cube would not tell.
        order = "last" if self.order == storage_order.DHWC else "first"
        self._describe(file, {**extras.attributes, "channels": order})

    def _write_scan(self, file: Any, sample: SampleToWrite) -> None:
        extras = sample.extras
        volume, segmentation = SCAN_KEYS
        self._stream(file, volume, storage_order.CDHW, sample, sample.values())
        labels = ((lo, slab[None]) for lo, slab in sample.labels())
        self._stream(file, segmentation, storage_order.CDHW, sample, labels, labels=True)
        affine = {} if extras.affine is None else {"affine": extras.affine}
        classes = list(sample.source.classes)
        self._describe(file, {**affine, **extras.attributes, "classes": classes})

    def _stream(
        self,
        file: Any,
        key: str,
        order: storage_order.StorageOrder,
        sample: SampleToWrite,
        slabs: Slabs,
        *,
        labels: bool = False,
    ) -> None:
        """Creates the array of which these are the slabs, and fills it."""
        source = sample.source
        shape = (1, *source.shape[1:]) if labels else source.shape
        chunk = (shape[0], *sample.chunk) if sample.chunk else shape  # all channels in one
        dataset = self._create(
            file,
            key,
            sample.compression,
            shape=order.stored_shape(shape),
            dtype=np.dtype(np.uint8) if labels else source.dtype,
            chunks=order.stored_shape(chunk),
        )
        for lo, slab in slabs:
            box = Box((0, lo, 0, 0), (shape[0], lo + slab.shape[1], *shape[2:]))
            where = order.to_file(box).slices()
            dataset[where] = np.ascontiguousarray(order.from_volume(slab))
            self._check(file)

    def _keys(self, keys: tuple[str, str]) -> tuple[str, str]:
        return keys

    @abstractmethod
    def _created(self, path: Path) -> AbstractContextManager[Any]:
        """Creates a new file."""

    @abstractmethod
    def _create(self, file: Any, key: str, compression: str, **array: Any) -> Any:
        """Creates a data set to be filled, of the shape, type and chunks that ``array`` says."""

    def _check(self, file: Any) -> None:
        """Raises what went wrong in writing, where the format does not do so itself."""

    @abstractmethod
    def _put(self, file: Any, key: str, array: Array | None) -> None:
        """Writes a small data set."""

    @abstractmethod
    def _put_names(self, file: Any, key: str, names: tuple[str, ...]) -> None:
        """Writes a data set of words."""

    @abstractmethod
    def _describe(self, file: Any, attributes: Mapping[str, Any]) -> None:
        """Writes attributes of the file, as far as the format has such."""


SUMMED_LIBVER = ("v110", "v110")
"""The oldest version in which headers and indices have checksums: HDF5 1.10's, of 2016."""


class Hdf5Writer(KeyedWriter):
    """Writes samples in the public layout, scans as LBANN's LiTS files."""

    suffix = ".hdf5"

    @contextmanager
    def _created(self, path: Path) -> Iterator[Any]:
        with Sink(path) as sink:
            with SinkFile(sink) as file:
                yield file
            sink.check()

    def _create(self, file: Any, key: str, compression: str, **array: Any) -> Any:
        packing = None if compression == "none" else compression
        return file.create_dataset(key, **array, compression=packing, fletcher32=True)

    def _check(self, file: Any) -> None:
        file.sink.check()

    def _put(self, file: Any, key: str, array: Array | None) -> None:
        write_summed(file, key, np.asarray(array))

    def _put_names(self, file: Any, key: str, names: tuple[str, ...]) -> None:
        write_summed(file, key, _bytes(names))

    def _describe(self, file: Any, attributes: Mapping[str, Any]) -> None:
        for key, value in attributes.items():
            stored = _hdf5_attribute(value)
            if isinstance(stored, str) or np.asarray(stored).dtype.kind in "biufS":
                file.attrs[key] = stored


class LbannWriter(Hdf5Writer):
    """Writes parts as LBANN's splitter does, in the storage type of the cube.

    It transposes the cube to (C, W, H, D) and counts the parts along the dims of that: part
    ``{base}_{ix}_{iy}_{iz}`` begins at (ix, iy, iz)·width along W, H and D. The cube itself is part
    0, 0, 0 of one. [LLNL/lbann, applications/physics/cosmology/cosmoflow/split_cosmoflow_sample.py]
    """

    order = storage_order.LBANN_ORDER
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
        return (
            name if source.order == storage_order.LBANN_ORDER else f"{name}_0_0_0"
        )  # they are parts already

    def _keys(self, keys: tuple[str, str]) -> tuple[str, str]:
        return "full", "unitPar"


def write_summed(file: Any, key: str, array: Array) -> None:
    """Writes a small data set with a checksum, which only chunks have."""
    if array.size == 0 or array.ndim == 0:
        file[key] = array
    else:
        file.create_dataset(key, data=array, chunks=array.shape, fletcher32=True)


def check_small_file(
    path: Path, keys: Sequence[str], what: str, remedy: str
) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
    """Reads the data sets of a file that was written before; HDF5 compares their checksums.

    Returns their shapes, and the attributes of the file.

    Raises:
        DataError: it is not ``what`` it should be, or is damaged.
    """
    if not path.is_file():  # HDF5 would wait for a pipe
        raise DataError(f"{path} is not a plain file: {remedy}")
    shapes = []
    try:
        with h5py.File(path, "r", locking=False) as file:
            for key in keys:
                found = file[key]
                if not isinstance(found, h5py.Dataset):
                    raise KeyError(f"{key!r} is no data set")
                shapes.append(found.shape)
                if found.fletcher32:  # a row of chunks at a time
                    for lo in range(0, found.shape[0], found.chunks[0]):
                        found[lo : lo + found.chunks[0]]
            return shapes, dict(file.attrs)
    except (OSError, KeyError) as error:
        raise DataError(f"{path} is not {what} ({error}): {remedy}") from error


def write_small_file(
    path: Path, fill: Callable[[h5py.File], None], *, concurrent: bool = False
) -> None:
    """Writes an HDF5 file that ``fill`` fills, whole or not at all.

    Its bytes are made in memory: what fails later is one plain write.

    Raises:
        DataError: the folder cannot be written or the disk is full.
    """
    # Names of files in memory differ, as HDF5 opens each but once.
    in_memory = {"driver": "core", "backing_store": False}
    with h5py.File(path.name, "w", **in_memory, libver=SUMMED_LIBVER) as file:
        fill(file)
        file.flush()
        image: bytes = file.id.get_file_image()
    with system_errors_as(DataError, f"cannot write {path}", named=False):
        write_bytes(path, image, concurrent=concurrent)


class SinkFile(h5py.File):
    """Writes an HDF5 file to a sink."""

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink, "w", libver=SUMMED_LIBVER)
        self.sink = sink


class Sink(io.FileIO):
    """Takes the bytes that HDF5 writes, and keeps the error if that fails.

    HDF5 cannot close a file to which it cannot write: it stays open, keeps its space on a full disk
    and crashes the process at its end. So a failure is never said to it but remembered for `check`,
    and what would be written after it is let fall.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "x+")
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest and self._error is None:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self._error = error
        return size

    def check(self) -> None:
        """Raises the error with which writing has failed, if it has."""
        if self._error is not None:
            raise self._error

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size) if self._error is None else 0
        except OSError as error:
            self._error = error
            return 0


def _hdf5_attribute(value: Any) -> Any:
    """Converts an attribute to what h5py stores: words to bytes."""
    words = value.tolist() if isinstance(value, np.ndarray) and value.dtype.kind == "O" else value
    if isinstance(words, list) and all(isinstance(word, str) for word in words):
        return _bytes(words)
    return value


def _bytes(words: Sequence[str]) -> Array:
    return np.array([word.encode() for word in words])


ALL_CHUNKS = {"write_empty_chunks": True}


class ZarrWriter(KeyedWriter):
    """Writes each chunk as a file, those of zeros too, so that one that is lost is missed.

    Each has a CRC32C, which Zarr compares when it reads it.
    """

    suffix = ".zarr"
    compressions = ("none", "gzip", "zstd")

    @contextmanager
    def _created(self, path: Path) -> Iterator[Any]:
        yield optional.zarr().create_group(path, zarr_format=3)

    def _create(self, file: Any, key: str, compression: str, **array: Any) -> Any:
        codecs = optional.zarr().codecs
        kinds = {"none": [], "gzip": [codecs.GzipCodec()], "zstd": [codecs.ZstdCodec()]}
        packing = [*kinds[compression], codecs.Crc32cCodec()]
        return file.create_array(key, **array, compressors=packing, config=ALL_CHUNKS)

    def _put(self, file: Any, key: str, array: Array | None) -> None:
        sums = optional.zarr().codecs.Crc32cCodec()
        file.create_array(key, data=np.asarray(array), compressors=[sums], config=ALL_CHUNKS)

    def _put_names(self, file: Any, key: str, names: tuple[str, ...]) -> None:
        sums = optional.zarr().codecs.Crc32cCodec()
        stored = file.create_array(key, shape=(len(names),), dtype=str, compressors=[sums])
        stored[:] = np.array(names, object)

    def _describe(self, file: Any, attributes: Mapping[str, Any]) -> None:
        file.attrs.update({key: _zarr_attribute(value) for key, value in attributes.items()})


def _zarr_attribute(value: Any) -> Any:
    """Converts an attribute to what JSON has."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list):
        return [_zarr_attribute(entry) for entry in value]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


class NpyWriter(Writer):
    """Writes (C, D, H, W), or (D, H, W) of one channel, and a line of ``targets.csv`` for each."""

    suffix = ".npy"

    def misfit(self, source: Source) -> str:
        if labels := super().misfit(source):
            return labels
        suffix = TARGET_SUFFIX.removesuffix(".npy")
        named = [name for name in source.names if name.endswith(suffix)]
        return f"a volume called {named[0]!r}, which is the name of a target" if named else ""

    def write(self, folder: Path, name: str, sample: SampleToWrite) -> None:
        source = sample.source
        shape = source.shape
        channels, depth, *plane = shape
        order, _ = order_to_write(shape)
        channels_last = order == storage_order.DHWC
        # Plain writes: the pages of a mapping would count as this process's memory.
        with (folder / f"{name}.npy").open("xb") as file:
            stored = order.stored_shape(shape)
            header = {"descr": source.dtype.str, "fortran_order": False, "shape": stored}
            np.lib.format.write_array_header_1_0(file, header)
            start = file.tell()
            layer = math.prod(plane) * source.dtype.itemsize
            for lo, slab in sample.values():
                if channels_last:
                    file.seek(start + lo * layer * channels)
                    file.write(np.ascontiguousarray(order.from_volume(slab)).data)
                    continue
                for channel, values in enumerate(slab):
                    file.seek(start + (channel * depth + lo) * layer)
                    file.write(np.ascontiguousarray(values).data)
        if not (folder / TARGETS_FILE).exists():
            self.begin(folder, sample.extras.names, [])
        self.finish(folder, [{"name": name, "target": sample.target.tolist()}])

    def told(self, source: Source) -> storage_order.Channels | None:
        return order_to_write(source.shape)[1]

    def begin(self, out: Path, parameters: Sequence[str], entries: Sequence[Entry]) -> None:
        """Writes the table anew: the last run may have ended within a line, or before a volume."""
        write_bytes(out / TARGETS_FILE, _line(["name", *parameters]) + _lines(entries))

    def finish(self, out: Path, entries: Sequence[Entry]) -> None:
        append_whole(out / TARGETS_FILE, _lines(entries))


def order_to_write(
    shape: tuple[int, ...],
) -> tuple[storage_order.StorageOrder, storage_order.Channels | None]:
    """Chooses how (C, D, H, W) is stored, and what readers have to be told of it.

    Nobody may take another dim for the channels. Where the shape, which is no cube, seems to say
    that they come last, they do; where it says nothing, readers ask.
    """
    if shape[0] == 1:
        return storage_order.DHW, None
    try:
        seeming = storage_order.channel_order(Path(), shape)
    except DataError:
        return storage_order.CDHW, "first"
    return (storage_order.CDHW, None) if seeming == "first" else (storage_order.DHWC, "last")


def _lines(entries: Sequence[Entry]) -> bytes:
    return b"".join(_line([entry["name"], *entry["target"]]) for entry in entries)


def _line(fields: list[Any]) -> bytes:
    """Formats a line of a table, with numbers that are read as the same ones."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(fields)
    return text.getvalue().encode()
