"""Opens .npy, .npz, HDF5 and Zarr files and finds an array in them by its key.

`KeyedFile` is an open HDF5 file or Zarr group, of which arrays are given when it is clear that
they can be read; `ArrayAt` says where one array lies in a file of any of the four kinds.

Bytes that are damaged, or made so, can have HDF5 walk in circles for ever, or crash. Nothing
ends a call of a library within a process, and nothing cheap tells beforehand. So a
`HeaderChild`, a child process, goes through the header of each file of a scan first, and says no
more than that it came back: a fork a scan, and a byte and a second look a file.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import select
import signal
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import h5py
import numpy as np
from h5py._objects import phil

from hyperslab.errors import DataError, printable
from hyperslab.formats import optional
from hyperslab.formats.arrays import hdf5, zarr
from hyperslab.formats.arrays.npy import array_header, read_values
from hyperslab.formats.files import FileAccess
from hyperslab.formats.source import OWN_DATA, Array
from hyperslab.geometry import Box

T = TypeVar("T")

HEADER_LIMIT = 30.0
"""What a header may take [s]: a file system may be slow, too."""


class HeaderChild(Generic[T]):
    """Calls ``read`` of a file's name, after a child process has come back from that."""

    def __init__(self, read: Callable[[str], T], limit: float = HEADER_LIMIT) -> None:
        self.read = read
        self.limit = limit
        self._child = 0
        self._asked = -1
        self._answers = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def __call__(self, file: str) -> T:
        """What ``read`` returns; it may raise, too.

        Raises:
            DataError: it does not come back in time, or ends the process.
        """
        if "mpi4py.MPI" not in sys.modules:  # whose transports do not all bear a fork
            self._try(file)
        return self.read(file)

    def _try(self, file: str) -> None:
        if not self._child:
            self._start()
        with suppress(BrokenPipeError):  # then there will be no answer
            os.write(self._asked, json.dumps(file).encode() + b"\n")
        ready, _, _ = select.select([self._answers], [], [], self.limit)
        if not ready:
            self._end()
            raise DataError(
                f"{file}: HDF5 has not come back from its header in {self.limit:g} s: it is "
                "damaged, or its disk is very slow\n    look at it with h5dump, or take it away"
            )
        if not os.read(self._answers, 1):
            raise DataError(
                f"{file}: HDF5 crashes on its header ({self._end()}): it is damaged\n"
                "    take it away"
            )

    def _start(self) -> None:
        theirs, self._asked = os.pipe()
        self._answers, their_answers = os.pipe()
        with phil, warnings.catch_warnings():  # no other thread is within HDF5
            for kind in (DeprecationWarning, RuntimeWarning):  # that there are other threads
                warnings.simplefilter("ignore", kind)
            self._child = os.fork()
        if self._child == 0:
            os.close(self._asked)
            os.close(self._answers)
            _serve(self.read, theirs, their_answers)
        os.close(theirs)
        os.close(their_answers)

    def _end(self) -> str:
        """End the child, if there is one; how it ended."""
        if not self._child:
            return ""
        os.close(self._asked)
        os.close(self._answers)
        with suppress(ProcessLookupError):
            os.kill(self._child, signal.SIGKILL)
        _, status = os.waitpid(self._child, 0)
        self._child = 0
        code = os.waitstatus_to_exitcode(status)
        return f"signal {-code}" if code < 0 else f"code {code}"


