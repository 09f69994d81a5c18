"""Scans folders of arrays: lists their files, looks at every header, and finds the targets.

`scan_npy` takes numpy's files with a table of targets beside them; `scan_arrays` follows a
`DataMap`, where the shapes tell which dims of stored arrays count samples, channels and voxels.
Labels are arrays of classes in the same files as the volumes, under a key of their own.

A table of targets is text with or without a header, or a .npy array. A sample's row is found by
its name, or by the numbers in it. Targets are scaled from -1 to 1 by the ranges that are given,
those of a published data set, or those of all rows. Beside .npy files without a `DataMap` there are
``targets.csv``, or a ``{name}.target.npy`` for each, which are taken as they are.
"""

from __future__ import annotations

import csv
import fnmatch
import re
import reprlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import DataError, printable
from hyperslab.formats.arrays.layouts import Published, recognise_published
from hyperslab.formats.arrays.open import (
    ARRAY_SUFFIXES,
    Catalog,
    StoredArray,
    find_array,
    kind_of_file,
    read_numbers,
    read_vector,
    scan_headers,
    stamps_of,
)
from hyperslab.formats.files import (
    ANY,
    FIELDS_AS_TARGETS,
    OF_LIBRARIES,
    OWN_DATA,
    DataMap,
    FileAccess,
    Refuse,
    Stamp,
    check_names,
    list_files,
    naming,
    sift,
    table_file,
    walk_folder,
)
from hyperslab.formats.source import Array, ScanOptions
from hyperslab.formats.storage_order import (
    CDHW,
    DHW,
    DHWC,
    DTYPES,
    Channels,
    StorageOrder,
    channel_order,
)
from hyperslab.formats.targets import Floats, Parameters, as_numbers, numbered_names
from hyperslab.util.documents import lines_of, open_plain, read_bytes

AS_VOLUME = "\n    store images as volumes of depth 1: (C, 1, H, W), and their labels as (1, H, W)"


def scan_npy(folder: Path, suffixes: Sequence[str], options: ScanOptions) -> Catalog:
    """Lists a folder of .npy files, ``{name}.npy`` a sample, and reads their targets.

    Volumes are (C, D, H, W), (D, H, W, C) or, of one channel, (D, H, W).

    Raises:
        DataError: the folder is missing or holds no volume; a file is damaged, or not stored like
            the first; or a target is missing or there are two.
    """
    reach = FileAccess(folder, options.allowed)
    files = [file for file in list_files(folder, suffixes) if not file.endswith(TARGET_SUFFIX)]
    if not files:
        raise DataError(f"{folder}: holds targets *{TARGET_SUFFIX} but no volume")

    def read(path: str) -> StoredArray:
        with naming(path, "npy"):
            array = find_array(Path(path), "", reach)
        dtype = np.dtype(array.dtype)
        if len(array.shape) not in (3, 4) or 0 in array.shape or dtype.name not in DTYPES:
            raise DataError(
                f"{path}: is {dtype} {array.shape}; needs three spatial dims, with or without "
                f"channels, of {', '.join(DTYPES)}\n    many volumes in one array, and other "
                f"types, go with data.table ({OWN_DATA}, arrays)"
            )
        return array

    def alike(first: tuple[str, StoredArray], entry: tuple[str, StoredArray]) -> None:
        _check_alike(folder, (first[0], entry[0]), (first[1], entry[1]))

    headers = (reach, StoredArray, ())
    found, stamps = scan_headers(folder, files, (), read, options.refuse, alike, headers)
    first, one = found[0]
    order = order_of_volume(folder / first, one.shape, options.channels)
    volumes = dict(found)
    bare = tuple(file.removesuffix(".npy") for file in volumes)
    names, targets, parameters = npy_targets(folder, bare, options.refuse)
    kept = tuple(f"{name}.npy" for name in names)
    table = folder / TARGETS_FILE
    return Catalog(
        folder=folder,
        files=kept,
        volumes=tuple(volumes[file] for file in kept),
        names=names,
        stamps=stamps,
        order=order,
        targets=targets,
        parameters=Parameters.normalised(parameters),
        table=table if table.exists() else None,
    )


