"""Opens .npy, .npz, HDF5 and Zarr files, finds arrays in them, and reads boxes of these.

A `StoredArray` says where in a file one array lies, a `Catalog` what a scan of a folder has found
of them. A `KeyedFile` is an open HDF5 file or Zarr group, of which arrays are given when it is
clear that they can be read. An `ArrayReader` reads boxes, for one rank alone.
"""

from __future__ import annotations

import functools
import io
import math
import os
import struct
import threading
import tokenize
import weakref
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import h5py
import numpy as np

from hyperslab.errors import DataError, printable
from hyperslab.formats import header_cache, optional
from hyperslab.formats.arrays import hdf5
from hyperslab.formats.arrays.hdf5 import HeaderChild
from hyperslab.formats.files import (
    OWN_DATA,
    STRICT,
    AccessPolicy,
    FileAccess,
    Refuse,
    Stamp,
    naming,
    sift,
    unchanged,
)
from hyperslab.formats.source import Array
from hyperslab.formats.storage import read_strided
from hyperslab.formats.storage_order import StorageOrder
from hyperslab.formats.targets import Floats, Parameters, as_numbers
from hyperslab.geometry import Box
from hyperslab.util.documents import open_plain

Header = TypeVar("Header")

ARRAY_SUFFIXES = (".npy", ".npz", ".hdf5", ".h5", ".zarr")

MOST_BESIDE = 1 << 20
"""The largest array that is read whole beside a volume, such as targets [B]."""


def kind_of_file(path: Path) -> str:
    """Tells ``"npy"``, ``"npz"``, ``"HDF5"``, ``"Zarr"`` or ``"TFRecord"`` by a file's name."""
    kinds = {".npy": "npy", ".npz": "npz", ".zarr": "Zarr"}
    records = dict.fromkeys((".tfrecord", ".tfrecords", ".gz"), "TFRecord")
    return (kinds | records).get(path.suffix, "HDF5")


def stamped_file(path: Path, key: str) -> Path:
    """Names what has the time of an array's last change: the file, or in Zarr its metadata."""
    return path / key / "zarr.json" if kind_of_file(path) == "Zarr" else path


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Describes an array in a file."""

    key: str
    shape: tuple[int, ...]
    dtype: str  # as numpy's str, with byte order
    at: int = 0  # its first byte in .npy and .npz
    fortran: bool = False  # neighbours along the first dim lie beside each other, not the last

    def of(self, path: Path, file: Any) -> Any:
        """Returns the array of the open file, if it has the shape and type that it had."""
        stored = file[self.key]
        dtype = np.dtype(self.dtype).name
        if stored.shape != self.shape or stored.dtype.name != dtype:
            raise DataError(
                f"{path}: {self.key!r} is {stored.dtype} {stored.shape} but was "
                f"{dtype} {self.shape} when the folder was scanned"
            )
        return stored


@contextmanager
def open_keyed(path: Path, reach: FileAccess) -> Iterator[KeyedFile]:
    """Opens an HDF5 file or Zarr group; ``reach``: how far it may refer to others."""
    if kind_of_file(path) == "Zarr":
        yield KeyedFile(path, _zarr_group(path), reach)
        return
    with h5py.File(path, "r", locking=False) as file:
        yield KeyedFile(path, file, reach)


def _zarr_group(path: Path) -> Any:
    optional.zarr()  # or an error that says what to install
    from hyperslab.formats.arrays.zarr_bounded import BoundedGroup

    return BoundedGroup(path)


class KeyedFile:
    """An open HDF5 file or Zarr group. Arrays are given when it is clear that they can be read.

    Links that leave the reach are refused before they are followed.
    """

    def __init__(self, path: Path, file: Any, reach: FileAccess) -> None:
        self.path = path
        self.file = file
        self.reach = reach
        self.zarr = kind_of_file(path) == "Zarr"

    @functools.cached_property
    def attrs(self) -> Any:
        """Returns the attributes of the file or group; refuses those that are too large."""
        return self.attributes_of(self.file)

    def attributes_of(self, found: Any) -> Any:
        """Returns the attributes of a group or an array, as `attrs`."""
        if not self.zarr:  # the size of Zarr's metadata is limited
            hdf5.check_attributes(self.path, found)
        return found.attrs

    def keys(self) -> list[str]:
        """Lists all keys, those of groups too, sorted."""
        return sorted(self.file)

    def has(self, key: str) -> bool:
        """Tells if there is something under a key."""
        if self.zarr:
            return key in self.file
        return self.file.get(key, getlink=True) is not None

    def get(self, key: str) -> Any:
        """Returns what is under a path or raises KeyError; refuses a link that leaves the reach."""
        if self.zarr:
            return self.file[key]
        return hdf5.linked(self.path, self.file, key, self.reach)

    def find(self, key: str) -> Any | None:
        """Returns the array under a key, whose shape and type alone are read; None without one."""
        found = self.get(key) if self.has(key) else None
        return found if hasattr(found, "ndim") else None

    def check_volume(self, key: str, volume: Any, *, labels: bool = False) -> None:
        """Refuses a volume of which values are missing, or which needs unreasonable memory.

        ``labels`` may well be all zeros.
        """
        if self.zarr:
            volume.check(self.reach)
            volume.check_chunks(Box.whole(volume.shape), self.reach)
        else:
            check = hdf5.check_storage if labels else hdf5.check_volume
            check(self.path, key, volume, self.reach)

    def small(self, key: str) -> Any | None:
        """Returns an array beside the volume, which can be read whole; None where there is none.

        One that is not small, or was never written, is refused.
        """
        found = self.find(key)
        if found is not None:
            if found.size * max(1, found.dtype.itemsize) > MOST_BESIDE:
                raise DataError(f"{self.path}: {key!r} has {found.size} values; needs a few")
            if self.zarr:  # the words of its chunks are bounded
                found.check(self.reach)
                return found
            hdf5.check_storage(self.path, key, found, self.reach)
            if found.dtype.hasobject:
                _ = found[()]  # as `hdf5.check_attributes`
        return found


MOST_HEADER = 10_000
"""The longest header of an .npy array [B]: numpy refuses more, too, once it has read all of it."""

_PARSING = threading.Lock()
"""Held while headers are parsed: Python's parser may fail in two threads at once (SystemError)."""


