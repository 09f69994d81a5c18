"""Reads the manifest of a converted folder, which `hyperslab convert` keeps in it.

``conversion.jsonl`` has one JSON object a line: first what was asked for, then one for each
sample with its ``name``. Parts of one volume, which readers of any format have to keep in one
split, say of which: ``volume``. A line that was not finished is no line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyperslab.errors import DataError
from hyperslab.util.documents import read_json_lines

MANIFEST_FILE = "conversion.jsonl"

SHARD_NAME = re.compile(r"\d+\.[A-Za-z]\w*")
"""The name of a file that samples share, in the folder itself."""

Entry = dict[str, Any]


def read_manifest(folder: Path) -> tuple[Entry | None, list[Entry], int]:
    """Reads what was asked for, the samples, and the bytes [B] of whole lines.

    Nothing where there is no manifest; what is none is refused.
    """
    path = folder / MANIFEST_FILE
    try:
        lines, size = read_json_lines(path)
        for number, entry in enumerate(lines, 1):
            _check_line(number, entry, first=number == 1)
    except (FileNotFoundError, NotADirectoryError):
        return None, [], 0
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: is not a record of a conversion ({error})") from error
    return (lines[0] if lines else None), lines[1:], size


def _check_line(number: int, entry: Any, *, first: bool) -> None:
    """Accepts a line that has what is looked up in it, by the right type."""
    if not isinstance(entry, dict):
        raise ValueError(f"line {number} is not an object")
    if first:
        return
    if not isinstance(entry.get("name"), str):
        raise ValueError(f"line {number} has no name")
    for key, right in _KEYS.items():
        if key in entry and not right(entry[key]):
            raise ValueError(f"line {number}: {key!r} is {entry[key]!r:.100}")


def _maps_to(right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(right, value.values()))


def _is_shard(value: Any) -> bool:
    """Tells if a value names a shard, which is cut where it ends and may lie nowhere else."""
    if not (isinstance(value, list) and len(value) == 3):
        return False
    file, *ends = value
    named = isinstance(file, str) and SHARD_NAME.fullmatch(file) is not None
    return named and all(isinstance(end, int) and end >= 0 for end in ends)


_KEYS: dict[str, Callable[[Any], bool]] = {
    "volume": lambda value: isinstance(value, str),
    "source": lambda value: isinstance(value, str),
    "crc32c": lambda value: isinstance(value, str),
    "labels_crc32c": lambda value: isinstance(value, str),
    "target": lambda value: isinstance(value, list),
    "files": _maps_to(lambda size: isinstance(size, int)),
    "sums": lambda value: isinstance(value, dict),
    "stamps": _maps_to(lambda stamp: isinstance(stamp, list) and len(stamp) == 2),
    "shard": _is_shard,
}
"""Checks of what is looked up in the line of a sample, where it has that."""


def volumes_of(folder: Path) -> dict[str, str]:
    """Maps each sample that is recorded as a part of a volume to that volume."""
    _, samples, _ = read_manifest(folder)
    return {sample["name"]: sample["volume"] for sample in samples if "volume" in sample}
