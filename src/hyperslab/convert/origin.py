"""Where a sample comes from: its files, by what they are known again, and a source of it alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hyperslab.formats.keyed.source import KeyedFolder
from hyperslab.formats.nifti.source import NiftiFolder
from hyperslab.formats.npy.source import TABLE, TARGET, NpyFolder
from hyperslab.formats.shared.checks import naming
from hyperslab.formats.source import Source
from hyperslab.formats.tfrecord.source import TfRecordFolder

Stamps = dict[str, list[int]]
"""Of each file, relative to its folder: its size [B] and when it was written [ns]."""


def stamps(source: Source, sample: int, root: Path) -> Stamps:
    """The stamps of the files of a sample below ``root``.

    Raises:
        DataError: one has gone.
    """
    found = {}
    for path in _files(source, sample):
        with naming(path, "a file"):
            found[path.relative_to(root).as_posix()] = stamp(path)
    return found


def stamp(path: Path) -> list[int]:
    """The size [B] of a file, or of all in a folder, and when it, or the last one, was written.

    Raises:
        OSError: it has gone.
    """
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    states = [file.stat() for file in files]
    return [sum(s.st_size for s in states), max((s.st_mtime_ns for s in states), default=0)]


def alone(source: Source, sample: int) -> tuple[type[Source], Any]:
    """A source's type, and what it takes to have of it one sample; for another process."""
    one = slice(sample, sample + 1)
    match source:
        case KeyedFolder():
            catalog = source.catalog
            return type(source), replace(catalog, files=catalog.files[one], unit=catalog.unit[one])
        case NpyFolder():
            arrays = source.arrays
            names, targets = arrays.names[one], arrays.targets[one]
            return NpyFolder, replace(arrays, names=names, targets=targets)
        case TfRecordFolder():
            return TfRecordFolder, replace(source.catalog, files=source.catalog.files[one])
        case NiftiFolder():
            return NiftiFolder, replace(source.scans, pairs=source.scans.pairs[one])
    raise NotImplementedError(type(source).__name__)


def _files(source: Source, sample: int) -> list[Path]:
    first = Path(source.where(sample))
    match source:
        case NpyFolder():
            target = source.arrays.folder / f"{source.names[sample]}{TARGET}"
            return [first, target if target.exists() else source.arrays.folder / TABLE]
        case NiftiFolder():
            return [first, source.scans.pairs[sample].labels]
    return [first]
