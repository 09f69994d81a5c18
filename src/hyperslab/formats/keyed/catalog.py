"""The catalogue of a folder: which files there are, and all of them but the volumes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import torch.distributed as dist

from hyperslab.comm import Grid
from hyperslab.errors import DataError
from hyperslab.formats.keyed.header import (
    KEYS,
    Channels,
    Header,
    Layout,
    kind_of,
    naming,
    read_header,
)
from hyperslab.formats.parameters import Floats, Parameters
from hyperslab.formats.shared.fingerprint import Stamp

SUFFIXES = (".hdf5", ".h5")

S = TypeVar("S")
T = TypeVar("T")

Refuse = Callable[[DataError], None]
"""Told of each file that is left out; where there is none, the first bad file is the error."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """N files of one layout below ``folder``, in sorted order, with their targets (N, P).

    ``stamps``: of every file, or of the metadata of the arrays in a Zarr group, by relative names.
    """

    folder: Path
    files: tuple[str, ...]  # relative: the same base name may occur in two sub-folders
    layout: Layout
    unit: Floats
    parameters: Parameters
    stamps: Mapping[str, Stamp]

    @property
    def names(self) -> tuple[str, ...]:
        """The samples' names: the relative paths without their suffix."""
        return tuple(file.rpartition(".")[0] for file in self.files)


def scan(
    folder: Path,
    channels: Channels | None,
    lbann: bool | None = None,
    suffixes: Sequence[str] = SUFFIXES,
    refuse: Refuse | None = None,
) -> Catalog:
    """List the folder and its sub-folders and check the header of every file.

    With ``refuse`` files that are not what they should be are left out.

    Raises:
        DataError: the folder is missing or holds no file, a file is not what it should be,
            or a file is not stored like the first one.
    """
    files = list_files(folder, suffixes)
    stamps: dict[str, Stamp] = {}

    def header(file: str) -> Header:
        stamps.update(stamps_of(folder, file))  # a change from now on is noticed
        return read_header(folder / file, channels, lbann)

    found = sift(files, header, refuse)
    first, one = found[0]

    def alike(entry: tuple[str, Header]) -> Header:
        _check_alike(folder, first, one.layout, entry[0], entry[1].layout)
        return entry[1]

    found = [entry for entry, _ in sift(found, alike, refuse)]
    headers = [header for _, header in found]
    unit = np.array([header.unit for header in headers])
    names = tuple(file for file, _ in found)
    return Catalog(folder, names, one.layout, unit, _parameters(headers, unit), stamps)


def stamps_of(folder: Path, file: str) -> dict[str, Stamp]:
    """The stamp of a file, or those of the arrays in a Zarr group that a data set may have.

    Raises:
        DataError: it has gone.
    """
    path = folder / file
    with naming(path, kind_of(path)):
        names = {stamped(file, key) for pair in KEYS for key in pair}
        return {name: Stamp.of(folder / name) for name in names if (folder / name).exists()}


def stamped(file: str, key: str) -> str:
    """What of a sample has a stamp: the file, or where Zarr v3 says what the array of a key is."""
    return f"{file}/{key}/zarr.json" if kind_of(Path(file)) == "Zarr" else file


def sift(
    items: Sequence[S], read: Callable[[S], T], refuse: Refuse | None = None
) -> list[tuple[S, T]]:
    """The items that can be read, each with what was read of it; ``refuse`` is told of the others.

    Raises:
        DataError: of the first that cannot be read, if there is no ``refuse`` or none can be.
    """
    found, errors = [], []
    for item in items:
        try:
            found.append((item, read(item)))
        except DataError as error:
            if refuse is None:
                raise
            refuse(error)
            errors.append(error)
    if not found:
        raise errors[0]
    return found


def from_main(grid: Grid, make: Callable[[], T]) -> T:
    """What ``make`` returns or raises on the main rank, on every rank.

    So a folder that changes meanwhile is the same for all, and is scanned once.
    """
    if grid.size == 1:
        return make()
    result: list[T | Exception | None] = [None]
    if grid.is_main:
        try:
            result[0] = make()
        except Exception as error:
            result[0] = error
    dist.broadcast_object_list(result, src=0)
    if isinstance(result[0], Exception):
        raise result[0]
    return cast(T, result[0])


def list_files(folder: Path, suffixes: Sequence[str]) -> tuple[str, ...]:
    """The files with one of these suffixes in a folder and below, sorted, hidden ones left out.

    A ``.zarr`` counts as one, and nothing in it.

    Raises:
        DataError: the folder is missing or holds none, or a name is of no file.
    """
    if not folder.is_dir():
        state = "is not a folder" if folder.exists() else "does not exist"
        raise DataError(f"{folder}: {state}; give the folder that holds the data")
    files = [file for file in walk(folder) if file.endswith(tuple(suffixes))]
    for file in files:
        path = folder / file
        if path.suffix != ".zarr" and not path.is_file():
            raise DataError(f"{path}: {_what(path)}; mend it or take it away")
    if not files:
        raise DataError(f"{folder}: no file *{' or *'.join(suffixes)} in it or below")
    return tuple(files)


def walk(folder: Path) -> list[str]:
    """Relative names of all that is in a folder and below, sorted; not what is hidden or in Zarr.

    Names of folders are among them.
    """
    found: list[str] = []
    for place, folders, files in os.walk(folder):
        there = Path(place).relative_to(folder)
        names = [name for name in (*folders, *files) if not name.startswith(".")]
        found.extend((there / name).as_posix() for name in names)
        folders[:] = [f for f in folders if not f.startswith(".") and not f.endswith(".zarr")]
    return sorted(found)


def _what(path: Path) -> str:
    """What is under the name of a file that is none."""
    if path.is_dir():
        return "is a folder, not an ordinary file"
    return "is a link to nowhere" if path.is_symlink() else "is no file"


def _check_alike(folder: Path, first: str, one: Layout, file: str, other: Layout) -> None:
    for field in fields(Layout):
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        if ours != theirs:
            raise DataError(
                f"{folder / file}: {field.name} is {theirs} but {ours} in {first}; "
                "all files of a data set are stored alike"
            )


def _parameters(headers: list[Header], unit: Floats) -> Parameters:
    names = headers[0].layout.names
    physical = [header.physical for header in headers if header.physical is not None]
    if len(physical) < len(headers):
        return Parameters.normalised(names)
    return Parameters.fit(names, unit, np.array(physical))
