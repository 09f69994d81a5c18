"""Where one array lies in a file, and how a box of it is read: .npy, .npz, HDF5 and Zarr."""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyperslab.errors import DataError, printable
from hyperslab.formats.keyed import hdf5_storage
from hyperslab.formats.keyed.keyed_file import MOST_BESIDE, KeyedFile, opened
from hyperslab.formats.npy.file import array_header, read_values
from hyperslab.formats.shared.data_map import OWN_DATA
from hyperslab.formats.shared.reach import Reach
from hyperslab.formats.source import Array
from hyperslab.geometry import Box

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


def find_array(path: Path, key: str, reach: Reach) -> ArrayAt:
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
    with opened(path, reach) as file:
        found = key or _only_volume(path, file)
        array = _dataset(file, found)
        file.check_volume(found, array)
        return ArrayAt(found, tuple(array.shape), array.dtype.str)


def read_numbers(path: Path, words: tuple[str, ...], reach: Reach) -> list[Array]:
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
    with opened(path, reach) as file:
        return [_small(path, word, _keyed_values(file, word)) for word in words]


def read_box_of(path: Path, array: ArrayAt, box: Box) -> Array:
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
        return hdf5_storage.linked(file.path, file.file, key, file.reach)
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
            hdf5_storage.check_storage(file.path, word, array, file.reach)
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
