"""Which files are in a folder, and those of them that can be read."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hyperslab.errors import DataError

Item = TypeVar("Item")
Found = TypeVar("Found")

Refuse = Callable[[DataError], None]
"""Told of each file that is left out; where there is none, the first bad file is the error."""


def list_files(folder: Path, suffixes: Sequence[str]) -> tuple[str, ...]:
    """The files with one of these suffixes in a folder and below, sorted, hidden ones left out.

    A ``.zarr`` counts as one, and nothing in it.

    Raises:
        DataError: the folder is missing or holds none, or a name is of no file.
    """
    check_folder(folder)
    files = [file for file in walk(folder) if file.endswith(tuple(suffixes))]
    for file in files:
        path = folder / file
        if path.suffix != ".zarr" and not path.is_file():
            raise DataError(f"{path}: {_what(path)}; mend it or take it away")
    if not files:
        raise DataError(f"{folder}: no file *{' or *'.join(suffixes)} in it or below")
    return tuple(files)


def check_folder(folder: Path) -> None:
    """Nothing, if there is such a folder.

    Raises:
        DataError: there is none.
    """
    if not folder.is_dir():
        state = "is not a folder" if folder.exists() else "does not exist"
        raise DataError(f"{folder}: {state}; give the folder that holds the data")


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


def sift(
    items: Sequence[Item], read: Callable[[Item], Found], refuse: Refuse | None = None
) -> list[tuple[Item, Found]]:
    """The items that can be read, each with what was read of it; ``refuse`` is told of the others.

    Raises:
        DataError: of the first that cannot be read, if there is no ``refuse`` or none can be.
    """
    found = []
    errors = []
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


def _what(path: Path) -> str:
    """What is under the name of a file that is none."""
    if path.is_dir():
        return "is a folder, not an ordinary file"
    return "is a link to nowhere" if path.is_symlink() else "is no file"