def order_of_volume(path: Path, shape: tuple[int, ...], channels: Channels | None) -> StorageOrder:
    """Orders the dims of one volume, which may have channels, by its shape or as it is said."""
    if len(shape) == 3:
        return DHW
    return DHWC if (channels or channel_order(path, shape)) == "last" else CDHW


def order_of_arrays(
    folder: Path,
    found: Sequence[tuple[str, _MappedHeader]],
    table: TargetTable | None,
    channels: Channels | None,
    sure: bool,
    *,
    known_rows: bool,
) -> tuple[bool, StorageOrder]:
    """Decides if the first dim counts samples, ``sure`` if it does, and what the others are.

    With ``known_rows`` no table has to say so; else it has to have as many rows.
    """
    path = folder / found[0][0]
    first = found[0][1].array
    shape = first.shape
    if len(shape) not in (3, 4, 5) or 0 in shape:
        raise DataError(
            f"{path}: the array is {first.dtype} {shape}; needs (D, H, W), (C, D, H, W), "
            f"(N, D, H, W) or (N, C, D, H, W) ({OWN_DATA}, arrays)" + AS_VOLUME * (len(shape) == 2)
        )
    if table is not None:
        rows = len(table.values)
        counted = not table.names or _numbers_of_rows(table) is not None
    else:
        beside = [header.targets[0] for _, header in found if header.numbers]
        rows = sum(len(numbers) for numbers in beside if numbers.ndim)
        counted = bool(beside) and beside[0].ndim > 0
    # As many rows as there are along the first dim: it counts samples.
    stack = counted and rows == sum(header.array.shape[0] for _, header in found) != len(found)
    # Unless the user says where its channels are: there may be as many targets, or classes.
    may = len(shape) == 4 and channels is None
    many = len(shape) == 5 or (may and (sure or (stack and not known_rows)))
    alone = len(found) == 1 and not known_rows
    if len(shape) == 4 and not many and alone and (rows != 1 or channels is None):
        raise DataError(
            f"{path}: is {first.dtype} {shape}, but {table.path if table else 'targets'} "
            f"{'has' if table else 'have'} {rows} rows: an array of many volumes needs one for "
            f"each ({OWN_DATA}, arrays)"
        )
    return many, order_of_volume(path, shape[1:] if many else shape, channels)


def check_labels(
    folder: Path,
    files: Sequence[str],
    labels: Sequence[StoredArray],
    extents: tuple[int, ...],
    rows: Sequence[int | None],
) -> None:
    """Compares labels with the extents (D, H, W) of volumes; ``rows``: of each file's array."""
    for file, array, count in zip(files, labels, rows, strict=True):
        wanted = extents if count is None else (count, *extents)
        shape = array.shape
        if count is None and len(shape) == 4 and shape[0] == 1:
            shape = shape[1:]  # one channel of labels
        if shape != wanted or np.dtype(array.dtype).kind not in "iub":
            raise DataError(
                f"{folder / file}: the labels {array.key!r} are {array.dtype} {array.shape}; needs "
                f"whole numbers {wanted}, one for each voxel of the volume ({OWN_DATA}, keys)"
                + AS_VOLUME * (len(shape) == 2)
                + f"\n    {FIELDS_AS_TARGETS}"
            )


SHOWN_AS = {
    "int8": "int16",
    "uint8": "int16",
    "int16": "int16",
    "uint16": "uint16",
} | dict.fromkeys(("int32", "uint32", "int64", "float16", "float32", "float64"), "float32")
"""Types of stored values, and as what they are kept."""


