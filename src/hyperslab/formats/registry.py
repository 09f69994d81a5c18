"""Lists the storage formats, finds the one that a folder holds, and opens the folder as a `Source`.

Formats of users are registered by modules that `load_plugins` imports.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from hyperslab.errors import DataError, HyperslabError, printable
from hyperslab.formats.files import OWN_DATA, check_folder, walk_folder
from hyperslab.formats.manifest import MANIFEST_FILE, volumes_of

if TYPE_CHECKING:  # with numpy and torch, for which recipes do not wait
    from hyperslab.comm import Grid
    from hyperslab.formats.source import ScanOptions, Source
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


log = logging.getLogger("hyperslab")

Driver = Literal["mpio"]

MAPPED = "arrays"
"""The name of what a user describes by a `DataMap`; nobody asks for it."""


@dataclass(frozen=True, slots=True)
class Format:
    """Describes a storage format.

    ``suffixes``: those of its files, by which a folder is recognised; without any the user has to
    give its ``name``. ``source``: opens a folder, see `Source.open_folder`. ``writer``: writes the
    files of `hyperslab convert`; ``None`` if it cannot be written. ``help``: one line.
    """

    name: str
    suffixes: tuple[str, ...]
    source: type[Source]
    writer: Writer | None = None
    help: str = ""

    @property
    def compressions(self) -> tuple[str, ...]:
        """Returns those of the writer; none without one."""
        return () if self.writer is None else self.writer.compressions


@dataclass(frozen=True, slots=True)
class _BuiltIn:
    """Describes a `Format` of ours without its classes, whose names are those in `formats`."""

    suffixes: tuple[str, ...]
    source: str
    writer: str
    help: str
    compressions: tuple[str, ...] = ("none",)  # those of the writer


_BUILT_IN = {
    "hdf5": _BuiltIn(
        (".hdf5", ".h5"),
        "arrays.source.Hdf5Folder",
        "arrays.writer.Hdf5Writer",
        "public CosmoFlow and LiTS HDF5",
        ("none", "gzip"),
    ),
    "lbann": _BuiltIn(
        (),
        "arrays.source.Hdf5Folder",
        "arrays.writer.LbannWriter",
        "LBANN's parts, dims reversed",
        ("none", "gzip"),
    ),
    "npy": _BuiltIn(
        (".npy",),
        "arrays.source.NpyFolder",
        "arrays.writer.NpyWriter",
        "numpy's arrays and a table of targets",
    ),
    "tfrecord": _BuiltIn(
        (".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz"),
        "tfrecord.source.TfRecordFolder",
        "tfrecord.source.TfRecordWriter",
        "MLPerf's CosmoFlow",
        ("none", "gzip"),
    ),
    "zarr": _BuiltIn(
        (".zarr",),
        "arrays.source.ZarrFolder",
        "arrays.writer.ZarrWriter",
        "Zarr v3 groups with the keys of HDF5",
        ("none", "gzip", "zstd"),
    ),
    "nifti": _BuiltIn(
        (".nii", ".nii.gz"),
        "nifti.source.NiftiFolder",
        "nifti.source.NiftiWriter",
        "scans with labels: dataset.json, CSV, or named as LiTS or MSD",
        ("none", "gzip"),
    ),
    "sc18": _BuiltIn(
        (),
        "tfrecord.source.Sc18Folder",
        "tfrecord.source.Sc18Writer",
        "TFRecords of Mathuriya et al. 2018, many samples a file",
    ),
}
"""The formats that come along, by name; their classes are imported when needed."""

_FORMATS: dict[str, Format] = {}
"""The formats that have been registered besides, by name, in that order."""


@functools.cache
def _built_in(name: str) -> Format:
    def made(path: str) -> type:
        module, _, last = path.rpartition(".")
        found: type = getattr(importlib.import_module(f"{__package__}.{module}"), last)
        return found

    known = _BUILT_IN[name]
    return Format(name, known.suffixes, made(known.source), made(known.writer)(), known.help)


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
    from hyperslab.formats.source import Source
    from hyperslab.formats.writer import Writer

    if not (isinstance(source, type) and issubclass(source, Source)):
        raise TypeError(f"{source=}: give a class that is derived from hyperslab.formats.Source")
    if writer is not None and not isinstance(writer, Writer):
        raise TypeError(f"{writer=}: give an instance of a hyperslab.formats.Writer, or none")
    if isinstance(suffixes, str):
        raise TypeError(f'{suffixes=}: give a list, ["{suffixes}"]')
    if name in names():
        raise ValueError(f"format {name!r} is registered already, by {named(name).source}")
    for other, known in suffixes_of_formats():
        for suffix in suffixes:
            if suffix.endswith(known) or known.endswith(suffix):
                raise ValueError(f"files *{suffix} are those of the format {other!r}")
    _FORMATS[name] = Format(name, tuple(suffixes), source, writer, help)
    return _FORMATS[name]


def adopt(format: Format) -> None:
    """Makes a format of the process that has started this one known here, if it is not."""
    if format.name not in _BUILT_IN:
        _FORMATS.setdefault(format.name, format)


def formats() -> tuple[Format, ...]:
    """Lists all formats that are registered."""
    return tuple(map(named, names()))


def _known() -> dict[str, Format | _BuiltIn]:
    return {**_BUILT_IN, **_FORMATS}


def names() -> tuple[str, ...]:
    """Names all formats that are registered."""
    return tuple(_known())


def suffixes_of_formats() -> list[tuple[str, str]]:
    """Lists the suffixes of all formats, each after the format's name."""
    return [(name, suffix) for name, one in _known().items() for suffix in one.suffixes]


