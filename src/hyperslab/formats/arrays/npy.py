"""Reads numpy's .npy files: boxes by the pieces in which they lie, and a folder as a `Source`.

``{name}.npy`` is (C, D, H, W), (D, H, W, C) or, of one channel, (D, H, W). The targets are in
``targets.csv`` of the folder, whose first line is ``name`` and the names of the parameters, or
each in ``{name}.target.npy`` (P,).
"""

from __future__ import annotations

import csv
import math
import reprlib
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.comm import Grid
from hyperslab.comm.agreement import broadcast_from_main
from hyperslab.errors import DataError, printable
from hyperslab.formats.files import Refuse, Stamp, list_files, naming, sift, unchanged
from hyperslab.formats.source import OWN_DATA, Array, ScanOptions, Source
from hyperslab.formats.storage import Storage, read_strided
from hyperslab.formats.storage_order import (
    CDHW,
    DHW,
    DHWC,
    DTYPES,
    Channels,
    StorageOrder,
    channel_order,
)
from hyperslab.formats.targets import Floats, Parameters, numbered_names
from hyperslab.geometry import Box

MOST_VECTOR = 1 << 20
"""Of an array of targets [B]."""


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """What a file says of its array, which begins at ``start`` [B].

    ``fortran``: neighbours along the first dim lie beside each other, not those along the last.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    start: int


def volume_header(path: Path) -> NpyHeader:
    """The header of a volume.

    Raises:
        DataError: it is no .npy, or cut short, or no volume.
    """
    with naming(path, "npy"), path.open("rb") as file:
        header = _read(file)
        size = _check_size(path, header)
    if len(header.shape) not in (3, 4) or size == 0 or header.dtype.name not in DTYPES:
        raise DataError(
            f"{path}: is {header.dtype} {header.shape}; needs three spatial dims, with or without "
            f"channels, of {', '.join(DTYPES)}\n    many volumes in one array, and other types, go "
            f"with data.table ({OWN_DATA}, arrays)"
        )
    return header


def array_header(path: Path, at: int = 0) -> NpyHeader:
    """The header of any array, one of a file within a file too, which begins at byte ``at``.

    Raises:
        OSError, EOFError, ValueError: it cannot be read, is cut short or is no .npy.
    """
    with path.open("rb") as file:
        file.seek(at)
        header = _read(file)
        _check_size(path, header)
    return header


def _check_size(path: Path, header: NpyHeader) -> int:
    """The bytes of the array, which the file has to have."""
    size = math.prod(header.shape) * header.dtype.itemsize
    if any(extent < 0 for extent in header.shape):
        raise ValueError(f"its shape is {header.shape}")
    if path.stat().st_size < header.start + size and not header.dtype.hasobject:
        raise EOFError(f"it has {path.stat().st_size} of {header.start + size} bytes")
    return size


def read_vector(path: Path, most: int = MOST_VECTOR) -> NDArray[Any]:
    """A small array of at most so many bytes, whole.

    Raises:
        DataError: it is not small.
        OSError, EOFError, ValueError: it cannot be read, is cut short or is no .npy.
    """
    with path.open("rb") as file:
        header = _read(file)
        if _check_size(path, header) > most:
            raise DataError(f"{path}: is {header.dtype} {header.shape}; needs a few numbers")
        file.seek(0)
        return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


def read_values(
    path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], box: Box, at: int = 0
) -> NDArray[Any]:
    """A box of the array that begins at byte ``at``, which has to be of this shape and type.

    Raises:
        DataError: it is not.
        OSError, EOFError, ValueError: the file has gone, is cut short or is no .npy.
    """
    with path.open("rb", buffering=0) as file:
        file.seek(at)
        header = _read(file)
        if header.shape != shape or header.dtype != dtype:
            raise DataError(
                f"{path}: is {header.dtype} {header.shape} but was {dtype} {shape} when the "
                "folder was scanned"
            )
        if not header.fortran:
            return read_strided(file.fileno(), header.start, shape, dtype, box)
        turned = Box(box.lo[::-1], box.hi[::-1])
        return read_strided(file.fileno(), header.start, shape[::-1], dtype, turned).T


def _read(file: IO[bytes]) -> NpyHeader:
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of the format is for arrays of records")
    first = version == (1, 0)
    read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
    try:
        shape, fortran, dtype = read(file)
    except (tokenize.TokenError, SyntaxError, RecursionError) as error:  # it is Python's syntax
        raise ValueError(f"its header is no dictionary: {error}") from None
    return NpyHeader(shape, dtype, fortran, file.tell())


TARGET_SUFFIX = ".target.npy"
TARGETS_FILE = "targets.csv"


@dataclass(frozen=True, slots=True)
class NpyArrays:
    """What a folder holds: N volumes stored alike, with their targets (N, P)."""

    folder: Path
    names: tuple[str, ...]
    stored: tuple[int, ...]
    dtype: np.dtype[Any]
    order: StorageOrder
    targets: Floats
    parameters: tuple[str, ...]
    stamps: Mapping[str, Stamp]  # by name


class NpyFolder(Source):
    """Arrays in files of numpy's own format; nothing stays open."""

    suffixes = (".npy",)

    def __init__(self, arrays: NpyArrays) -> None:
        self.arrays = arrays
        self.names = arrays.names
        self.dtype = arrays.dtype.newbyteorder("=")
        self.parameters = Parameters.normalised(arrays.parameters)
        self.order = arrays.order
        self.shape = arrays.order.volume_shape(arrays.stored)

    def __reduce__(self) -> tuple[Any, ...]:
        return NpyFolder, (self.arrays,)

    @classmethod
    def scan(
        cls,
        path: str | Path,
        grid: Grid,
        channels: Channels | None = None,
        refuse: Refuse | None = None,
    ) -> NpyFolder:
        """The folder as the main rank sees it. All ranks call this.

        With ``refuse`` files that are not what they should be are left out.

        Raises:
            DataError: the folder is missing or holds no .npy; a file is damaged, or not stored
                like the first; a target is missing or there are two; ``channels`` is ``None`` and
                the shape does not tell.
        """
        options = ScanOptions(channels, refuse=refuse)
        return broadcast_from_main(lambda: cls.open_folder(Path(path), options))

    @classmethod
    def open_folder(cls, folder: Path, options: ScanOptions) -> NpyFolder:
        return cls(_scan(folder, options.channels, options.refuse))

    def where(self, sample: int) -> str:
        return str(self._path(sample))

    def target(self, sample: int) -> Array:
        return self.arrays.targets[sample]

    def read(self, sample: int, box: Box) -> Array:
        """The box; short gaps between its pieces are read too.

        Raises:
            DataError: the file has gone, is damaged, or has changed since the folder was scanned.
        """
        path = self._path(sample)
        name = self.names[sample]
        arrays = self.arrays
        stored = arrays.order.to_file(box)
        with unchanged(path, name, arrays.stamps[name]), naming(path, "npy"):
            found = read_values(path, arrays.stored, arrays.dtype, stored)
        return arrays.order.to_volume(found.astype(self.dtype, copy=False))

    def storage(self, sample: int) -> Storage:
        order = self.arrays.order
        stored = self.arrays.stored
        if volume_header(self._path(sample)).fortran:
            order = order.reversed
            stored = stored[::-1]
        size = math.prod(stored) * self.dtype.itemsize
        return Storage(order, stored, self.dtype.itemsize, size, bridged=True)

    def files(self, sample: int) -> tuple[Path, ...]:
        """The volume, and what holds its target."""
        single = self.arrays.folder / f"{self.names[sample]}{TARGET_SUFFIX}"
        return self._path(sample), single if single.exists() else self.arrays.folder / TARGETS_FILE

    def alone(self, sample: int) -> NpyFolder:
        one = slice(sample, sample + 1)
        arrays = self.arrays
        return NpyFolder(replace(arrays, names=arrays.names[one], targets=arrays.targets[one]))

    def _path(self, sample: int) -> Path:
        return self.arrays.folder / f"{self.names[sample]}.npy"


