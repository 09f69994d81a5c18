"""The journal of a prediction: which inputs are done, in a file that survives a stop.

predictions.jsonl: one line that says by which network, then one line for each input that is done.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from hyperslab.atomic_files import append_whole, json_lines, read_json_lines, write_bytes
from hyperslab.errors import DataError
from hyperslab.predict.inputs import Input

JOURNAL = "predictions.jsonl"

Row = dict[str, Any]


class Journal:
    """The inputs that a network has predicted into ``folder``; on the main rank only.

    What another network or another way of reading has left there is not taken for done.
    """

    def __init__(self, folder: Path, by: Row) -> None:
        """``by`` says what the results depend on besides the inputs.

        Raises:
            DataError: the folder cannot be written.
        """
        self.path = folder / JOURNAL
        first, *rows = _lines(self.path) or [{}]
        named = [row for row in rows if isinstance(row, dict) and isinstance(row.get("name"), str)]
        self.rows: dict[str, Row] = {row["name"]: row for row in named} if first == by else {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_bytes(self.path, json_lines([by, *self.rows.values()]))
        except OSError as error:
            raise DataError(f"cannot write into {folder}: {error.strerror}") from error

    def done(self, entry: Input) -> bool:
        """Whether this very file is done."""
        row = self.rows.get(entry.name)
        if row is None or not all(path.exists() for path in entry.paths):
            return False
        return all(row.get(key) == value for key, value in _of(entry).items())

    def add(self, entry: Input, **result: Any) -> None:
        """Note that an input is done, with its result where that is not a file."""
        row = {"name": entry.name, **_of(entry), **result}
        self.rows[entry.name] = row
        append_whole(self.path, json_lines([row]))


def digest(checkpoint: Path) -> str:
    """Tells one checkpoint from another: of the checksums of its files."""
    return hashlib.sha256((checkpoint / "manifest.json").read_bytes()).hexdigest()


def _of(entry: Input) -> Row:
    size, modified = _state(entry.path)
    path = str(entry.path.absolute())
    found: Row = {"path": path, "bytes": size, "modified": modified}
    others = [list(_state(file)) for file in entry.channels if file.exists()]
    if others:
        found["channels"] = others
    return found


def _state(path: Path) -> tuple[int, int]:
    """Bytes and last change [ns]; of a Zarr group over all of its files."""
    files = [path, *(path.rglob("*") if path.is_dir() else ())]
    found = [file.stat() for file in files]
    return sum(one.st_size for one in found), max(one.st_mtime_ns for one in found)


def _lines(path: Path) -> list[Row]:
    """The whole lines; a foreign file has none."""
    try:
        return read_json_lines(path)[0]
    except (OSError, ValueError):
        return []
