"""Files that are there whole or not at all, journals that keep whole lines, and locks.

A file is written under a partial name beside its own, ``.NAME.partial``, and renamed when it is
complete: a reader finds the old one or the new one. No reader looks for partial names.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def partial_path(path: Path) -> Path:
    """The name that a file or folder has until it is complete."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def written_aside(path: Path, *, concurrent: bool = False, ending: str = "") -> Iterator[Path]:
    """Give the partial name to write to; afterwards it is renamed to ``path``.

    What goes wrong inside leaves what was there before, and no partial file: it would fill a full
    disk.

    Args:
        concurrent: other processes may write the same file now, so the partial name is this one's.
        ending: what the partial name ends in, where a library goes by it.

    Raises:
        OSError: it cannot be renamed.
    """
    partial = partial_path(path)
    owner = f".{os.getpid()}" if concurrent else ""
    partial = partial.with_name(f"{partial.name}{owner}{ending}")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def write_text(path: Path, text: str, *, concurrent: bool = False) -> None:
    """Write a file of text (UTF-8), whole or not at all; see `written_aside`."""
    write_bytes(path, text.encode(), concurrent=concurrent)


def write_bytes(path: Path, data: bytes, *, concurrent: bool = False) -> None:
    """Write a file, whole or not at all; see `written_aside`."""
    with written_aside(path, concurrent=concurrent) as partial:
        partial.write_bytes(data)


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table, whole or not at all."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    write_text(path, text.getvalue())


def write_json(path: Path, value: object) -> None:
    """Write a value, whole or not at all; what is not a finite number becomes null."""
    write_text(path, json.dumps(_finite(value), indent=1) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_lines(rows: Iterable[object]) -> bytes:
    """One line of JSON a row, as a journal has them."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def read_json_lines(path: Path) -> tuple[list[Any], int]:
    """The rows of a journal and the bytes [B] of its whole lines.

    A last line that was not finished is no line.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is not JSON.
    """
    whole, newline, _ = path.read_bytes().rpartition(b"\n")
    rows = [json.loads(line) for line in whole.split(b"\n")] if newline else []
    return rows, len(whole) + len(newline)


def append_whole(path: Path, data: bytes) -> None:
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


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this process, until it is closed; False where another one has it.

    Where the file system has no locks nobody can be asked, and the answer is True.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
