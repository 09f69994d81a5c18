"""Which row of a table is a sample's."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hyperslab.errors import DataError, printable
from hyperslab.formats.mapped.table import TargetTable
from hyperslab.formats.shared.data_map import OWN_DATA

_DIGITS = re.compile(r"(\d+)")


def rows_of_samples(table: TargetTable, names: Sequence[str]) -> list[int]:
    """The row of each sample, one a file, by its name.

    A table that names its rows is asked for the sample's path, with or without suffix, or for the
    end of it, as far as it says one. Otherwise the names must be alike but for one number, which is
    the row, counted from 0: that of the realisation's folder, say.

    Raises:
        DataError: a sample has no row, or the names do not tell.
    """
    if table.names:
        return _by_name(table, names)
    if len(names) == len(table.values) == 1:
        return [0]
    numbers = _numbers(table, names)
    last = len(table.values) - 1
    for name, row in zip(names, numbers, strict=True):
        if row > last:
            raise DataError(
                f"{table.path}: has rows 0 to {last}, but sample {printable(name)!r} would have "
                f"row {row}\n    rows are counted from 0; give the table of these files, or a "
                f"first column that names them ({OWN_DATA})"
            )
    return numbers


def _by_name(table: TargetTable, names: Sequence[str]) -> list[int]:
    known = {_bare(name): row for row, name in enumerate(table.names)}
    if len(known) < len(table.names):
        raise DataError(f"{table.path}: has two rows for one sample, with a suffix and without")
    ends: dict[str, list[int]] = {}
    for name, row in known.items():
        ends.setdefault(name.rpartition("/")[2], []).append(row)
    found = []
    for name in names:
        same = [known[name]] if name in known else ends.get(name.rpartition("/")[2], [])
        same = [row for row in same if _one_ends_as(name, _bare(table.names[row]))]
        if len(same) != 1:
            raise DataError(
                f"{table.path}: has no row for sample {printable(name)!r}; its {len(table.names)} "
                f"rows begin with {printable(table.names[0])!r}\n    name rows by paths relative "
                f"to data.path ({OWN_DATA})"
            )
        found.append(same[0])
    if len(set(found)) != len(found):
        raise DataError(f"{table.path}: one row would be of two samples; name rows by paths")
    return found


def _one_ends_as(name: str, other: str) -> bool:
    """Whether they can be paths of one file, seen from two folders."""
    return f"/{name}".endswith(f"/{other}") or f"/{other}".endswith(f"/{name}")


def _bare(name: str) -> str:
    for suffix in (".npy", ".npz", ".hdf5", ".h5", ".zarr"):
        name = name.removesuffix(suffix)
    return name.removeprefix("./")


def _numbers(table: TargetTable, names: Sequence[str]) -> list[int]:
    split = [_DIGITS.split(name) for name in names]
    words = {tuple(parts[::2]) for parts in split}
    numbers = [parts[1::2] for parts in split]
    varying = [i for i in range(len(numbers[0])) if len({n[i] for n in numbers}) > 1]
    if len(names) == 1 and len(numbers[0]) == 1:
        varying = [0]
    if len(words) > 1 or len(varying) != 1:
        raise DataError(
            f"{table.path}: which of its {len(table.values)} rows is that of "
            f"{printable(names[0])!r}, or of {printable(names[-1])!r}, is not clear: the names of "
            "files should differ in one number alone\n    choose files by data.files, or name the "
            f"rows in a first column ({OWN_DATA})"
        )
    found = [int(parts[varying[0]][:18]) for parts in numbers]
    if len(set(found)) != len(found):
        raise DataError(f"{table.path}: two samples have the number of one row")
    return found