def compressions() -> list[str]:
    """Lists the compressions that any writer has."""
    return list(dict.fromkeys(word for one in _known().values() for word in one.compressions))


def check_written(format: str, compression: str) -> None:
    """Refuses a format that is not written or lacks the compression; names those there are."""
    has = {name: one.compressions for name, one in _known().items() if one.compressions}
    if format not in has:
        raise DataError(f"format {format!r}: choose from {', '.join(has)}")
    if compression not in has[format]:
        known = ", ".join(has[format])
        raise DataError(f"compression of {format}: {known}, not {compression}")


def choices(names: Sequence[str]) -> str:
    """Joins names for a sentence.

    >>> choices(["hdf5", "npy", "zarr"])
    'hdf5, npy or zarr'
    """
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def named(format: str) -> Format:
    """Returns the format of this name; an error names those that there are."""
    if format not in names():
        raise DataError(f"{format=}: choose from {', '.join(names())}")
    return _built_in(format) if format in _BUILT_IN else _FORMATS[format]


def sources_of(
    paths: Iterable[str | os.PathLike[str]],
    grid: Grid,
    options: ScanOptions,
    driver: Driver | None = None,
) -> Source:
    """Opens folders as sources of their formats, several as one, see `Joined`; all ranks call this.

    The main rank scans them, so that a folder that changes meanwhile is the same for all. Without
    a format in the ``options`` the files nearest to the top of the folder decide. ``"hdf5"`` takes
    the spatial dims as they are stored, ``"lbann"`` takes them as reversed. With ``driver="mpio"``
    the ranks of a replica read together.

    Raises:
        DataError: no folder is given, or one is missing or holds no known file, or files of two
            formats side by side; or as the format's own source.
    """
    parts = {Path(path): _opened(Path(path), grid, options, driver) for path in paths}
    if len(parts) == 1:
        return next(iter(parts.values()))
    from hyperslab.formats.views import joined

    return joined(parts)