def scan_arrays(
    path: Path, options: ScanOptions, channels: Collection[int] | None = None
) -> Catalog:
    """Looks at every file. With ``channels``, of a network, there are no targets to look for.

    Of arrays of four dims, one of which is as many as ``channels`` has, that one is of channels.

    Raises:
        DataError: a file, a key or the table is not what it should be, or they do not go together.
    """
    said = options.mapping or DataMap()
    known = recognise_published(path)
    folder = path.parent if is_one_file(path) else path
    bare = channels is not None or bool(said.labels)
    table_path = None
    if said.table is not None and not bare:
        table_path = table_file(folder, said.table)
    elif known is not None and not (bare or said.targets):
        table_path = known.table
    found, stamps = _headers_of_map(folder, files_of_volumes(path, said, table_path), said, options)
    files = [file for file, _ in found]
    arrays = [header.array for _, header in found]
    labels = [header.labels for _, header in found if header.labels is not None]
    table = None if table_path is None else read_target_table(table_path)
    beside = [header.targets for _, header in found]
    sure = known is not None and known.stacked
    if labels:
        shape = arrays[0].shape
        rows = len(shape) == 5 or labels[0].shape[:1] == shape[:1] != (1,)
        sure = rows and len(labels[0].shape) == 4
    if channels is not None and len(arrays[0].shape) == 4:
        sure = not {arrays[0].shape[0], arrays[0].shape[-1]}.intersection(channels)
    stacked, order = order_of_arrays(folder, found, table, options.channels, sure, known_rows=bare)
    _check_alike(folder, files, arrays, stacked)
    if np.dtype(arrays[0].dtype).name not in SHOWN_AS:
        raise DataError(
            f"{folder / files[0]}: is {np.dtype(arrays[0].dtype)}; volumes are of one of "
            f"{', '.join(SHOWN_AS)} ({OWN_DATA}, arrays)"
        )
    places = [
        (number, row)
        for number, array in enumerate(arrays)
        for row in (range(array.shape[0]) if stacked else (None,))
    ]
    names = _names(files, places, arrays)
    if labels:
        counts = [array.shape[0] if stacked else None for array in arrays]
        extents = order.volume_shape(arrays[0].shape[int(stacked) :])[1:]
        check_labels(folder, files, labels, extents, counts)
    words = f"classes {', '.join(map(printable, said.classes))}"
    targets, parameters = np.zeros((len(names), 0)), Parameters.normalised(())
    if not bare:
        found_targets = map_targets(folder, names, places, table, beside, said, known)
        targets, parameters, words = found_targets
    return Catalog(
        folder=folder,
        files=tuple(files[number] for number, _ in places),
        volumes=tuple(arrays[number] for number, _ in places),
        stamps=stamps,
        names=names,
        order=order,
        targets=targets,
        parameters=parameters,
        table=table_path,
        allowed=options.allowed,
        remark=f"{path}: {'' if known is None else known.name + ', '}{len(names)} samples, {words}",
        rows=tuple(row for _, row in places if row is not None),
        labels=tuple(labels[number] for number, _ in places) if labels else (),
        classes=said.classes,
    )


@dataclass(frozen=True, slots=True)
class _MappedHeader:
    """The arrays that a `DataMap` finds in a file; the numbers are targets, as nested lists."""

    array: StoredArray
    numbers: list[Any]
    labels: StoredArray | None

    @property
    def targets(self) -> list[Array]:
        return [np.asarray(numbers, np.float64) for numbers in self.numbers]


def _headers_of_map(
    folder: Path, files: Sequence[str], said: DataMap, options: ScanOptions
) -> tuple[list[tuple[str, _MappedHeader]], dict[str, Stamp]]:
    """Looks at the files that are as they should be; and stamps them."""
    reach = FileAccess(folder, options.allowed)

    def read(name: str) -> _MappedHeader:
        file = Path(name)
        kind = kind_of_file(file)
        with naming(file, kind, ANY if kind == "npz" else OF_LIBRARIES):
            return _MappedHeader(
                find_array(file, said.volume, reach),
                [array.tolist() for array in read_numbers(file, said.targets, reach)],
                find_array(file, said.labels, reach) if said.labels else None,
            )

    keys = [key for key in (said.volume, said.labels) if key]
    kept = (reach, _MappedHeader, (said.volume, said.labels, said.targets))
    found, stamps = scan_headers(folder, files, keys, read, options.refuse, kept=kept)
    if not said.volume:  # a Zarr group has said only now which array it is
        for file, header in found:
            stamps.update(stamps_of(folder, file, [header.array.key]))
    return found, stamps