@functools.lru_cache(maxsize=1024)
def _parse_header(data: bytes, first: bool) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Parses the header of an .npy array of version 1 or 2; a folder's are mostly the same bytes.

    Raises:
        EOFError, ValueError: it is cut short, or no header.
    """
    read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
    try:
        return read(io.BytesIO(data))
    except (tokenize.TokenError, SyntaxError, RecursionError) as error:  # it is Python's syntax
        raise ValueError(f"its header is not a dictionary: {error}") from None


def array_header(file: IO[bytes], path: Path, key: str = "") -> tuple[StoredArray, int]:
    """Reads the header of an .npy array that begins where ``file`` stands, and finds its values.

    Raises:
        OSError, EOFError, ValueError: it cannot be read, is cut short or is no .npy.
    """
    at = file.tell()
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of the format is for arrays of records")
    first = version == (1, 0)
    length = int.from_bytes(file.read(2 if first else 4), "little")
    if length > MOST_HEADER:
        raise ValueError(f"it claims a header of {length} bytes")
    file.seek(at + len(np.lib.format.MAGIC_PREFIX) + 2)
    with _PARSING:
        shape, fortran, dtype = _parse_header(file.read((2 if first else 4) + length), first)
    if any(extent < 0 for extent in shape):
        raise ValueError(f"its shape is {shape}")
    end = file.tell() + math.prod(shape) * dtype.itemsize
    if path.stat().st_size < end and not dtype.hasobject:
        raise EOFError(f"it has {path.stat().st_size} of {end} bytes")
    return StoredArray(key, shape, dtype.str, at, fortran), file.tell()


def read_vector(path: Path, most: int = MOST_BESIDE) -> Array:
    """Reads a small array of at most ``most`` bytes whole; raises as `array_header`."""
    with open_plain(path) as file:
        header, _ = array_header(file, path)
        dtype = np.dtype(header.dtype)
        if math.prod(header.shape) * dtype.itemsize > most:
            raise DataError(f"{path}: is {dtype} {header.shape}; needs a few numbers")
        file.seek(0)
        with _PARSING:
            return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


def _read_npy(path: Path, array: StoredArray, box: Box) -> Array:
    """Reads a box of an array in an .npy or .npz, if it is still that one."""
    with path.open("rb", buffering=0) as file:
        file.seek(array.at)
        found, start = array_header(file, path, array.key)
        dtype = np.dtype(array.dtype)
        if (found.shape, found.dtype) != (array.shape, array.dtype):
            raise DataError(
                f"{path}: is {np.dtype(found.dtype)} {found.shape} but was {dtype} {array.shape} "
                "when the folder was scanned"
            )
        if not found.fortran:
            return read_strided(file.fileno(), start, array.shape, dtype, box)
        turned = Box(box.lo[::-1], box.hi[::-1])
        return read_strided(file.fileno(), start, array.shape[::-1], dtype, turned).T


LOCAL_HEADER = struct.Struct("<4s5H3I2H")
"""The header of a file in a zip, before its name."""


def find_array(path: Path, key: str, reach: FileAccess) -> StoredArray:
    """Finds the array of a key, or the only array of a file.

    Raises:
        DataError: there is none, or several and no key.
        OSError, EOFError, ValueError, KeyError, RuntimeError: the file is no such one.
    """
    kind = kind_of_file(path)
    if kind == "npy":
        if key:
            raise DataError(f"{path}: is one array, without keys: leave data.keys.volume out")
        with open_plain(path) as file:
            return array_header(file, path)[0]
    if kind == "npz":
        return _in_zip(path, key)
    with open_keyed(path, reach) as file:
        found = key or _only_volume(path, file)
        array = _array(file, found, "volume")
        file.check_volume(found, array)
        return StoredArray(found, tuple(array.shape), array.dtype.str)


def read_numbers(path: Path, words: tuple[str, ...], reach: FileAccess) -> list[Array]:
    """Reads arrays (...) of numbers under paths, or of attributes ``group@name``.

    Raises as `find_array`; and if one is not there, not small, or no numbers.
    """
    kind = kind_of_file(path)
    if not words:
        return []
    if kind == "npy":
        raise DataError(f"{path}: is one array, without keys: give its targets by data.table")
    if kind == "npz":
        return [_small(path, word, _zip_values(path, word)) for word in words]
    with open_keyed(path, reach) as file:
        return [_small(path, word, _keyed_values(file, word)) for word in words]


def _in_zip(path: Path, key: str) -> StoredArray:
    with zipfile.ZipFile(path) as archive:
        if not key and len(archive.namelist()) == 1:
            key = archive.namelist()[0].removesuffix(".npy")
        info = _member(path, archive, key, "volume")
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise DataError(
            f"{path}: {key!r} is compressed, so that a box of it cannot be read alone\n    write "
            f"it by numpy.savez (not savez_compressed), or as HDF5 in chunks ({OWN_DATA})"
        )
    with path.open("rb") as file:
        file.seek(info.header_offset)
        head = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
        file.seek(head[-2] + head[-1], os.SEEK_CUR)
        found, start = array_header(file, path, key)
    dtype = np.dtype(found.dtype)
    if start - found.at + math.prod(found.shape) * dtype.itemsize != info.file_size:
        raise DataError(
            f"{path}: {key!r} has {info.file_size} bytes, which are no {dtype} {found.shape}: the "
            "rest would be that of other arrays"
        )
    return found


def _zip_values(path: Path, key: str) -> Array:
    with (
        zipfile.ZipFile(path) as archive,
        archive.open(_member(path, archive, key, "targets")) as file,
    ):
        data = file.read(MOST_BESIDE + 1)
    if len(data) > MOST_BESIDE:
        raise DataError(f"{path}: {key!r} is larger than targets are")
    with _PARSING:
        return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


def _member(path: Path, archive: zipfile.ZipFile, key: str, word: str) -> zipfile.ZipInfo:
    names = [name.removesuffix(".npy") for name in archive.namelist()]
    if key not in names:
        raise _no_key(path, key, word, names)
    return archive.getinfo(f"{key}.npy")


def _only_volume(path: Path, file: KeyedFile) -> str:
    known = file.keys()
    found = [key for key in known if getattr(file.find(key), "ndim", 0) >= 3]
    if len(found) != 1:
        raise _no_key(path, "", "volume", found or known)
    return found[0]


def _object(file: KeyedFile, key: str, word: str) -> Any:
    """Returns what is under a path; an error names the keys that there are."""
    try:
        return file.get(key)
    except KeyError:
        raise _no_key(file.path, key, word, file.keys()) from None


def _array(file: KeyedFile, key: str, word: str) -> Any:
    """Returns the array under a path, as `_object`; for a group an error says what is in it."""
    found = _object(file, key, word)
    if not hasattr(found, "ndim"):
        raise DataError(
            f"{file.path}: {key!r} is a group, which has {_words(sorted(found))}; give the path of "
            f"an array in it: data.keys.{word}: {key}/... ({OWN_DATA})"
        )
    return found


def _keyed_values(file: KeyedFile, word: str) -> Any:
    group, at, name = word.rpartition("@")
    if not at:
        _array(file, word, "targets")
        array = file.small(word)
        assert array is not None, "it is an array"
        return array[()]
    found = _object(file, group, "targets") if group.strip("/") else file.file
    attributes = file.attributes_of(found)
    if name not in attributes:
        raise DataError(
            f"{file.path}: {group or '/'!r} has no attribute {name!r}; it has "
            f"{_words(sorted(attributes))} ({OWN_DATA})"
        )
    return attributes[name]


def _small(path: Path, word: str, found: Any) -> Array:
    where = f"{path}: {word!r}"
    if np.asarray(found).nbytes > MOST_BESIDE:
        raise DataError(f"{where} is larger than targets are, a few numbers")
    return as_numbers(found, where)


def _no_key(path: Path, key: str, word: str, known: list[str]) -> DataError:
    said = f"has no {key!r}" if key else "does not tell which array is the volume"
    return DataError(
        f"{path}: {said}; it has {_words(known)}\n    set data.keys.{word} to the path of one "
        f"({OWN_DATA}, keys)"
    )


def _words(names: list[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:20])
    return (shown or "nothing") + (", ..." if len(names) > 20 else "")


@dataclass(frozen=True, slots=True)
class Catalog:
    """Lists N samples in arrays of files below a folder, all stored alike, with targets (N, P)."""

    folder: Path
    files: tuple[str, ...]  # by sample; relative: sub-folders may have the same base names
    volumes: tuple[StoredArray, ...]  # by sample
    names: tuple[str, ...]
    stamps: Mapping[str, Stamp]  # of files, or of the metadata of Zarr's arrays, by relative names
    order: StorageOrder  # of one sample's dims
    targets: Floats
    parameters: Parameters
    rows: tuple[int, ...] = ()  # of the samples, where the first dim of their arrays counts these
    labels: tuple[StoredArray, ...] = ()  # by sample, where voxels have classes
    classes: tuple[str, ...] = ()
    redshifts: tuple[float, ...] = ()  # of the channels, where all files say the same ones
    table: Path | None = None  # the file of the targets, where it is one for all
    allowed: AccessPolicy = STRICT  # what the files may do
    remark: str = ""

    @property
    def reach(self) -> FileAccess:
        """Says how far the files may refer to others."""
        return FileAccess(self.folder, self.allowed)

    @property
    def stored(self) -> tuple[int, ...]:
        """Returns the shape of one sample in its file."""
        return self.volumes[0].shape[1 if self.rows else 0 :]

    def path(self, sample: int) -> Path:
        """Returns the file of a sample's volume."""
        return self.folder / self.files[sample]

    def scanned(self, sample: int, array: StoredArray) -> tuple[Path, str, Stamp]:
        """Returns what `check_unchanged` asks for: a file, the sample and the scan's stamp."""
        file = stamped_file(Path(self.files[sample]), array.key)
        return self.folder / file, self.names[sample], self.stamps[file.as_posix()]

    @contextmanager
    def as_scanned(self, sample: int, array: StoredArray) -> Iterator[None]:
        """Turns what goes wrong within into a DataError that names the file, a change of it too."""
        path = self.path(sample)
        with unchanged(*self.scanned(sample, array)), naming(path, kind_of_file(path)):
            yield

    def only(self, sample: int) -> Catalog:
        """Keeps one sample, which is light to send to another process."""
        one = slice(sample, sample + 1)
        file = self.files[sample]
        stamps = {
            name: stamp
            for name, stamp in self.stamps.items()
            if name == file or name.startswith(f"{file}/")
        }
        return replace(
            self,
            files=(file,),
            volumes=self.volumes[one],
            names=self.names[one],
            stamps=stamps,
            targets=self.targets[one],
            rows=self.rows[one],
            labels=self.labels[one],
        )


