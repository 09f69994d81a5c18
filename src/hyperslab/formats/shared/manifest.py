"""The manifest of a converted folder, which `hyperslab convert` keeps in it, as readers need it.

``conversion.jsonl`` has one JSON object a line: first what was asked for, then one for each sample
with its ``name``. Parts of one volume, which readers of any format have to keep in one split, say
of which: ``volume``. A line that was not finished is no line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hyperslab.atomic_files import read_json_lines
from hyperslab.errors import DataError

MANIFEST_FILE = "conversion.jsonl"

Entry = dict[str, Any]


def read_manifest(folder: Path) -> tuple[Entry | None, list[Entry], int]:
    """What was asked for, the samples, and the bytes [B] of whole lines.

    Nothing where there is no manifest.

    Raises:
        DataError: it cannot be read, or is none.
    """
    path = folder / MANIFEST_FILE
    try:
        lines, size = read_json_lines(path)
        if not all(isinstance(entry, dict) and "name" in entry for entry in lines[1:]):
            raise ValueError("a line has no name")
    except (FileNotFoundError, NotADirectoryError):
        return None, [], 0
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: is no record of a conversion ({error})") from error
    return (lines[0] if lines else None), lines[1:], size


def volumes_of(folder: Path) -> dict[str, str]:
    """The volume of each sample that is recorded as a part of one.

    Raises:
        DataError: see `read_manifest`.
    """
    _, samples, _ = read_manifest(folder)
    return {sample["name"]: sample["volume"] for sample in samples if "volume" in sample}
