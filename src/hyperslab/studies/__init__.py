"""Holds what is done with whole runs: made by a program, compared, swept, scaled, reported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hyperslab.errors import DataError


def check_distinct(paths: Sequence[Path]) -> None:
    """Refuses a run that is given twice: it would be compared with itself (`DataError`)."""
    found = [path.resolve() for path in paths]
    for path, place in zip(paths, found, strict=True):
        if found.count(place) > 1:
            raise DataError(f"{path} is given twice; a run is compared with others")