def _opened(folder: Path, grid: Grid, options: ScanOptions, driver: Driver | None) -> Source:
    from hyperslab.comm import log_once
    from hyperslab.comm.agreement import broadcast_from_main

    if driver is not None and driver not in get_args(Driver):
        raise DataError(f"{driver=}: choose from {', '.join(get_args(Driver))}")
    if options.format is not None:
        named(options.format)
    source, others = broadcast_from_main(lambda: scanned(folder, options))
    for words in filter(None, (others, source.remark)):
        log_once(grid, words)
    if driver is not None:
        volumes = source.volumes
        source = source.read_together(driver, grid)
        source.volumes = volumes
    return source


def sources_here(paths: Iterable[Path], options: ScanOptions) -> Source:
    """Opens folders as `sources_of` does, without torch, as this process alone sees them."""
    from hyperslab.formats.views import joined

    parts = {}
    for path in paths:
        parts[path], others = scanned(path, options)
        for words in filter(None, (others, parts[path].remark)):
            log.info("%s", words)
    return joined(parts)


def scanned(folder: Path, options: ScanOptions) -> tuple[Source, str]:
    """Opens the folder as this process sees it, with a word on files that are left out.

    A sample is known by its name, so two of one name are refused.
    """
    others = ""
    if options.mapping is not None:
        from hyperslab.formats.arrays.source import MappedFolder

        kind: type[Source] = MappedFolder
    elif options.format is not None:
        kind = named(options.format).source
    else:
        found, others = find_format(folder)
        kind = found.source
    source = kind.open_folder(folder, options)
    for name, count in Counter(source.names).most_common(1):
        if count > 1:
            places = [place for place, other in enumerate(source.names) if other == name]
            files = " and ".join(printable(source.where(place)) for place in places[:2])
            raise DataError(
                f"{folder}: {files} are samples of one name, {printable(name)!r}\n    keep one of "
                "them, or rename it"
            )
    if os.path.lexists(folder / MANIFEST_FILE):
        source.volumes = {**source.volumes, **volumes_of(folder)}
    return source, others


def find_format(folder: Path) -> tuple[Format, str]:
    """Finds the format, with a word on files of others that lie deeper and are left out.

    A file may be a list of samples, whose suffix decides. Errors are those of `sources_of`.
    """
    if folder.is_file():
        lister = next((one for one in formats() if folder.name.endswith(one.source.lists)), None)
        if lister is not None:
            return lister, ""
    inside = walk_folder(folder)
    known = suffixes_of_formats()
    kinds = {name: kind for kind, end in reversed(known) for name in inside if name.endswith(end)}
    found = Counter((name.count("/"), kind) for name, kind in kinds.items())
    # What is claimed are arrays in files of a suffix that is known, which may lie behind links.
    arrays = any(kind != "nifti" for _, kind in found)
    if arrays or folder.is_file() or any((folder / name).is_symlink() for name in inside):
        from hyperslab.formats.arrays.source import MappedFolder

        if MappedFolder.claims(folder):
            return Format(MAPPED, (), MappedFolder), ""
    check_folder(folder)
    if not found:
        suffixes = ", ".join(f"*{suffix}" for _, suffix in known)
        raise DataError(
            f"{folder}: no file {suffixes} in it or below\n"
            f"    .npz files are read by a recipe with data.keys ({OWN_DATA}, keys); for others "
            f"see {OWN_DATA}, a Source"
        )
    top = min(depth for depth, _ in found)
    first = sorted(kind for depth, kind in found if depth == top)
    if len(first) > 1:
        words = ", ".join(f"{found[top, kind]} of {kind}" for kind in first)
        raise DataError(
            f"{folder}: holds files of several formats ({words}); choose one, such as "
            f'format="{first[0]}"'
        )
    others = sorted({kind for _, kind in found} - {first[0]})
    words = f"{folder}: read as {first[0]}; files of {', '.join(others)} are left out"
    return named(first[0]), words if others else ""


def check_source(path: Path, format: str | None) -> None:
    """Refuses a folder that is not there, or has no files that are data, as far as names tell."""
    if format is None:
        find_format(path)
    elif format not in (*names(), MAPPED):
        named(format)
    elif not path.exists():
        check_folder(path)
