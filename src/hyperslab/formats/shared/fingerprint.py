"""The fingerprint of a file, by which a change since its folder was scanned is noticed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import google_crc32c

from hyperslab.errors import DataError
from hyperslab.formats.shared.checks import naming

SUMMED_AT_ONCE = 4 << 20
"""[B]"""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What changes when a file is written: its size [B] and the time of that [ns since 1970].

    The number of the file (inode) would tell one more case, a file put in its place with equal size
    and time, but nodes may number the files of a network's file system differently.
    """

    size: int
    modified: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """The file's stamp now. Raises: OSError, there is none."""
        found = os.stat(path)
        return cls(found.st_size, found.st_mtime_ns)

    def __str__(self) -> str:
        second, rest = divmod(self.modified, 10**9)
        when = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%d %H:%M:%S")
        return f"{self.size} bytes of {when}.{rest:09d} UTC"


RecordedStamps = dict[str, list[int]]
"""As JSON has them: of each file, relative to a folder, `size_and_time`."""


def recorded_stamps(files: Sequence[Path], root: Path) -> RecordedStamps:
    """What is recorded of files, relative to ``root``.

    Raises:
        DataError: one has gone.
    """
    found = {}
    for path in files:
        with naming(path, "a file"):
            found[Path(os.path.relpath(path, root)).as_posix()] = size_and_time(path)
    return found


def size_and_time(path: Path) -> list[int]:
    """The size [B] of a file and when it was written [ns]; of a folder all, and the last one.

    Raises:
        OSError: it has gone.
    """
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    states = [file.stat() for file in files]
    return [sum(s.st_size for s in states), max((s.st_mtime_ns for s in states), default=0)]


def sum_of(path: Path, lo: int = 0, hi: int | None = None) -> str:
    """The CRC32C of the bytes lo to hi of a file; of a folder, of all its files and their names.

    Raises:
        OSError: it has gone.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        words = [f"{file.relative_to(path).as_posix()} {sum_of(file)}\n" for file in files]
        return f"{google_crc32c.value(''.join(words).encode()):08x}"
    found = 0
    with path.open("rb") as file:
        file.seek(lo)
        left = (os.fstat(file.fileno()).st_size if hi is None else hi) - lo
        while left > 0 and (piece := file.read(min(left, SUMMED_AT_ONCE))):
            left = left - len(piece)
            found = google_crc32c.extend(found, piece)
    return f"{found:08x}"


@contextmanager
def unchanged(path: Path, sample: str, then: Stamp) -> Iterator[None]:
    """Refuse what is read within if the file is not the one that was scanned.

    It is looked at afterwards, so that a change during the read counts too; and also where the read
    fails, because a file that has changed explains that.

    Raises:
        DataError: it has changed or gone; names the file and the sample.
    """
    try:
        yield
    except Exception as error:
        check_unchanged(path, sample, then, error)
        raise
    check_unchanged(path, sample, then)


def check_unchanged(path: Path, sample: str, then: Stamp, cause: Exception | None = None) -> None:
    """Compare the file with what it was.

    Raises:
        DataError: it has changed or gone.
    """
    try:
        now = Stamp.of(path)
    except OSError as error:
        raise DataError(
            f"{path}: sample {sample!r} has gone since the folder was scanned "
            f"({error.strerror})\n    put it back, or open the folder again"
        ) from error
    if now != then:
        raise DataError(
            f"{path}: sample {sample!r} has changed since the folder was scanned: {then} then, "
            f"{now} now\n    open the folder again, and leave its files alone while they are in use"
        ) from cause