def is_one_file(path: Path) -> bool:
    """Tells if a path is a file or a Zarr group, not a folder of them."""
    return path.is_file() or (path.suffix == ".zarr" and path.is_dir())


def files_of_volumes(path: Path, said: DataMap, table: Path | None = None) -> list[str]:
    """Names the files with volumes of a folder, in their natural order; or the one file.

    ``table`` is left out. Of fields of several kinds one has to be chosen.
    """
    if is_one_file(path) and not said.files and path.name.endswith(ARRAY_SUFFIXES):
        return [path.name]
    known = recognise_published(path)
    folder = path.parent if is_one_file(path) else path
    pattern = said.files or (path.name if is_one_file(path) else known.pattern if known else "")
    files = _files(folder, pattern, table)
    kinds = sorted({file.rpartition("/")[2] for file in files})
    if known is not None and not said.files and len(kinds) > 1:
        shown = ", ".join(map(printable, kinds[:20])) + (", ..." if len(kinds) > 20 else "")
        deep = "*/" if "/" in files[0] else ""
        raise DataError(
            f"{folder}: {known.name} with {len(kinds)} kinds of files: {shown}\n    choose one: "
            f'data.files="{deep}{kinds[0]}"'
        )
    return files


def files_matching(folder: Path, pattern: str) -> list[str]:
    """Names the files of arrays in a folder and below that a pattern takes; without one, all."""
    return [
        name
        for name in walk_folder(folder)
        if name.endswith(ARRAY_SUFFIXES) and (not pattern or fnmatch.fnmatchcase(name, pattern))
    ]