def _serve(read: Callable[[str], object], asked: int, answers: int) -> None:
    """What the child does; it ends with its parent, whose end of the pipe is then closed."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.disable()  # what a crash would print is not for the user
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with os.fdopen(asked) as lines:
            for line in lines:
                with suppress(Exception):  # the parent will see for itself
                    read(json.loads(line))
                os.write(answers, b".")
    finally:
        os._exit(0)


MOST_BESIDE = 1 << 20
"""Of an array beside the volume, such as targets [B]."""


def hdf5_or_zarr(path: Path) -> str:
    """``"Zarr"`` or ``"HDF5"``, by the name."""
    return "Zarr" if path.suffix == ".zarr" else "HDF5"


@contextmanager
def open_keyed(path: Path, reach: FileAccess) -> Iterator[KeyedFile]:
    """The file or Zarr group; ``reach``: how far it may refer to others."""
    if hdf5_or_zarr(path) == "Zarr":
        yield KeyedFile(path, optional.zarr().open_group(path, mode="r", zarr_format=3), reach)
        return
    with h5py.File(path, "r", locking=False) as file:
        yield KeyedFile(path, file, reach)


class KeyedFile:
    """What is open under ``path``. Arrays are given when it is clear that they can be read.

    Links that leave the reach are refused before they are followed.
    """

    def __init__(self, path: Path, file: Any, reach: FileAccess) -> None:
        self.path = path
        self.file = file
        self.reach = reach
        self.zarr = hdf5_or_zarr(path) == "Zarr"

    @property
    def attrs(self) -> Any:
        return self.file.attrs

    def keys(self) -> list[str]:
        """All that there are, sorted; of a group too."""
        return sorted(self.file)

    def has(self, key: str) -> bool:
        """Whether there is something under a key."""
        if self.zarr:
            return key in self.file
        return self.file.get(key, getlink=True) is not None

    def find(self, key: str) -> Any | None:
        """The array under a key, of which nothing but shape and type is read; None without one.

        Raises:
            DataError: a link leaves the reach.
        """
        if not self.has(key):
            return None
        linked = hdf5.linked
        found = self.file[key] if self.zarr else linked(self.path, self.file, key, self.reach)
        return found if hasattr(found, "ndim") else None

    def check_volume(self, key: str, volume: Any) -> None:
        """Nothing, if all values of a volume are there.

        Raises:
            DataError: they are not, or not to be read in reasonable memory.
        """
        check = zarr.check_array if self.zarr else hdf5.check_volume
        check(self.path, key, volume, self.reach)

    def check_labels(self, key: str, labels: Any) -> None:
        """As `check_volume`, of what may well be all zeros."""
        check = zarr.check_array if self.zarr else hdf5.check_storage
        check(self.path, key, labels, self.reach)

    def small(self, key: str) -> Any | None:
        """An array beside the volume, which can be read whole; None where there is none.

        Raises:
            DataError: it is not small, was never written, or a link leaves the reach.
        """
        found = self.find(key)
        if found is not None:
            if found.size * max(1, found.dtype.itemsize) > MOST_BESIDE:
                raise DataError(f"{self.path}: {key!r} has {found.size} values; needs a few")
            check = zarr.check_beside if self.zarr else hdf5.check_storage
            check(self.path, key, found, self.reach)
        return found


LOCAL_HEADER = struct.Struct("<4s5H3I2H")
"""Of a file in a zip, before its name."""


@dataclass(frozen=True, slots=True)
class ArrayAt:
    """An array in a file: its ``key``, shape, type, and in .npy and .npz its first byte ``at``."""

    key: str
    shape: tuple[int, ...]
    dtype: str  # as numpy's str, with byte order
    at: int = 0
    fortran: bool = False


def kind_of_file(path: Path) -> str:
    """``"npy"``, ``"npz"``, ``"HDF5"`` or ``"Zarr"``, by the name."""
    kinds = {".npy": "npy", ".npz": "npz", ".zarr": "Zarr"}
    return kinds.get(path.suffix, "HDF5")


def stamped_file(path: Path, key: str) -> Path:
    """What has the time of an array's last change: the file, or where Zarr says what it is."""
    return path / key / "zarr.json" if kind_of_file(path) == "Zarr" else path


def find_array(path: Path, key: str, reach: FileAccess) -> ArrayAt:
    """The array of a key; of a file with one array only, that one.

    Raises:
        DataError: there is none, or several and no key.
        OSError, EOFError, ValueError, KeyError, RuntimeError: the file is no such one.
    """
    kind = kind_of_file(path)
    if kind == "npy":
        if key:
            raise DataError(f"{path}: is one array, without keys: leave data.keys.volume out")
        header = array_header(path)
        return ArrayAt("", header.shape, header.dtype.str, fortran=header.fortran)
    if kind == "npz":
        return _in_zip(path, key)
    with open_keyed(path, reach) as file:
        found = key or _only_volume(path, file)
        array = _dataset(file, found)
        file.check_volume(found, array)
        return ArrayAt(found, tuple(array.shape), array.dtype.str)


def read_numbers(path: Path, words: tuple[str, ...], reach: FileAccess) -> list[Array]:
    """The arrays (...) of numbers under paths, or of attributes ``group@name``.

    Raises:
        DataError: one is not there, not small, or no numbers.
        OSError, EOFError, ValueError, KeyError, RuntimeError: the file is no such one.
    """
    kind = kind_of_file(path)
    if kind == "npy":
        raise DataError(f"{path}: is one array, without keys: give its targets by data.table")
    if kind == "npz":
        return [_small(path, word, _zip_values(path, word)) for word in words]
    with open_keyed(path, reach) as file:
        return [_small(path, word, _keyed_values(file, word)) for word in words]


