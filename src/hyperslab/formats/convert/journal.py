"""Records a conversion: its manifest as it grows, and the files that many samples share.

A sample is recorded in the manifest (`formats.manifest`) before its files get their names: what
has a name and no line is somebody else's, what has a line and no name is made again.

Files that many samples share are appended, one sample after the other. What has been appended is
on the disk before the journal says so. So what lies behind the last recorded sample of a file is
what a killed run has begun, and is cut off.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import google_crc32c

from hyperslab.errors import DataError, system_errors_as
from hyperslab.formats.files import Stamp, file_checksum
from hyperslab.formats.manifest import MANIFEST_FILE, Entry, read_manifest
from hyperslab.util.atomic_files import append_whole, json_lines, open_to_append, try_lock

REMEDY = "convert into another folder"


class Manifest:
    """The manifest in ``folder``. ``entries``: of each sample, by name, the last one written."""

    def __init__(self, folder: Path, entries: Sequence[Entry]) -> None:
        self.folder = folder
        self.entries = {entry["name"]: entry for entry in entries}

    def add(self, entries: Sequence[Entry]) -> None:
        """Notes samples, all of them or, with an OSError, none."""
        append_whole(self.folder / MANIFEST_FILE, json_lines(entries))
        self.entries |= {entry["name"]: entry for entry in entries}


@contextmanager
def lock_manifest(folder: Path, asked: Entry, needed: Sequence[str]) -> Iterator[Manifest]:
    """Gives the manifest of a folder that is made if there is none, kept from other runs.

    ``needed``: keys without which a line is none of this conversion.

    Raises:
        DataError: the folder is another conversion's, none at all, in use, or cannot be written.
    """
    found, _, _ = read_manifest(folder)
    if found is None:
        _check_empty(folder)
    with system_errors_as(DataError, f"{folder}: cannot be written", named=False):
        folder.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(open_to_append(folder / MANIFEST_FILE), "ab")
    with file:
        if not try_lock(file.fileno()):
            raise DataError(f"{folder}: another conversion into it is under way")
        found, entries, size = read_manifest(folder)
        for entry in entries:  # what a run that goes on needs beyond what a reader does
            if missing := [key for key in needed if key not in entry]:
                raise DataError(
                    f"{folder / MANIFEST_FILE}: is not a record of a conversion (the line of "
                    f"{entry['name']!r} has no {missing[0]})"
                )
        with system_errors_as(DataError, f"{folder}: cannot be written", named=False):
            file.truncate(size)  # a line that a killed run has begun
            if found is None:
                append_whole(folder / MANIFEST_FILE, json_lines([asked]))
        for key, value in asked.items() if found else ():
            if found and found.get(key) != value:
                raise DataError(
                    f"{folder}: was converted with {key} {found.get(key)}, not {value}: {REMEDY}"
                )
        yield Manifest(folder, entries)


def _check_empty(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder}: is not a folder")
    others = sorted(p.name for p in folder.glob("*") if not p.name.startswith(".")) or [""]
    if others[0] not in ("", MANIFEST_FILE):
        raise DataError(f"{folder}: holds {others[0]!r}, which no conversion has written: {REMEDY}")


Shard = tuple[str, int, int]
"""The file of a sample, and where in it that begins and ends [B]."""

SHARD_DIGITS = 5


def is_written(folder: Path, entry: Entry, places: Sequence[Shard], *, shared: bool) -> bool:
    """Tells if a recorded sample is in its files; ``shared``: others may lie behind it.

    A file that is shorter or longer than it was, or damaged, is refused.
    """
    name = entry["name"]
    for file, start, end in places:
        path = folder / file
        if not os.path.exists(path):  # False of names that no system takes
            return False
        size = Stamp.of(path).size
        if size < end or (size != end and not shared):
            raise DataError(
                f"{path}: has {size} bytes but had {end} when {name!r} was written: delete it and "
                "run the command again"
            )
        then = entry.get("sums", {}).get(file)  # earlier versions noted none
        if then is not None and file_checksum(path, start, end) != then:
            raise DataError(
                f"{path}: is damaged: its checksum of {name!r} has changed since it was written: "
                "delete it and run the command again"
            )
    return True


def check_places(folder: Path, entries: Iterable[Entry], suffix: str) -> None:
    """Refuses files whose recorded samples are not one behind the other from the start.

    A file where a line is missing or is said of others would end up with a sample twice, or with
    one that nobody knows of.
    """
    places: dict[str, list[tuple[int, int]]] = {}
    for entry in entries:
        file, start, end = entry["shard"]
        if not file.removesuffix(suffix).isdecimal():
            raise DataError(
                f"{folder / MANIFEST_FILE}: is not a record of a conversion ({file} is not "
                "a file of it)"
            )
        places.setdefault(file, []).append((start, end))
    for file, found in places.items():
        at = 0
        for start, end in sorted(found):
            if start != at and os.path.exists(folder / file):
                raise DataError(
                    f"{folder / MANIFEST_FILE}: is not a record of a conversion (a sample of "
                    f"{file} begins at byte {start}, and the one before it ends at {at}): delete "
                    "both and run the command again"
                )
            at = end


class Shards:
    """The files ``NUMBER{suffix}`` of a folder, with up to ``most`` samples each.

    The samples called ``names`` are dealt to them at random (Mathuriya et al. 2018, section IV-C),
    by a hash of each name, so that a reader which goes from file to file does not see the parts of
    one volume together, and a run that goes on deals as the one before. What a killed run has begun
    is cut off.
    """

    def __init__(
        self, folder: Path, entries: Iterable[Entry], names: Iterable[str], most: int, suffix: str
    ) -> None:
        self.folder = folder
        self.most = most
        self.suffix = suffix
        places = [entry["shard"] for entry in entries]
        self._held = Counter(file for file, _, _ in places)
        ends: dict[str, int] = {}
        for file, _, end in places:
            ends[file] = max(end, ends.get(file, 0))
        for file, end in ends.items():
            path = folder / file
            if os.path.exists(path) and path.stat().st_size > end:
                os.truncate(path, end)
        dealt = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
        self._numbers = {name: place // most for place, name in enumerate(dealt)}
        # Into a file that has gone nothing is put: its samples are made again, elsewhere.
        self._gone = {file for file in ends if not os.path.exists(folder / file)}
        known = (int(file.removesuffix(suffix)) for file in ends)
        self._spare = 1 + max(known, default=-1)

    def _file(self, number: int) -> str:
        return f"{number:0{SHARD_DIGITS}}{self.suffix}"

    def _file_of(self, name: str) -> str:
        """Return the file to which a sample is dealt or, where that is full or gone, a spare one.

        Full it is where samples have come since others were dealt.
        """
        number = self._numbers[name]
        while self._held[self._file(number)] >= self.most or self._file(number) in self._gone:
            number = max(number + 1, self._spare)
        return self._file(number)

    def append(self, name: str, part: Path) -> Shard:
        """Puts the one file of a sample behind those before, and compares what is then there."""
        file = self._file_of(name)
        data = part.read_bytes()
        with (self.folder / file).open("r+b" if self._held[file] else "wb") as shard:
            start = shard.seek(0, os.SEEK_END)
            shard.write(data)
            shard.flush()
            os.fsync(shard.fileno())
        with (self.folder / file).open("rb") as shard:
            shard.seek(start)
            if google_crc32c.value(shard.read()) != google_crc32c.value(data):
                raise DataError(f"{self.folder / file}: is not what was written at byte {start}")
        self._held[file] += 1
        return file, start, start + len(data)