def _files(folder: Path, pattern: str, table: Path | None) -> list[str]:
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist; give the folder or the file that holds the data")
    files = [
        name for name in files_matching(folder, pattern) if table is None or folder / name != table
    ]
    if not files:
        wanted = pattern or "file " + ", ".join(f"*{suffix}" for suffix in ARRAY_SUFFIXES)
        raise DataError(
            f"{folder}: holds no {wanted}\n"
            "    data.files is a pattern of the files with volumes, relative to the folder "
            f"({OWN_DATA})"
        )
    check_names(folder, files)
    return sorted(files, key=_natural)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sorts numbers by value: realisation 2 comes before 10.

    >>> sorted(["10/a", "2/a", "b"], key=_natural)
    ['2/a', '10/a', 'b']
    """
    parts = re.split(r"(\d+)", name)
    return [(0, int(p[:18]), p) if i % 2 else (1, 0, p) for i, p in enumerate(parts) if p or i == 0]


def _check_alike(
    folder: Path, files: Sequence[str], arrays: Sequence[StoredArray], stacked: bool = False
) -> None:
    first = arrays[0]
    shape = first.shape[int(stacked) :]
    for file, array in zip(files, arrays, strict=True):
        if (array.shape[int(stacked) :], array.dtype) != (shape, first.dtype):
            raise DataError(
                f"{folder / file}: is {np.dtype(array.dtype)} {array.shape} but {files[0]} is "
                f"{np.dtype(first.dtype)} {first.shape}; all files of a data set are stored alike"
                f"\n    choose some of them by data.files ({OWN_DATA})"
            )


def _names(
    files: Sequence[str],
    places: Sequence[tuple[int, int | None]],
    arrays: Sequence[StoredArray],
) -> tuple[str, ...]:
    bare = [file.removesuffix(Path(file).suffix) for file in files]
    digits = len(str(max(array.shape[0] for array in arrays) - 1))
    prefixes = [f"{name}/" if len(files) > 1 else "" for name in bare]
    return tuple(
        bare[file] if row is None else f"{prefixes[file]}{row:0{digits}}" for file, row in places
    )


MOST_ROW = 1 << 20
"""The longest line of ``targets.csv`` [B]."""

MOST_TABLE = 64 << 20
"""The largest table that is read [B]."""

TARGET_SUFFIX = ".target.npy"
TARGETS_FILE = "targets.csv"

ROW_TITLES = (
    *("name", "file", "filename", "sample", "simulation", "sim", "realisation", "realization"),
    *("id", "index", ""),  # without a title: pandas writes an index so
)
"""Titles of a first column that names samples."""


@dataclass(frozen=True, slots=True)
class TargetTable:
    """Holds values (N, P); ``columns``: their names, where it says them; ``names``: of the rows."""

    path: Path
    values: Floats
    columns: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


def read_target_table(path: Path) -> TargetTable:
    """Reads a table whole.

    Text has a row of numbers a line, separated by commas, tabs, semicolons or blanks; lines that
    begin with # say nothing, but the last before the numbers may name the columns, and so may a
    first line without #. A first column names the samples if it holds words, or if its title says
    so.

    Raises:
        DataError: it cannot be read, is too large, ragged, or holds what is no finite number.
    """
    with naming(path, "a table"):
        if path.suffix == ".npy":
            values = read_vector(path, MOST_TABLE)
            if values.ndim == 1:
                values = values[:, None]
            if values.ndim != 2 or values.size == 0 or values.dtype.kind not in "fiu":
                raise DataError(
                    f"{path}: is {values.dtype} {values.shape}; a table is (N, P) numbers "
                    f"({OWN_DATA}, tables)"
                )
            _check_finite(path, values.astype(np.float64), range(1, len(values) + 1), "row")
            return TargetTable(path, values.astype(np.float64))
        return _of_text(path, read_bytes(path, MOST_TABLE).decode("utf-8-sig"))


def _of_text(path: Path, text: str) -> TargetTable:
    header, comment, rows, lines = _rows_of(text)
    if not rows:
        raise DataError(f"{path}: has no row of numbers ({OWN_DATA})")
    for number, row in zip(lines, rows, strict=True):
        if len(row) != len(rows[0]):
            raise DataError(
                f"{path}: line {number} has {len(row)} fields but line {lines[0]} has "
                f"{len(rows[0])}: {reprlib.repr(row)}"
            )
    begin = [row[0] for row in rows]
    titled = len(header) == len(rows[0]) and header[0].lower() in ROW_TITLES
    # A header with a title too few has none for the names of rows: so R and pandas write them.
    untitled = 0 < len(header) == len(rows[0]) - 1 and all(map(_DIGITS.fullmatch, begin))
    named = titled or untitled or not all(map(_number, begin))
    names = tuple(row[0] for row in rows) if named else ()
    first = int(named)
    if len(rows[0]) == first:
        raise DataError(f"{path}: names samples but has no column of numbers")
    if "" in names:
        raise DataError(f"{path}: line {lines[names.index('')]} has an empty first field")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path}: has two rows for {printable(twice)!r}")
    values = np.array([_numbers(path, n, row[first:]) for n, row in zip(lines, rows, strict=True)])
    _check_finite(path, values, lines, "line")
    columns = tuple(map(printable, header))
    columns = columns[first:] if len(columns) == len(rows[0]) else columns
    fits = len(columns) == values.shape[1] and len({*columns, ""}) == len(columns) + 1
    if header and not comment and not fits:
        raise DataError(
            f"{path}: its first line names the columns {reprlib.repr(header)}, but a row is "
            f"{reprlib.repr(rows[0])}; each needs a name of its own\n    correct the line, or put "
            "# before it and name them: data.columns"
        )
    return TargetTable(path, values, columns if fits else (), names)


def _rows_of(text: str) -> tuple[list[str], bool, list[list[str]], list[int]]:
    """Splits text into the fields of a header, if there is one, and of rows with line numbers.

    Says also whether the header is a comment, which need not be about columns.
    """
    header: list[str] = []
    rows: list[list[str]] = []
    lines: list[int] = []
    for number, line in enumerate(text.splitlines(), 1):
        plain = line.strip()
        if plain.startswith("#"):
            header = header if rows else _fields(plain.lstrip("# "))
        elif plain:
            rows.append(_fields(plain))
            lines.append(number)
    comment = not rows or any(map(_number, rows[0]))
    if not comment:
        header = rows.pop(0)
        lines.pop(0)
    return header, comment, rows, lines


_COMMA_IN_NUMBER = re.compile(r"\d,\d")


def _fields(line: str) -> list[str]:
    separators = ";\t," if _COMMA_IN_NUMBER.search(line) else ",;\t"  # as in 0,3;0,8
    separator = next((s for s in separators if s in line), None)
    if separator is None:
        return line.split()
    return [field.strip() for field in next(csv.reader([line], delimiter=separator))]


MOST_DIGITS = 100  # of a number
_NUMBER = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|nan|inf(inity)?)", re.IGNORECASE)


def _number(field: str) -> bool:
    return len(field) < MOST_DIGITS and _NUMBER.fullmatch(field) is not None


def _numbers(path: Path, line: int, fields: Sequence[str]) -> list[float]:
    for field in fields:
        if not _number(field):
            raise DataError(f"{path}: line {line}: {reprlib.repr(field)} is not a number")
    return [float(field) for field in fields]


def _check_finite(path: Path, values: Floats, numbers: Sequence[int], word: str) -> None:
    bad = np.flatnonzero(~np.isfinite(values).all(1))
    if bad.size:
        row = int(bad[0])
        raise DataError(
            f"{path}: {word} {numbers[row]} holds {values[row].tolist()}; needs finite numbers"
        )


_DIGITS = re.compile(r"(\d+)")


def rows_of_samples(table: TargetTable, names: Sequence[str]) -> list[int]:
    """Finds the row of each sample, one a file, by its name.

    A table that names its rows is asked for the sample's path, with or without suffix, or for the
    end of it, as far as it says one. Otherwise the names must be alike but for one number, that of
    the realisation's folder, say. The row has this number for its name or, without names, is this
    one, counted from 0.
    """
    numbered = _numbers_of_rows(table)
    ends = {name.rpartition("/")[2] for name in names}
    if table.names and (numbered is None or ends <= set(table.names)):
        return _rows_by_name(table, names)
    if numbered is None and len(names) == len(table.values) == 1:
        return [0]
    found = _numbers_in_name(table, names)
    rows = numbered or {row: row for row in range(len(table.values))}
    for name, number in zip(names, found, strict=True):
        if number not in rows:
            raise DataError(
                f"{table.path}: has rows {min(rows)} to {max(rows)}, but sample "
                f"{printable(name)!r} would have row {number}\n    without names rows are counted "
                "from 0; give the table of these files, or a first column that names them "
                f"({OWN_DATA})"
            )
    return [rows[number] for number in found]


def rows_of_stack(table: TargetTable, count: int) -> list[int]:
    """Finds the row of each volume of arrays of many: by its number, or in their order.

    Rows whose names are numbers, counted from 0 or 1, may come in any order.
    """
    numbered = _numbers_of_rows(table)
    if numbered is None:
        return list(range(count))
    first = min(numbered)
    if first > 1 or max(numbered) - first != count - 1:
        raise DataError(
            f"{table.path}: names its rows {first} to {max(numbered)}, but volumes of one array "
            f"are counted from 0 to {count - 1}\n    number the rows so, or remove their names "
            f"({OWN_DATA}, tables)"
        )
    return [numbered[first + number] for number in range(count)]


def _numbers_of_rows(table: TargetTable) -> dict[int, int] | None:
    """Maps the number that is a row's name to the row; None where names are words, or missing."""
    numbers = [_whole_number(name) for name in table.names]
    if not numbers or None in numbers:
        return None
    found = {number: row for row, number in enumerate(numbers) if number is not None}
    if len(found) < len(numbers):
        raise DataError(f"{table.path}: has two rows of one number")
    return found


