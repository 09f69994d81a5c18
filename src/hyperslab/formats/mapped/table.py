"""A table of targets: text with or without a header, or a .npy array."""

from __future__ import annotations

import csv
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyperslab.errors import DataError, printable
from hyperslab.formats.npy.file import read_vector
from hyperslab.formats.parameters import Floats
from hyperslab.formats.shared.checks import naming
from hyperslab.formats.shared.data_map import OWN_DATA

MOST_TABLE = 64 << 20
"""Of a table [B]."""

ROW_TITLES = ("name", "file", "filename", "sample", "simulation")
"""Titles of a first column that names samples."""


@dataclass(frozen=True, slots=True)
class TargetTable:
    """Values (N, P); ``columns``: their names, where it says them; ``names``: of the rows."""

    path: Path
    values: Floats
    columns: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


def read_target_table(path: Path) -> TargetTable:
    """Read one whole.

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
        with path.open("rb") as file:
            data = file.read(MOST_TABLE + 1)
        if len(data) > MOST_TABLE:
            raise DataError(f"{path}: has more than {MOST_TABLE >> 20} MiB for a table")
        return _of_text(path, data.decode("utf-8-sig"))


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
    """The fields of the header, if there is one, and of each row; and the rows' line numbers."""
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
            raise DataError(f"{path}: line {line}: {reprlib.repr(field)} is no number")
    return [float(field) for field in fields]


def _check_finite(path: Path, values: Floats, numbers: Sequence[int], word: str) -> None:
    bad = np.flatnonzero(~np.isfinite(values).all(1))
    if bad.size:
        row = int(bad[0])
        raise DataError(
            f"{path}: {word} {numbers[row]} holds {values[row].tolist()}; needs finite numbers"
        )
