"""Reads tables of targets, finds the row of each sample, and scales what a network is shown.

A table is text with or without a header, or a .npy array. A sample's row is found by its name,
or by the numbers in it. Targets are scaled from -1 to 1 by the ranges that are given, those of a
published data set, or those of all rows. Beside .npy files without a `DataMap` there are
``targets.csv``, or a ``{name}.target.npy`` for each, which are taken as they are.
"""

from __future__ import annotations

import csv
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperslab.errors import DataError, printable
from hyperslab.formats.arrays.layouts import Published
from hyperslab.formats.arrays.open import read_vector
from hyperslab.formats.files import OWN_DATA, DataMap, Refuse, naming, sift
from hyperslab.formats.source import Array
from hyperslab.formats.targets import Floats, Parameters, as_numbers, numbered_names
from hyperslab.util.documents import lines_of, open_plain, read_bytes

MOST_ROW = 1 << 20
"""The longest line of ``targets.csv`` [B]."""

MOST_TABLE = 64 << 20
"""The largest table that is read [B]."""

TARGET_SUFFIX = ".target.npy"
TARGETS_FILE = "targets.csv"

ROW_TITLES = ("name", "file", "filename", "sample", "simulation")
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
    first line without #. A first column of words names the samples.

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
    header, rows, lines = _rows_of(text)
    if not rows:
        raise DataError(f"{path}: has no row of numbers ({OWN_DATA})")
    for number, row in zip(lines, rows, strict=True):
        if len(row) != len(rows[0]):
            raise DataError(
                f"{path}: line {number} has {len(row)} fields but line {lines[0]} has "
                f"{len(rows[0])}: {reprlib.repr(row)}"
            )
    titled = bool(header) and header[0].lower() in ROW_TITLES
    named = titled or not all(_number(row[0]) for row in rows)
    names = tuple(row[0] for row in rows) if named else ()
    first = int(named)
    if len(rows[0]) == first:
        raise DataError(f"{path}: names samples but has no column of numbers")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path}: has two rows for {printable(twice)!r}")
    values = np.array([_numbers(path, n, row[first:]) for n, row in zip(lines, rows, strict=True)])
    _check_finite(path, values, lines, "line")
    columns = tuple(map(printable, header))
    columns = columns[first:] if len(columns) == len(rows[0]) else columns
    fits = len(columns) == values.shape[1] and len({*columns, ""}) == len(columns) + 1
    return TargetTable(path, values, columns if fits else (), names)


def _rows_of(text: str) -> tuple[list[str], list[list[str]], list[int]]:
    """Splits text into the fields of a header, if there is one, and of rows with line numbers."""
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
    if rows and not any(map(_number, rows[0])):
        header = rows.pop(0)
        lines.pop(0)
    return header, rows, lines


def _fields(line: str) -> list[str]:
    separator = next((s for s in ",;\t" if s in line), None)
    if separator is None:
        return line.split()
    return [field.strip() for field in next(csv.reader([line], delimiter=separator))]


_NUMBER = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|nan|inf(inity)?)", re.IGNORECASE)


def _number(field: str) -> bool:
    return len(field) < 100 and _NUMBER.fullmatch(field) is not None


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
    end of it, as far as it says one. Otherwise the names must be alike but for one number, which is
    the row, counted from 0: that of the realisation's folder, say.
    """
    if table.names:
        return _rows_by_name(table, names)
    if len(names) == len(table.values) == 1:
        return [0]
    numbers = _numbers_in_name(table, names)
    last = len(table.values) - 1
    for name, row in zip(names, numbers, strict=True):
        if row > last:
            raise DataError(
                f"{table.path}: has rows 0 to {last}, but sample {printable(name)!r} would have "
                f"row {row}\n    rows are counted from 0; give the table of these files, or a "
                f"first column that names them ({OWN_DATA})"
            )
    return numbers


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
    for suffix in (".npy", ".npz", ".hdf5", ".h5", ".zarr"):
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
    found = [int(parts[varying[0]][:18]) for parts in numbers]
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
        rows = list(range(len(names))) if stacked else rows_of_samples(table, names)
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