def _whole_number(name: str) -> int | None:
    """Reads 2, and 2.000000000000000000e+00, which `numpy.savetxt` writes for it."""
    if len(name) < MOST_DIGITS and _DIGITS.fullmatch(name):
        return int(name)
    whole = _number(name) and float(name).is_integer() and float(name) >= 0
    return int(float(name)) if whole else None


def _rows_by_name(table: TargetTable, names: Sequence[str]) -> list[int]:
    known = {_bare(name): row for row, name in enumerate(table.names)}
    if len(known) < len(table.names):
        raise DataError(f"{table.path}: has two rows for one sample, with a suffix and without")
    ends: dict[str, list[int]] = {}
    for name, row in known.items():
        ends.setdefault(name.rpartition("/")[2], []).append(row)
    found = []
    for name in names:
        same = [known[name]] if name in known else ends.get(name.rpartition("/")[2], [])
        paths = [f"/{_bare(table.names[row])}" for row in same]  # seen from another folder, or here
        same = [
            row
            for row, path in zip(same, paths, strict=True)
            if f"/{name}".endswith(path) or path.endswith(f"/{name}")
        ]
        if len(same) != 1:
            raise DataError(
                f"{table.path}: has no row for sample {printable(name)!r}; its {len(table.names)} "
                f"rows begin with {printable(table.names[0])!r}\n    name rows by paths relative "
                f"to data.path ({OWN_DATA})"
            )
        found.append(same[0])
    if len(set(found)) != len(found):
        raise DataError(f"{table.path}: two samples would have the same row; name rows by paths")
    return found


