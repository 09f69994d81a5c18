"""Lists the storage formats, finds the one that a folder holds, and opens the folder as a `Source`.

Formats of users are registered by modules that `load_plugins` imports.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from hyperslab.comm import Grid, log_once
from hyperslab.comm.agreement import broadcast_from_main
from hyperslab.errors import DataError, HyperslabError
from hyperslab.formats.arrays.source import MappedFolder
from hyperslab.formats.files import STRICT, AccessPolicy, Refuse, check_folder, walk_folder
from hyperslab.formats.manifest import MANIFEST_FILE, volumes_of
from hyperslab.formats.source import OWN_DATA, DataMap, ScanOptions, Source
from hyperslab.formats.storage_order import Channels
from hyperslab.formats.views import joined
from hyperslab.formats.writer import Writer


def load_plugins(modules: Sequence[str], allow: Callable[[str], None] | None = None) -> None:
    """Imports modules by name; they are looked for in the current folder too.

    ``allow`` is asked before each, and says where it is looked for.

    Raises:
        DataError: one cannot be imported; says why.
        HyperslabError: it is not allowed.
    """
    for module in modules:
        try:
            if allow is None:
                look_in_current_folder()
            else:
                allow(module)
            importlib.import_module(module)
        except HyperslabError:
            raise
        except (Exception, SystemExit) as error:  # whatever is wrong in somebody else's code
            raise DataError(
                f"plugin {module!r}: cannot be imported: {type(error).__name__}: {error}\n"
                "    give the name of a module that is installed, in PYTHONPATH or in this folder"
            ) from error


def look_in_current_folder() -> None:
    """Adds the current folder to the path as `python -m` does, but the command `hyperslab` not."""
    with suppress(FileNotFoundError):  # the folder is gone: nothing is to be found there
        here = os.getcwd()
        if here not in sys.path:
            sys.path.append(here)


Driver = Literal["mpio"]

MAPPED = "arrays"
"""The name of what a user describes by a `DataMap`; nobody asks for it."""


@dataclass(frozen=True, slots=True)
class Format:
    """Describes a storage format.

    ``suffixes``: of its files' names, by which a folder is known to hold it; without any it has to
    be asked for by its ``name``. ``source``: opens a folder, see `Source.open_folder`. ``writer``:
    of what `hyperslab convert` makes; ``None`` where it makes none. ``help``: one line.
    """

    name: str
    suffixes: tuple[str, ...]
    source: type[Source]
    writer: Writer | None = None
    help: str = ""


_FORMATS: dict[str, Format] = {}
"""All formats by name, in the order of their registration."""


def register(
    name: str,
    *,
    suffixes: Sequence[str] = (),
    source: type[Source],
    writer: Writer | None = None,
    help: str = "",
) -> Format:
    """Makes a format known to `hyperslab.open`, recipes, and every command; see `Format`.

    Raises:
        TypeError: the source is no class of `Source`, the writer no instance of a `Writer`, or the
            suffixes are one string.
        ValueError: the name, or a suffix, is that of another format.
    """
    if not (isinstance(source, type) and issubclass(source, Source)):
        raise TypeError(f"{source=}: give a class that is derived from hyperslab.formats.Source")
    if writer is not None and not isinstance(writer, Writer):
        raise TypeError(f"{writer=}: give an instance of a hyperslab.formats.Writer, or none")
    if isinstance(suffixes, str):
        raise TypeError(f'{suffixes=}: give a list, ["{suffixes}"]')
    if name in _FORMATS:
        raise ValueError(f"format {name!r} is registered already, by {_FORMATS[name].source}")
    for other in _FORMATS.values():
        for known in other.suffixes:
            for suffix in suffixes:
                if suffix.endswith(known) or known.endswith(suffix):
                    raise ValueError(f"files *{suffix} are those of the format {other.name!r}")
    _FORMATS[name] = Format(name, tuple(suffixes), source, writer, help)
    return _FORMATS[name]


def adopt(format: Format) -> None:
    """Makes a format of the process that has started this one known here, if it is not."""
    _FORMATS.setdefault(format.name, format)


def formats() -> tuple[Format, ...]:
    """Lists all formats that are registered."""
    return tuple(_FORMATS.values())


def names() -> tuple[str, ...]:
    """Names all formats that are registered."""
    return tuple(_FORMATS)


def compressions() -> list[str]:
    """Lists the compressions that any writer has."""
    writers = [one.writer for one in formats() if one.writer is not None]
    return list(dict.fromkeys(word for writer in writers for word in writer.compressions))


def choices(names: Sequence[str]) -> str:
    """Joins names for a sentence.

    >>> choices(["hdf5", "npy", "zarr"])
    'hdf5, npy or zarr'
    """
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def named(format: str) -> Format:
    """Returns the format of this name.

    Raises:
        DataError: there is none; names those that there are.
    """
    if format not in _FORMATS:
        raise DataError(f"{format=}: choose from {', '.join(names())}")
    return _FORMATS[format]


def source_of(
    path: str | Path,
    grid: Grid,
    channels: Channels | None = None,
    format: str | None = None,
    refuse: Refuse | None = None,
    driver: Driver | None = None,
    allowed: AccessPolicy = STRICT,
    mapping: DataMap | None = None,
) -> Source:
    """Opens the folder as a source of its format; all ranks call this.

    The main rank scans it, so that a folder that changes meanwhile is the same for all. Without
    ``format`` the files nearest to the top of the folder decide. ``"hdf5"`` takes the spatial dims
    as they are stored, ``"lbann"`` takes them as reversed. ``refuse`` is told of files that are not
    what they should be, which are then left out. With ``driver="mpio"`` the ranks of a replica read
    together. ``allowed``: what files may do. ``mapping``: where volumes and targets are in it.

    Raises:
        DataError: the folder is missing or holds no known file, or files of two formats side by
            side; or as the format's own source.
    """
    return sources_of([path], grid, ScanOptions(channels, format, refuse, allowed, mapping), driver)


def sources_of(
    paths: Iterable[str | os.PathLike[str]],
    grid: Grid,
    options: ScanOptions,
    driver: Driver | None = None,
) -> Source:
    """Opens several folders as one source, see `Joined`; errors are those of `source_of`, too."""
    parts = {Path(path): _opened(Path(path), grid, options, driver) for path in paths}
    return next(iter(parts.values())) if len(parts) == 1 else joined(parts)


def _opened(folder: Path, grid: Grid, options: ScanOptions, driver: Driver | None) -> Source:
    if driver is not None and driver not in get_args(Driver):
        raise DataError(f"{driver=}: choose from {', '.join(get_args(Driver))}")
    if options.format is not None:
        named(options.format)

    def scan() -> tuple[Source, dict[str, str], str]:
        source, others = scanned(folder, options)
        converted = os.path.lexists(folder / MANIFEST_FILE)
        return source, volumes_of(folder) if converted else {}, others

    source, volumes, others = broadcast_from_main(scan)
    for words in filter(None, (others, source.remark)):
        log_once(grid, words, logging.INFO)
    if driver is not None:
        source = source.read_together(driver, grid)
    source.volumes = volumes
    return source


def scanned(folder: Path, options: ScanOptions) -> tuple[Source, str]:
    """Opens the folder as this process sees it, with a word on files that are left out.

    Raises:
        DataError: see `source_of`.
    """
    if options.mapping is not None:
        return MappedFolder.open_folder(folder, options), ""
    if options.format is not None:
        return named(options.format).source.open_folder(folder, options), ""
    found, others = find_format(folder)
    return found.source.open_folder(folder, options), others


def find_format(folder: Path) -> tuple[Format, str]:
    """Finds the format, with a word on files of others that lie deeper and are left out.

    A file may be a list of samples, whose suffix decides.

    Raises:
        DataError: see `source_of`.
    """
    if folder.is_file():
        lister = next((one for one in formats() if folder.name.endswith(one.source.lists)), None)
        if lister is not None:
            return lister, ""
    if MappedFolder.claims(folder):
        return Format(MAPPED, (), MappedFolder), ""
    check_folder(folder)
    found = Counter(
        (name.count("/"), kind) for name in walk_folder(folder) if (kind := _kind(name))
    )
    if not found:
        known = ", ".join("*" + suffix for format in formats() for suffix in format.suffixes)
        raise DataError(
            f"{folder}: no file {known} in it or below\n    .npz files are read by a recipe with "
            f"data.keys ({OWN_DATA}, keys); for others see {OWN_DATA}, a Source"
        )
    top = min(depth for depth, _ in found)
    first = sorted(kind for depth, kind in found if depth == top)
    if len(first) > 1:
        words = " and ".join(f"{found[top, kind]} of {kind}" for kind in first)
        raise DataError(f'{folder}: holds files of two formats, {words}; say format="{first[0]}"')
    others = sorted({kind for _, kind in found} - {first[0]})
    if not others:
        return named(first[0]), ""
    return (
        named(first[0]),
        f"{folder}: read as {first[0]}; files of {', '.join(others)} are left out",
    )


def _kind(file: str) -> str | None:
    """Names the format of a file, by its suffix."""
    return next((one.name for one in formats() if file.endswith(one.suffixes)), None)