def stamps_of(folder: Path, file: str, keys: Sequence[str] = ()) -> dict[str, Stamp]:
    """Takes the stamp of a file, or those of the arrays under ``keys`` in a Zarr group."""
    path = folder / file
    with naming(path, kind_of_file(path)):
        if kind_of_file(path) != "Zarr":
            return {file: Stamp.of(path)}
        names = [stamped_file(Path(file), key).as_posix() for key in keys]
        return {name: Stamp.of(folder / name) for name in names if (folder / name).exists()}


def scan_headers(
    folder: Path,
    files: Sequence[str],
    keys: Sequence[str],
    read: Callable[[str], Header],
    refuse: Refuse | None,
    alike: Callable[[tuple[str, Header], tuple[str, Header]], None] = lambda first, other: None,
    kept: tuple[FileAccess, type[Header], Sequence[object]] | None = None,
    *,
    own: bool = False,
) -> tuple[list[tuple[str, Header]], dict[str, Stamp]]:
    """Reads the header of every file; stamps are from before, so that later changes are noticed.

    What HDF5 has to open, a child process has come back from before, unless it is this process's
    ``own``. ``alike`` refuses files that are not stored like the first one. Of many files
    headers may be ``kept``, see `HeaderCache`, and those that it knows are not read.
    """
    close_readers()
    stamps: dict[str, Stamp] = {}
    in_hdf5 = [str(folder / file) for file in files if kind_of_file(folder / file) == "HDF5"]
    many = kept is not None and len(files) >= header_cache.FEWEST
    cache = header_cache.HeaderCache(*kept) if kept is not None and many else None

    with HeaderChild(read, files=in_hdf5) as child:

        def stamped(file: str) -> Header:
            path = folder / file
            stamps.update(stamps_of(folder, file, keys))
            look = child if kind_of_file(path) == "HDF5" and not own else read
            if cache is None:
                return look(str(path))
            return cache.header(file, lambda: look(str(path)))

        found = sift(files, stamped, refuse)
    if cache is not None:
        cache.save()
    return [entry for entry, _ in sift(found, lambda other: alike(found[0], other), refuse)], stamps