def _bare(name: str) -> str:
    for suffix in ARRAY_SUFFIXES:
        name = name.removesuffix(suffix)
    return name.removeprefix("./")


def _numbers_in_name(table: TargetTable, names: Sequence[str]) -> list[int]:
    split = [_DIGITS.split(name) for name in names]
    words = {tuple(parts[::2]) for parts in split}
    numbers = [parts[1::2] for parts in split]
    varying = [i for i in range(len(numbers[0])) if len({n[i] for n in numbers}) > 1]
    if len(names) == 1 and len(numbers[0]) == 1:
        varying = [0]
    if len(words) > 1 or len(varying) != 1:
        raise DataError(
            f"{table.path}: it is not clear which of its {len(table.values)} rows belong to "
            f"{printable(names[0])!r} and {printable(names[-1])!r}: the names of "
            "files should differ in one number alone\n    choose files by data.files, or name the "
            f"rows in a first column ({OWN_DATA})"
        )
    found = [int(parts[varying[0]][:MOST_DIGITS]) for parts in numbers]
    if len(set(found)) != len(found):
        raise DataError(
            f"{table.path}: two samples have the same number, so they would have the same row"
        )
    return found


def map_targets(
    folder: Path,
    names: Sequence[str],
    places: Sequence[tuple[int, int | None]],
    table: TargetTable | None,
    beside: Sequence[Sequence[Array]],
    said: DataMap,
    known: Published | None,
) -> tuple[Floats, Parameters, str]:
    """Collects the targets (N, P) and scales them to -1 to 1, with the way back and words on it."""
    stacked = places[0][1] is not None
    if table is not None:
        if stacked and len(table.values) != len(names):
            raise DataError(
                f"{table.path}: has {len(table.values)} rows but {folder} holds {len(names)} "
                f"volumes; a row is needed for each ({OWN_DATA}, tables)"
            )
        rows = rows_of_stack(table, len(names)) if stacked else rows_of_samples(table, names)
        physical = table.values[rows]
        columns = table.columns
        if known is not None and len(known.priors) == physical.shape[1]:
            columns = columns or tuple(known.priors)
        if known is not None and known.parameters is not None:
            physical = physical[:, : known.parameters]
            columns = columns[: known.parameters]
    elif said.targets:
        physical = np.array(
            [
                np.concatenate([np.ravel(n if row is None else n[row]) for n in beside[file]])
                for file, row in places
            ]
        )
        columns = _titles(said.targets, beside[0], stacked)
    else:
        raise DataError(
            f"{folder}: {printable(names[0])!r} has no targets\n    say where they are: "
            "data.table=params.txt, or data.keys.targets=[Header@Omega0] in the files themselves "
            f"({OWN_DATA}, tables, keys)"
        )
    columns = said.columns or columns or numbered_names(physical.shape[1])
    if len(columns) != physical.shape[1] or len(set(columns)) != len(columns):
        raise DataError(
            f"data.columns names {len(columns)} targets ({', '.join(columns)}) but there are "
            f"{physical.shape[1]} columns; give as many different names"
        )
    if unknown := sorted(set(said.ranges) - set(columns)):
        raise DataError(
            f"data.ranges has {', '.join(unknown)}, but the targets are {', '.join(columns)}"
        )
    ranges = dict(zip(columns, zip(physical.min(0), physical.max(0), strict=True), strict=True))
    for name, (least, most) in ranges.items():
        prior = said.ranges.get(name) or (known.priors.get(name) if known else None)
        if prior and (name in said.ranges or (prior[0] <= least and most <= prior[1])):
            ranges[name] = prior
    parameters = Parameters.of_ranges(ranges)
    scale = np.array(parameters.scale)
    unit = (physical - parameters.centre) / np.where(scale == 0, 1, scale)
    words = ", ".join(f"{n} {lo:.4g}..{hi:.4g}" for n, (lo, hi) in parameters.ranges.items())
    origin = "their files" if table is None else table.path.name
    return unit, parameters, f"targets of {origin}; -1 and 1 are {words}"


