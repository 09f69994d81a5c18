"""The manifest of a conversion (`hyperslab.formats.shared.manifest`), as it grows.

A sample is recorded before its files get their names: what has a name and no line is somebody
else's, what has a line and no name is made again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hyperslab.atomic_files import append_whole, json_lines, open_to_append, try_lock
from hyperslab.errors import DataError
from hyperslab.formats.shared.manifest import MANIFEST_FILE, Entry, read_manifest

REMEDY = "convert into another folder"


class Manifest:
    """The manifest in ``folder``. ``entries``: of each sample, by name, the last one written."""

    def __init__(self, folder: Path, entries: Sequence[Entry]) -> None:
        self.folder = folder
        self.entries = {entry["name"]: entry for entry in entries}

    def add(self, entries: Sequence[Entry]) -> None:
        """Note samples.

        Raises:
            OSError: they cannot be; then none is.
        """
        append_whole(self.folder / MANIFEST_FILE, json_lines(entries))
        self.entries |= {entry["name"]: entry for entry in entries}


@contextmanager
def held(folder: Path, asked: Entry, needed: Sequence[str]) -> Iterator[Manifest]:
    """The manifest of a folder that is made if there is none, kept from other runs.

    ``needed``: keys without which a line is none of this conversion.

    Raises:
        DataError: the folder is another conversion's, none at all, in use, or cannot be written.
    """
    found, _, _ = read_manifest(folder)
    if found is None:
        _check_empty(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(open_to_append(folder / MANIFEST_FILE), "ab")
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror}") from error
    with file:
        if not try_lock(file.fileno()):
            raise DataError(f"{folder}: another conversion into it is under way")
        found, entries, size = read_manifest(folder)
        _check_complete(folder, entries, needed)
        try:
            file.truncate(size)  # a line that a killed run has begun
            if found is None:
                append_whole(folder / MANIFEST_FILE, json_lines([asked]))
        except OSError as error:
            raise DataError(f"{folder}: cannot be written: {error.strerror}") from error
        for key, value in asked.items() if found else ():
            if found and found.get(key) != value:
                raise DataError(
                    f"{folder}: was converted with {key} {found.get(key)}, not {value}: {REMEDY}"
                )
        yield Manifest(folder, entries)


def _check_complete(folder: Path, entries: Sequence[Entry], needed: Sequence[str]) -> None:
    """A run that goes on looks for more than a reader."""
    for entry in entries:
        missing = [key for key in needed if key not in entry]
        if missing:
            raise DataError(
                f"{folder / MANIFEST_FILE}: is no record of a conversion (the line of "
                f"{entry['name']!r} has no {missing[0]})"
            )


def _check_empty(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder}: is not a folder")
    others = sorted(p.name for p in folder.glob("*") if not p.name.startswith(".")) or [""]
    if others[0] not in ("", MANIFEST_FILE):
        raise DataError(f"{folder}: holds {others[0]!r}, which is of no conversion: {REMEDY}")
