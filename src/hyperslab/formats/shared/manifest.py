"""The record that `hyperslab convert` keeps in the folder that it fills, as readers need it.

``conversion.jsonl`` has one JSON object a line: first what was asked for, then one for each sample
with its ``name``. Parts of one volume, which readers of any format have to keep in one split, say
of which: ``volume``. A line that was not finished is no line.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from hyperslab.errors import DataError

RECORD = "conversion.jsonl"

Entry = dict[str, Any]


def read_record(folder: Path) -> tuple[Entry | None, list[Entry], int]:
    """What was asked for, the samples, and the bytes [B] of whole lines; nothing where there is no
    record.

    Raises:
        DataError: it cannot be read, or is none.
    """
    path = folder / RECORD
    try:
        whole, newline, _ = path.read_bytes().rpartition(b"\n")
        lines: list[Entry] = [json.loads(line) for line in whole.split(b"\n")] if newline else []
        if not all(isinstance(entry, dict) and "name" in entry for entry in lines[1:]):
            raise ValueError("a line has no name")
    except (FileNotFoundError, NotADirectoryError):
        return None, [], 0
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: is no record of a conversion ({error})") from error
    return (lines[0] if lines else None), lines[1:], len(whole) + len(newline)


def volumes_of(folder: Path) -> dict[str, str]:
    """The volume of each sample that is recorded as a part of one.

    Raises:
        DataError: see `read_record`.
    """
    _, samples, _ = read_record(folder)
    return {sample["name"]: sample["volume"] for sample in samples if "volume" in sample}


def append(path: Path, data: bytes) -> None:
    """Add whole lines to a file, or, if that cannot be, nothing.

    Raises:
        OSError: it cannot be.
    """
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with suppress(OSError):
                os.truncate(path, size)
            raise
