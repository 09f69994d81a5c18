"""Which format a folder holds, and its `Source`: by what is there, never by a guess."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal, get_args

from hyperslab.comm import Grid, notice
from hyperslab.comm.agreement import from_main
from hyperslab.errors import DataError
from hyperslab.formats.keyed.catalog import SUFFIXES as HDF5
from hyperslab.formats.keyed.hdf5 import Hdf5Folder
from hyperslab.formats.keyed.hdf5_mpio import MpioFolder, replica_of
from hyperslab.formats.keyed.header import Channels
from hyperslab.formats.keyed.zarr import ZarrFolder
from hyperslab.formats.nifti.source import NiftiFolder
from hyperslab.formats.npy.source import NpyFolder
from hyperslab.formats.shared.listing import Refuse, check_folder, walk
from hyperslab.formats.shared.manifest import volumes_of
from hyperslab.formats.source import Source
from hyperslab.formats.tfrecord.source import TfRecordFolder

Format = Literal["hdf5", "lbann", "npy", "tfrecord", "zarr", "nifti"]

Driver = Literal["mpio"]

SUFFIXES: dict[Format, tuple[str, ...]] = {
    "hdf5": HDF5,
    "npy": NpyFolder.suffixes,
    "tfrecord": TfRecordFolder.suffixes,
    "zarr": ZarrFolder.suffixes,
    "nifti": NiftiFolder.suffixes,
}


def source_of(
    path: str | Path,
    grid: Grid,
    channels: Channels | None = None,
    format: Format | None = None,
    refuse: Refuse | None = None,
    driver: Driver | None = None,
) -> Source:
    """The folder as a source of its format; all ranks call this.

    Without ``format`` the files nearest to the top of the folder decide. ``"hdf5"`` takes the
    spatial dims as they are stored, ``"lbann"`` takes them as reversed. ``refuse`` is told of files
    that are not what they should be, which are then left out. With ``driver="mpio"`` the ranks of a
    replica read together.

    Raises:
        DataError: the folder is missing or holds no known file, or files of two formats side by
            side; or as the format's own source.
    """
    folder = Path(path)
    if format is not None and format not in get_args(Format):
        raise DataError(f"{format=}: choose from {', '.join(get_args(Format))}")
    found = from_main(lambda: find_format(folder)) if format is None else (format, "")
    if found[1]:
        notice(grid, found[1])
    source = _scanned(found[0], folder, grid, channels, format, refuse)
    if driver is not None:
        source = _together(source, grid, driver)
    source.volumes = from_main(lambda: volumes_of(folder))
    return source


def _scanned(
    found: Format,
    folder: Path,
    grid: Grid,
    channels: Channels | None,
    format: Format | None,
    refuse: Refuse | None,
) -> Source:
    """The source of the format that was ``found``, which need not have been asked for."""
    match found:
        case "hdf5" | "lbann":
            return Hdf5Folder.scan(folder, grid, channels, lbann_of(format), refuse)
        case "zarr":
            return ZarrFolder.scan(folder, grid, channels, refuse=refuse)
        case "npy":
            return NpyFolder.scan(folder, grid, channels, refuse)
        case "tfrecord":
            return TfRecordFolder.scan(folder, grid, refuse=refuse)
        case "nifti":
            return NiftiFolder.scan(folder, grid, refuse)


def _together(source: Source, grid: Grid, driver: str) -> Source:
    if driver not in get_args(Driver):
        raise DataError(f"{driver=}: choose from {', '.join(get_args(Driver))}")
    if not isinstance(source, Hdf5Folder):
        raise DataError(
            f"{source.where(0)}: {driver=} is for HDF5 files\n    hyperslab convert makes such of "
            "others; without the driver every rank reads by itself"
        )
    return MpioFolder(source.catalog, replica_of(grid))


def lbann_of(format: Format | None) -> bool | None:
    """Whether HDF5 files have reversed spatial dims, by the format that was asked for."""
    return None if format is None else format == "lbann"


def find_format(folder: Path) -> tuple[Format, str]:
    """The format, and a word on files of others that lie deeper and are left out.

    Raises:
        DataError: see `source_of`.
    """
    check_folder(folder)
    found = Counter((name.count("/"), kind) for name in walk(folder) if (kind := _kind(name)))
    if not found:
        known = ", ".join("*" + suffix for group in SUFFIXES.values() for suffix in group)
        raise DataError(f"{folder}: no file {known} in it or below")
    top = min(depth for depth, _ in found)
    first = sorted(kind for depth, kind in found if depth == top)
    if len(first) > 1:
        words = " and ".join(f"{found[top, kind]} of {kind}" for kind in first)
        raise DataError(f'{folder}: holds files of two formats, {words}; say format="{first[0]}"')
    others = sorted({kind for _, kind in found} - {first[0]})
    if not others:
        return first[0], ""
    return first[0], f"{folder}: read as {first[0]}; files of {', '.join(others)} are left out"


def _kind(name: str) -> Format | None:
    return next((kind for kind, group in SUFFIXES.items() if name.endswith(group)), None)