def _scan(folder: Path, channels: Channels | None, refuse: Refuse | None = None) -> NpyArrays:
    names = tuple(
        file.removesuffix(".npy")
        for file in list_files(folder, NpyFolder.suffixes)
        if not file.endswith(TARGET_SUFFIX)
    )
    if not names:
        raise DataError(f"{folder}: holds targets *{TARGET_SUFFIX} but no volume")
    stamps: dict[str, Stamp] = {}

    def header(name: str) -> NpyHeader:
        path = folder / f"{name}.npy"
        with naming(path, "npy"):
            stamps[name] = Stamp.of(path)  # a change from now on is noticed
        return volume_header(path)

    found = sift(names, header, refuse)
    first = found[0][0]
    stored = found[0][1].shape
    dtype = found[0][1].dtype

    def alike(entry: tuple[str, NpyHeader]) -> str:
        name, other = entry
        if (other.shape, other.dtype) != (stored, dtype):
            raise DataError(
                f"{folder / name}.npy: is {other.dtype} {other.shape} but {first}.npy is {dtype} "
                f"{stored}; all files of a data set are stored alike"
            )
        return name

    names = tuple(name for _, name in sift(found, alike, refuse))
    order = DHW
    if len(stored) == 4:
        place = channels or channel_order(folder / f"{first}.npy", stored)
        order = DHWC if place == "last" else CDHW
    names, targets, parameters = _targets(folder, names, refuse)
    return NpyArrays(
        folder=folder,
        names=names,
        stored=stored,
        dtype=dtype,
        order=order,
        targets=targets,
        parameters=parameters,
        stamps=stamps,
    )


