"""Where in files volumes and targets are, as a recipe says it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from hyperslab.errors import DataError
from hyperslab.formats.shared.data_map import DataMap
from hyperslab.recipe.section import Section


def _as_words(value: object) -> object:
    """One word for a list of one."""
    return (value,) if isinstance(value, str) else value


Words = Annotated[tuple[str, ...], BeforeValidator(_as_words)]
"""Paths of samples, see `recipe.lists`."""


class KeysSection(Section):
    """Where in a file volume and targets are; by default its only array with so many dims."""

    volume: Words | None = None  # the path of an array, "grid/delta" say; several: channels
    targets: Words | None = None  # paths of arrays, or of attributes: "Header@Omega0"
    labels: str | None = None  # the path of an array with the class of every voxel


def map_of(
    files: tuple[str, ...] | None,
    keys: KeysSection,
    table: Path | None,
    columns: tuple[str, ...] | None,
    ranges: dict[str, tuple[float, float]] | None,
    classes: tuple[str, ...] | None,
) -> DataMap | None:
    """What these keys of a recipe say; None where they say nothing.

    Raises:
        DataError: targets are in two places, a range is none, or files and keys are both several.
    """
    said = (files, keys.volume, keys.targets, keys.labels, table, columns, ranges, classes)
    if not any(said):
        return None
    patterns = files or ()
    paths = keys.volume or ()
    if len(patterns) > 1 and len(paths) > 1:
        raise DataError("data.files and data.keys.volume are both several: make channels of one")
    return DataMap(
        files=patterns[0] if len(patterns) == 1 else "",
        volume=paths[0] if len(paths) == 1 else "",
        targets=keys.targets or (),
        table=table,
        columns=columns or (),
        ranges=ranges or {},
        labels=keys.labels or "",
        classes=classes or (),
        fields=patterns if len(patterns) > 1 else paths if len(paths) > 1 else (),
        of_files=len(patterns) > 1,
    )