MOST_OPEN_FILES = 4
"""Files kept open: enough for the sub-volumes of one cube and those of its neighbours."""

_READERS: weakref.WeakSet[ArrayReader] = weakref.WeakSet()
_LISTING = threading.Lock()  # data sets may be opened in several threads


def close_readers() -> None:
    """Closes the files that all readers of this process have open; a later read opens them again.

    Whoever opens a file that is open gets what HDF5 knows of it, even if the file has been written
    anew since then.
    """
    with _LISTING:
        readers = [*_READERS]
    for reader in readers:
        reader.close()


class ArrayReader:
    """Reads boxes of arrays for one rank; the HDF5 files used last stay open.

    Every process has a reader of its own. ``collective``: the ranks of a replica read together.
    """

    collective = False

    def __init__(self) -> None:
        self._open: OrderedDict[Path, h5py.File] = OrderedDict()
        self._doubts: hdf5.Doubts = {}
        self._lock = threading.Lock()
        close_readers()
        with _LISTING:
            _READERS.add(self)

    def read(self, catalog: Catalog, sample: int, array: StoredArray, box: Box) -> Array:
        """Reads a box, along the dims of the file, of an array of the sample's file.

        But for .npy and .npz the values have native bytes.

        Raises:
            DataError: the file has gone, is damaged, or has changed since the folder was scanned.
        """
        path = catalog.path(sample)
        kind = kind_of_file(path)
        if kind == "HDF5":
            return self._read_hdf5(catalog, sample, array, box)
        with catalog.as_scanned(sample, array):
            if kind != "Zarr":
                return _read_npy(path, array, box)
            stored = array.of(path, _zarr_group(path))
            return np.asarray(stored.read(box, catalog.reach))

    def _read_hdf5(self, catalog: Catalog, sample: int, array: StoredArray, box: Box) -> Array:
        path = catalog.path(sample)
        with self._lock:
            try:
                with catalog.as_scanned(sample, array):
                    dataset = array.of(path, self._file(path))
                    if dataset.is_virtual or dataset.external:  # the other files have no stamps
                        hdf5.check_storage(path, array.key, dataset, catalog.reach)
                    return hdf5.read_box(path, array.key, dataset, box, self._doubts)
            except DataError:
                if file := self._open.pop(path, None):
                    file.close()  # it may not be the file of this name any more
                raise

    def _file(self, path: Path) -> h5py.File:
        """Returns an open file; the least recently used one makes room."""
        if path not in self._open:
            if len(self._open) >= MOST_OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            self._open[path] = h5py.File(path, "r", locking=False)
        self._open.move_to_end(path)
        return self._open[path]

    def close(self) -> None:
        """Lets go of what is open."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()
