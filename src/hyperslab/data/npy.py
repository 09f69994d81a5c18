"""A folder of .npy files as a `Source`: each volume is mapped into memory, box by box.

``{name}.npy`` is (C, D, H, W), (D, H, W, C) or, of one channel, (D, H, W). The targets are in
``targets.csv`` of the folder, whose first line is ``name`` and the names of the parameters, or each
in ``{name}.target.npy`` (P,).
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.comm import Grid
from hyperslab.data.catalog import Refuse, from_main, list_files, sift
from hyperslab.data.header import DTYPES, Channels, channel_order, naming
from hyperslab.data.parameters import Floats, Parameters
from hyperslab.data.source import Array, Source
from hyperslab.errors import DataError
from hyperslab.geometry import Box

TARGET = ".target.npy"
TABLE = "targets.csv"


@dataclass(frozen=True, slots=True)
class Arrays:
    """What a folder holds: N volumes stored alike, with their targets (N, P)."""

    folder: Path
    names: tuple[str, ...]
    stored: tuple[int, ...]
    dtype: np.dtype[Any]
    channels: Channels
    targets: Floats
    parameters: tuple[str, ...]


class NpyFolder(Source):
    """Arrays in files of numpy's own format.

    A box is copied out of a mapping that is made for it, so that only the pages on which it lies
    are read and a file that has changed is found. (One that is cut short by another process in the
    middle of the copy ends this process: the system sends SIGBUS.)
    """

    suffixes = (".npy",)

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.names = arrays.names
        self.dtype = arrays.dtype.newbyteorder("=")
        self.parameters = Parameters.normalised(arrays.parameters)
        last = arrays.channels == "last"
        self.shape = (arrays.stored[-1], *arrays.stored[:-1]) if last else arrays.stored
        if len(arrays.stored) == 3:
            self.shape = (1, *arrays.stored)

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
        return cls(from_main(grid, lambda: _scan(Path(path), channels, refuse)))

    def where(self, sample: int) -> str:
        return str(self._path(sample))

    def target(self, sample: int) -> Array:
        return self.arrays.targets[sample]

    def read(self, sample: int, box: Box) -> Array:
        path, arrays = self._path(sample), self.arrays
        with naming(path, "npy"):
            stored = _mapped(path)
            if stored.shape != arrays.stored or stored.dtype != arrays.dtype:
                raise DataError(
                    f"{path}: is {stored.dtype} {stored.shape} but was {arrays.dtype} "
                    f"{arrays.stored} when the folder was scanned"
                )
            if stored.ndim == 3:
                stored = stored[None]
            elif arrays.channels == "last":
                stored = np.moveaxis(stored, -1, 0)
            return np.array(stored[box.slices()], self.dtype)

    def _path(self, sample: int) -> Path:
        return self.arrays.folder / f"{self.names[sample]}.npy"


def _mapped(path: Path) -> NDArray[Any]:
    return np.lib.format.open_memmap(path, mode="r")


def _scan(folder: Path, channels: Channels | None, refuse: Refuse | None = None) -> Arrays:
    names = tuple(
        file.removesuffix(".npy")
        for file in list_files(folder, NpyFolder.suffixes)
        if not file.endswith(TARGET)
    )
    if not names:
        raise DataError(f"{folder}: holds targets *{TARGET} but no volume")
    found = sift(names, lambda name: _header(folder / f"{name}.npy"), refuse)
    first, (stored, dtype) = found[0]

    def alike(entry: tuple[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> str:
        name, (other, kind) = entry
        if (other, kind) != (stored, dtype):
            raise DataError(
                f"{folder / name}.npy: is {kind} {other} but {first}.npy is {dtype} {stored}; "
                "all files of a data set are stored alike"
            )
        return name

    names = tuple(name for _, name in sift(found, alike, refuse))
    if len(stored) == 3:
        channels = "first"
    order = channels or channel_order(folder / f"{first}.npy", stored)
    names, targets, parameters = _targets(folder, names, refuse)
    return Arrays(folder, names, stored, dtype, order, targets, parameters)


def _header(path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    with naming(path, "npy"):
        stored = _mapped(path)
    if stored.ndim not in (3, 4) or 0 in stored.shape or stored.dtype.name not in DTYPES:
        raise DataError(
            f"{path}: is {stored.dtype} {stored.shape}; needs three spatial dims, with or without "
            f"channels, of {', '.join(DTYPES)}"
        )
    return stored.shape, stored.dtype


def _targets(
    folder: Path, names: tuple[str, ...], refuse: Refuse | None
) -> tuple[tuple[str, ...], Floats, tuple[str, ...]]:
    """The samples that have them, (N, P), and the names of the P parameters."""
    table = folder / TABLE
    single = [folder / f"{name}{TARGET}" for name in names]
    if table.exists() and any(path.exists() for path in single):
        raise DataError(f"{folder}: holds {TABLE} and files *{TARGET}; keep one of the two")
    if table.exists():
        return names, *_table(table, names)
    sizes: list[int] = []

    def vector(name: str) -> NDArray[Any]:
        path = folder / f"{name}{TARGET}"
        with naming(path, "npy"):
            values = np.asarray(np.load(path, allow_pickle=False))
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
    return tuple(name for name, _ in found), vectors, tuple(f"y{i}" for i in range(sizes[0]))


def _table(path: Path, names: Sequence[str]) -> tuple[Floats, tuple[str, ...]]:
    with naming(path, "CSV"), path.open(newline="", encoding="utf-8") as file:
        header, *rows = [row for row in csv.reader(file) if row] or [[]]
    if len(header) < 2 or header[0] != "name" or len(set(header)) != len(header):
        raise DataError(f"{path}: starts with {header}; needs name and different parameters' names")
    found: dict[str, list[float]] = {}
    for row in rows:
        if len(row) != len(header) or row[0] in found:
            raise DataError(f"{path}: {row} is not one line for a sample, of {len(header)} fields")
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
