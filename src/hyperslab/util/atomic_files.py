"""Writes files that are there whole or not at all, journals of whole lines, and locks.

A file is written under a partial name beside its own, ``.NAME.partial``, and renamed when it is
complete: a reader finds the old one or the new one. No reader looks for partial names.

[Note: links] Partial names can be guessed, so anyone who may write to the folder could have put
a link there that leads elsewhere. What lies under a partial name is removed, be it a link or
what a killed process left, and the file is made anew and exclusively (O_EXCL, O_NOFOLLOW). Files
that grow, such as journals, are never opened through a link either. Where a whole folder is from
somebody else, `check_links` looks for links to other folders, and for libraries' own files.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any

from hyperslab.errors import RecipeError


def partial_path(path: Path) -> Path:
    """Return the name that a file or folder has until it is complete."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def created_aside(path: Path, *, concurrent: bool = False) -> Iterator[IO[bytes]]:
    """Give a new file to write to, under the partial name; afterwards it is renamed to ``path``.

    What goes wrong inside leaves what was there before, and no partial file: it would fill a full
    disk.

    ``concurrent``: other processes may write the same file now, so the partial name is this one's.

    Raises:
        OSError: it cannot be made, or renamed, or another process writes it now.
    """
    partial = partial_path(path)
    if concurrent:
        partial = partial.with_name(f"{partial.name}.{os.getpid()}")
    _remove_left(partial)
    try:
        with open(partial, "xb", opener=_exclusive) as file:
            try_lock(file.fileno())
            yield file
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def _remove_left(partial: Path) -> None:
    """Remove what a killed process has left under a partial name, or a link; see [Note: links].

    Raises:
        OSError: a process that lives has locked it.
    """
    free = True
    with suppress(OSError):  # nothing is there, or a link
        left = os.open(partial, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        free = try_lock(left)
        os.close(left)
    if not free:
        raise OSError(errno.EBUSY, "another process is writing it", str(partial))
    partial.unlink(missing_ok=True)


def _exclusive(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def write_text(path: Path, text: str, *, concurrent: bool = False) -> None:
    """Write a file of text (UTF-8), whole or not at all; see `created_aside`."""
    write_bytes(path, text.encode(), concurrent=concurrent)


def write_bytes(path: Path, data: bytes, *, concurrent: bool = False) -> None:
    """Write a file, whole or not at all; see `created_aside`."""
    with created_aside(path, concurrent=concurrent) as file:
        file.write(data)


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
    """Return one line of JSON a row, as a journal has them."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def append_whole(path: Path, data: bytes) -> None:
    """Add whole lines to a file, or, if that cannot be, nothing (OSError)."""
    with os.fdopen(open_to_append(path), "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise


def open_to_append(path: Path) -> int:
    """Return the number of a file that is open to grow, and is made if there is none.

    Raises:
        OSError: it is a link (see [Note: links]) or no plain file, or cannot be opened.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            words = "is a link, and hyperslab appends to no file through a link"
            raise OSError(errno.ELOOP, words, str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    return descriptor


def make_scratch(folder: Path) -> None:
    """Make a folder anew for what is not finished; of what was there nothing stays."""
    remove_scratch(folder)
    folder.mkdir(mode=0o700)


def remove_scratch(folder: Path) -> None:
    """Remove the folder of what is not finished, as far as that goes; of a link the link alone.

    A plain file in its place is removed, too.
    """
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def check_output(folder: Path, option: str) -> None:
    """Refuse a folder for results that cannot be made or written to; nothing is made.

    Raises:
        RecipeError: it says why, and the ``option`` that names another folder.
    """
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise RecipeError(f"output {there} is not a folder\n    choose another {option}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RecipeError(f"output {folder} cannot be written\n    choose another {option}")


def check_file(file: Path | None, option: str) -> None:
    """Refuse a file that could not be written, if one is named; nothing is made.

    Raises:
        RecipeError: it says why, and the ``option`` that names the file.
    """
    if file is None:
        return
    refusal = f"cannot write {option} {file}"
    if file.is_dir():
        raise RecipeError(f"{refusal}: it is a folder\n    give a file")
    try:
        tempfile.TemporaryFile(dir=file.absolute().parent).close()
    except OSError as error:
        raise RecipeError(
            f"{refusal}: {error.strerror}\n    give a file in a folder that is there"
        ) from None


def check_links(folder: Path, *names: str) -> None:
    """Refuse links that lead out of a folder, in it and below; with ``names`` in these of it alone.

    Raises:
        RecipeError: names the first one. A write or a deletion there would happen elsewhere.
    """
    real = os.path.realpath(folder)
    tops = [folder / name for name in names] or [folder]
    below = (
        Path(place) / name
        for top in tops
        for place, folders, files in os.walk(top)
        for name in (*folders, *files)
    )
    for path in chain(tops if names else (), below):
        target = os.path.realpath(path)
        if path.is_symlink() and os.path.commonpath([real, target]) != real:
            raise RecipeError(
                f"{path} leads to {target}, out of the folder {folder}, and nothing is written or "
                "deleted through links of a run's folder\n    replace the link by a copy, or "
                "remove it"
            )


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file for this process, until it is closed; False where another one has it.

    Processes that have it ``shared`` keep out those alone that want it for themselves. Where the
    file system has no locks nobody can be asked, and the answer is True.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