def read_array_box(path: Path, array: ArrayAt, box: Box) -> Array:
    """A box of an array of an .npy or .npz file; errors as `read_values`."""
    return read_values(path, array.shape, np.dtype(array.dtype), box, array.at)


def _in_zip(path: Path, key: str) -> ArrayAt:
    with zipfile.ZipFile(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        if not key and len(names) == 1:
            key = names[0]
        if key not in names:
            raise _no_key(path, key, "volume", names)
        info = archive.getinfo(f"{key}.npy")
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise DataError(
            f"{path}: {key!r} is compressed, so that a box of it cannot be read alone\n    write "
            f"it by numpy.savez (not savez_compressed), or as HDF5 in chunks ({OWN_DATA})"
        )
    with path.open("rb") as file:
        file.seek(info.header_offset)
        head = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
    at = info.header_offset + LOCAL_HEADER.size + head[-2] + head[-1]
    header = array_header(path, at)
    return ArrayAt(key, header.shape, header.dtype.str, at, header.fortran)


def _zip_values(path: Path, key: str) -> Array:
    with zipfile.ZipFile(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        if key not in names:
            raise _no_key(path, key, "targets", names)
        with archive.open(f"{key}.npy") as file:
            data = file.read(MOST_BESIDE + 1)
    if len(data) > MOST_BESIDE:
        raise DataError(f"{path}: {key!r} is larger than targets are")
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


def _only_volume(path: Path, file: KeyedFile) -> str:
    known = file.keys()
    found = [key for key in known if getattr(file.find(key), "ndim", 0) >= 3]
    if len(found) != 1:
        raise _no_key(path, "", "volume", found or known)
    return found[0]


def _dataset(file: KeyedFile, key: str) -> Any:
    found = _object(file, key, "volume")
    if not hasattr(found, "ndim"):
        raise DataError(
            f"{file.path}: {key!r} is a group, which has {_words(sorted(found))}; give the path of "
            f"an array in it: data.keys.volume: {key}/... ({OWN_DATA})"
        )
    return found


def _object(file: KeyedFile, key: str, word: str) -> Any:
    """What is under a path, of which no link is followed that leaves the reach."""
    try:
        if file.zarr:
            return file.file[key]
        return hdf5.linked(file.path, file.file, key, file.reach)
    except KeyError:
        raise _no_key(file.path, key, word, file.keys()) from None


def _keyed_values(file: KeyedFile, word: str) -> Any:
    group, at, name = word.rpartition("@")
    if not at:
        array = _object(file, word, "targets")
        if not hasattr(array, "ndim"):
            raise DataError(f"{file.path}: {word!r} is a group; give an array, or group@attribute")
        if array.size * max(1, array.dtype.itemsize) > MOST_BESIDE:
            raise DataError(f"{file.path}: {word!r} has {array.size} values; targets are few")
        if not file.zarr:
            hdf5.check_storage(file.path, word, array, file.reach)
        return array[()]
    attributes = (_object(file, group, "targets") if group.strip("/") else file.file).attrs
    if name not in attributes:
        raise DataError(
            f"{file.path}: {group or '/'!r} has no attribute {name!r}; it has "
            f"{_words(sorted(attributes))} ({OWN_DATA})"
        )
    return attributes[name]


def _small(path: Path, word: str, found: Any) -> Array:
    values = np.asarray(found)
    if values.dtype.kind not in "fiu" or values.size == 0 or values.nbytes > MOST_BESIDE:
        raise DataError(
            f"{path}: {word!r} is {values.dtype} {values.shape}; targets are a few numbers"
        )
    if not np.isfinite(values).all():
        raise DataError(f"{path}: {word!r} holds {values.ravel()[:8].tolist()}; needs finite ones")
    return values.astype(np.float64)


def _no_key(path: Path, key: str, word: str, known: list[str]) -> DataError:
    said = f"has no {key!r}" if key else "does not tell which array is the volume"
    return DataError(
        f"{path}: {said}; it has {_words(known)}\n    set data.keys.{word} to the path of one "
        f"({OWN_DATA}, keys)"
    )


def _words(names: list[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:20])
    return (shown or "nothing") + (", ..." if len(names) > 20 else "")
