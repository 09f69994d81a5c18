"""The catalogue of a folder: which files there are, and all of them but the volumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyperslab.errors import DataError
from hyperslab.formats.keyed.header import (
    LAYOUT_KEYS,
    KeyedHeader,
    StorageLayout,
    read_header,
)
from hyperslab.formats.keyed.header_child import HeaderChild
from hyperslab.formats.keyed.keyed_file import kind_of
from hyperslab.formats.parameters import Floats, Parameters, ranges_in
from hyperslab.formats.shared.channels import Channels
from hyperslab.formats.shared.checks import naming
from hyperslab.formats.shared.fingerprint import Stamp
from hyperslab.formats.shared.listing import Refuse, list_files, sift
from hyperslab.formats.shared.reach import STRICT, Allowed, Reach

EXACT = 1e-9
"""The share of a parameter by which it may be off the ranges that its file notes."""

HDF5_SUFFIXES = (".hdf5", ".h5")

ALIKE = (
    "key",
    "stored",
    "dtype",
    "channels",
    "names",
    "classes",
    "label_shape",
    "label_dtype",
    "reversed",
)
"""Of a `StorageLayout`, what an error names."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """N files of one layout below ``folder``, in sorted order, with their targets (N, P).

    ``stamps``: of every file, or of the metadata of the arrays in a Zarr group, by relative names.
    ``redshifts``: of the channels, where all files say the same ones. ``allowed``: what the
    files may do.
    """

    folder: Path
    files: tuple[str, ...]  # relative: the same base name may occur in two sub-folders
    layout: StorageLayout
    unit: Floats
    parameters: Parameters
    stamps: Mapping[str, Stamp]
    redshifts: tuple[float, ...] = ()
    allowed: Allowed = STRICT

    @property
    def reach(self) -> Reach:
        """How far the files may refer to others."""
        return Reach(self.folder, self.allowed)

    @property
    def names(self) -> tuple[str, ...]:
        """The samples' names: the relative paths without their suffix."""
        return tuple(file.rpartition(".")[0] for file in self.files)


def scan(
    folder: Path,
    channels: Channels | None,
    lbann: bool | None = None,
    suffixes: Sequence[str] = HDF5_SUFFIXES,
    refuse: Refuse | None = None,
    allowed: Allowed = STRICT,
) -> Catalog:
    """List the folder and its sub-folders and check the header of every file.

    With ``refuse`` files that are not what they should be are left out; ``allowed``: what they
    may do.

    Raises:
        DataError: the folder is missing or holds no file, a file is not what it should be,
            or a file is not stored like the first one.
    """
    files = list_files(folder, suffixes)
    stamps: dict[str, Stamp] = {}
    reach = Reach(folder, allowed)

    def header(file: str) -> KeyedHeader:
        stamps.update(stamps_of(folder, file))  # a change from now on is noticed
        path = folder / file
        return child(str(path)) if kind_of(path) == "HDF5" else read(str(path))

    def read(path: str) -> KeyedHeader:
        return read_header(Path(path), channels, lbann, reach)

    with HeaderChild(read) as child:
        found = sift(files, header, refuse)
    first, one = found[0]

    def alike(entry: tuple[str, KeyedHeader]) -> KeyedHeader:
        _check_alike(folder, first, one.layout, entry[0], entry[1].layout)
        return entry[1]

    found = [entry for entry, _ in sift(found, alike, refuse)]
    headers = [header for _, header in found]
    unit = np.array([header.unit for header in headers])
    names = tuple(file for file, _ in found)
    parameters = _parameters(headers, unit)
    said = {header.redshifts for header in headers}
    redshifts = one.redshifts if len(said) == 1 else ()
    return Catalog(
        folder=folder,
        files=names,
        layout=one.layout,
        unit=unit,
        parameters=parameters,
        stamps=stamps,
        redshifts=redshifts,
        allowed=allowed,
    )


def stamps_of(folder: Path, file: str) -> dict[str, Stamp]:
    """The stamp of a file, or those of the arrays in a Zarr group that a data set may have.

    Raises:
        DataError: it has gone.
    """
    path = folder / file
    with naming(path, kind_of(path)):
        names = {stamped(file, key) for pair in LAYOUT_KEYS for key in pair}
        return {name: Stamp.of(folder / name) for name in names if (folder / name).exists()}


def stamped(file: str, key: str) -> str:
    """What of a sample has a stamp: the file, or where Zarr v3 says what the array of a key is."""
    return f"{file}/{key}/zarr.json" if kind_of(Path(file)) == "Zarr" else file


def _check_alike(
    folder: Path, first: str, one: StorageLayout, file: str, other: StorageLayout
) -> None:
    for word in ALIKE:
        ours = getattr(one, word)
        theirs = getattr(other, word)
        if ours != theirs:
            raise DataError(
                f"{folder / file}: {word} is {theirs} but {ours} in {first}; "
                "all files of a data set are stored alike"
            )


def _parameters(headers: list[KeyedHeader], unit: Floats) -> Parameters:
    names = headers[0].layout.names
    physical = [header.physical for header in headers if header.physical is not None]
    if len(physical) < len(headers):
        return Parameters.normalised(names)
    drawn = {header.ranges for header in headers}
    ranges = ranges_in(drawn.pop()) if len(drawn) == 1 else {}
    if tuple(ranges) == names:
        within = Parameters.within(ranges, unit, np.array(physical))
        if within.misfit < EXACT:
            return within
    return Parameters.fit(names, unit, np.array(physical))