def _targets(
    folder: Path, names: tuple[str, ...], refuse: Refuse | None
) -> tuple[tuple[str, ...], Floats, tuple[str, ...]]:
    """The samples that have them, (N, P), and the names of the P parameters."""
    table = folder / TARGETS_FILE
    single = [folder / f"{name}{TARGET_SUFFIX}" for name in names]
    if table.exists() and any(path.exists() for path in single):
        raise DataError(
            f"{folder}: holds {TARGETS_FILE} and files *{TARGET_SUFFIX}; keep one of the two"
        )
    if table.exists():
        return names, *_table(table, names)
    sizes: list[int] = []

    def vector(name: str) -> NDArray[Any]:
        path = folder / f"{name}{TARGET_SUFFIX}"
        if not path.exists():
            raise DataError(
                f"{folder}: {printable(name)!r} has no target: neither {TARGETS_FILE} nor "
                f"{path.name} is there\n    name the file of a table: data.table=params.txt "
                f"({OWN_DATA}, tables)"
            )
        with naming(path, "npy"):
            values = read_vector(path)
        if values.ndim != 1 or values.size == 0 or sizes[:1] not in ([], [values.size]):
            raise DataError(
                f"{path}: has shape {values.shape}; needs a vector of numbers, equally many "
                "in each file"
            )
        _check_finite(path, values)
        sizes.append(values.size)
        return values

    found = sift(names, vector, refuse)
    vectors = np.array([values for _, values in found], np.float64)
    return tuple(name for name, _ in found), vectors, numbered_names(sizes[0])


def _table(path: Path, names: Sequence[str]) -> tuple[Floats, tuple[str, ...]]:
    with naming(path, "CSV"), path.open(newline="", encoding="utf-8") as file:
        header, *rows = [row for row in csv.reader(file) if row] or [[]]
        header = [printable(name) for name in header]
    if len(header) < 2 or header[0] != "name" or len(set(header)) != len(header):
        raise DataError(
            f"{path}: starts with {reprlib.repr(header)}; "
            "needs name and different parameters' names"
        )
    found: dict[str, list[float]] = {}
    for row in rows:
        if len(row) != len(header) or row[0] in found:
            raise DataError(
                f"{path}: {reprlib.repr(row)} is not one line for a sample, of {len(header)} fields"
            )
        with naming(f"{path}: sample {row[0]!r}", "CSV"):
            found[row[0]] = [float(value) for value in row[1:]]
        _check_finite(f"{path}: sample {row[0]!r}", np.array(found[row[0]]))
    missing = [name for name in names if name not in found]
    if missing:
        raise DataError(f"{path}: has no line for {len(missing)} samples, {missing[0]!r} first")
    return np.array([found[name] for name in names]), tuple(header[1:])


def _check_finite(where: Path | str, values: NDArray[Any]) -> None:
    if values.dtype.kind not in "fiu" or not np.isfinite(values).all():
        raise DataError(f"{where}: targets are {values.tolist()}; needs finite numbers")
