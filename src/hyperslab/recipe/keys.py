"""Where in files volumes and targets are, as a recipe says it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from hyperslab.formats.shared.data_map import DataMap
from hyperslab.recipe.section import Section


def _as_words(value: object) -> object:
    """One word for a list of one."""
    return (value,) if isinstance(value, str) else value


Words = Annotated[tuple[str, ...], BeforeValidator(_as_words)]
"""Paths of samples, see `recipe.lists`."""


class KeysSection(Section):
    """Where in a file volume and targets are; by default its only array with so many dims."""

    volume: str | None = None  # the path of an array, "grid/delta" say
    targets: Words | None = None  # paths of arrays, or of attributes: "Header@Omega0"


def map_of(
    files: str | None,
    keys: KeysSection,
    table: Path | None,
    columns: tuple[str, ...] | None,
    ranges: dict[str, tuple[float, float]] | None,
) -> DataMap | None:
    """What these keys of a recipe say; None where they say nothing.

    Raises:
        DataError: targets are in two places, or a range is none.
    """
    if not any((files, keys.volume, keys.targets, table, columns, ranges)):
        return None
    return DataMap(
        files or "", keys.volume or "", keys.targets or (), table, columns or (), ranges or {}
    )
