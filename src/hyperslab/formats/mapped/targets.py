"""Targets of samples: as a table or the files say them, and as a network is shown them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hyperslab.errors import DataError, printable
from hyperslab.formats.mapped.published import Published
from hyperslab.formats.mapped.rows import rows_of_samples
from hyperslab.formats.mapped.table import TargetTable
from hyperslab.formats.parameters import Floats, Parameters, numbered
from hyperslab.formats.shared.data_map import OWN_DATA, DataMap
from hyperslab.formats.source import Array


def physical_targets(
    folder: Path,
    names: Sequence[str],
    places: Sequence[tuple[int, int | None]],
    table: TargetTable | None,
    beside: Sequence[Sequence[Array]],
    said: DataMap,
    known: Published | None,
    stacked: bool,
) -> tuple[Floats, tuple[str, ...]]:
    """The targets (N, P) as they are written, and what they are called."""
    if table is not None:
        values, columns = _of_table(folder, names, table, known, stacked)
    elif said.targets:
        values = np.array(
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
    columns = said.columns or columns or numbered(values.shape[1])
    if len(columns) != values.shape[1] or len(set(columns)) != len(columns):
        raise DataError(
            f"data.columns names {len(columns)} targets ({', '.join(columns)}) but there are "
            f"{values.shape[1]} columns; give as many different names"
        )
    return values, columns


def _of_table(
    folder: Path,
    names: Sequence[str],
    table: TargetTable,
    known: Published | None,
    stacked: bool,
) -> tuple[Floats, tuple[str, ...]]:
    """A row for each sample, with the names and parameters of a published set."""
    if stacked and len(table.values) != len(names):
        raise DataError(
            f"{table.path}: has {len(table.values)} rows but {folder} holds {len(names)} "
            f"volumes; a row is needed for each ({OWN_DATA}, tables)"
        )
    rows = list(range(len(names))) if stacked else rows_of_samples(table, names)
    values = table.values[rows]
    columns = table.columns
    if known is not None and len(known.priors) == values.shape[1]:
        columns = columns or tuple(known.priors)
    if known is not None and known.parameters is not None:
        values = values[:, : known.parameters]
        columns = columns[: known.parameters]
    return values, columns


def _titles(words: Sequence[str], first: Sequence[Array], stacked: bool) -> tuple[str, ...]:
    """``Header@Omega0`` is Omega0; of a vector there are as many."""
    found: list[str] = []
    for word, values in zip(words, first, strict=True):
        name = printable(word.rpartition("@")[2].rpartition("/")[2])
        size = values[0].size if stacked else values.size
        found += [name] if size == 1 else [f"{name}_{i}" for i in range(size)]
    return tuple(found)


def scaled_targets(
    physical: Floats,
    columns: tuple[str, ...],
    table: TargetTable | None,
    said: DataMap,
    known: Published | None,
) -> tuple[Floats, Parameters, str]:
    """Targets from -1 to 1, the way back, and words on it."""
    if unknown := sorted(set(said.ranges) - set(columns)):
        raise DataError(
            f"data.ranges has {', '.join(unknown)}, but the targets are {', '.join(columns)}"
        )
    least = physical.min(0)
    most = physical.max(0)
    for i, name in enumerate(columns):
        prior = said.ranges.get(name) or (known.priors.get(name) if known else None)
        if prior and (name in said.ranges or (prior[0] <= least[i] and most[i] <= prior[1])):
            least[i], most[i] = prior
    centre = (least + most) / 2
    scale = (most - least) / 2
    unit = (physical - centre) / np.where(scale == 0, 1, scale)
    parameters = Parameters(columns, tuple(centre.tolist()), tuple(scale.tolist()))
    words = ", ".join(f"{n} {lo:.4g}..{hi:.4g}" for n, (lo, hi) in parameters.ranges.items())
    origin = "their files" if table is None else table.path.name
    return unit, parameters, f"targets of {origin}; -1 and 1 are {words}"