def _titles(words: Sequence[str], first: Sequence[Array], stacked: bool) -> tuple[str, ...]:
    """Names targets after their paths: ``Header@Omega0`` is Omega0, a vector has as many."""
    found: list[str] = []
    for word, values in zip(words, first, strict=True):
        name = printable(word.rpartition("@")[2].rpartition("/")[2])
        size = values[0].size if stacked else values.size
        found += [name] if size == 1 else [f"{name}_{i}" for i in range(size)]
    return tuple(found)


def npy_targets(
    folder: Path, names: tuple[str, ...], refuse: Refuse | None
) -> tuple[tuple[str, ...], Floats, tuple[str, ...]]:
    """Reads the targets beside .npy files: samples that have them, (N, P), and P names."""
    table = folder / TARGETS_FILE
    single = [folder / f"{name}{TARGET_SUFFIX}" for name in names]
    if table.exists() and any(path.exists() for path in single):
        raise DataError(
            f"{folder}: holds {TARGETS_FILE} and files *{TARGET_SUFFIX}; keep one of the two"
        )
    if table.exists():
        return names, *_read_targets_file(table, names)
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
        sizes.append(values.size)
        return as_numbers(values, f"{path}: the target")

    found = sift(names, vector, refuse)
    vectors = np.array([values for _, values in found])
    return tuple(name for name, _ in found), vectors, numbered_names(sizes[0])


def _read_targets_file(path: Path, names: Sequence[str]) -> tuple[Floats, tuple[str, ...]]:
    wanted = set(names)
    found: dict[str, Floats] = {}
    with naming(path, "CSV"), open_plain(path) as file:
        rows = csv.reader(line.decode("utf-8-sig") for line in lines_of(file, MOST_ROW))
        header = [printable(name.strip()) for name in next(filter(None, rows), [])]
        if len(header) < 2 or header[0] != "name" or len(set(header)) != len(header):
            raise DataError(
                f"{path}: starts with {reprlib.repr(header)}; "
                "needs name and different parameters' names"
            )
        for row in filter(None, rows):
            if len(row) != len(header) or row[0] in found:
                raise DataError(
                    f"{path}: {reprlib.repr(row)} is not one line for a sample, of {len(header)} "
                    "fields"
                )
            with naming(f"{path}: sample {row[0]!r}", "CSV"):
                values = np.array([float(value) for value in row[1:]])
            if row[0] in wanted:
                found[row[0]] = as_numbers(values, f"{path}: sample {row[0]!r}")
    missing = [name for name in names if name not in found]
    if missing:
        raise DataError(f"{path}: has no line for {len(missing)} samples, {missing[0]!r} first")
    return np.array([found[name] for name in names]), tuple(header[1:])
