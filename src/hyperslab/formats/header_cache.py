"""Remembers what scans have read of the headers of files, and asks for those of changed ones alone.

A `HeaderCache` is a file of JSON lines in the user's cache folder, where nobody else can write. It
is values alone, checked by their types, so that nothing in it is run.

[Note: stale headers] A header is used where size, times of the last change of content and of
state, and number (inode) of the file are those of when it was read. The file is opened for that,
because on a network's file system only an open asks for the present ones. Times are counted in
ticks, in which a file can change twice: what had changed less than `TICK` before is not kept. A
file that has its values from other files is not kept either.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from hyperslab.formats.files import FileAccess
from hyperslab.util.atomic_files import created_aside, json_lines
from hyperslab.util.documents import open_plain, value_of_json
from hyperslab.util.private_folders import make_private, user_folder

Header = TypeVar("Header")

FORMAT = 1
"""Counts the changes of what headers are and of what is checked when they are read."""

FEWEST = 128
"""Files of a folder from which on a cache is written: fewer are read in a fifth of a second."""

TICK = 2 * 10**9
"""The coarsest tick of a file system, FAT's [ns]."""

MOST_BYTES = 1 << 30
"""The largest cache that is read: millions of files [B]."""

log = logging.getLogger("hyperslab")

State = list[int]
"""Size, both times and number of a file."""


class HeaderCache(Generic[Header]):
    """Keeps headers of type ``kind`` of the files of a folder, by what ``about`` they depend on."""

    def __init__(self, reach: FileAccess, kind: type[Header], about: Sequence[object]) -> None:
        """Loads what there is."""
        from pydantic import TypeAdapter

        self.reach = reach
        self._codec = TypeAdapter(kind)
        version = importlib.metadata.version("hyperslab")
        words = repr((FORMAT, version, kind, reach.allowed, *about))
        self._about = hashlib.sha256(words.encode()).hexdigest()
        self._old = self._load()
        self._now: dict[str, tuple[State, Header]] = {}
        self._read = 0

    def header(self, file: str, read: Callable[[], Header]) -> Header:
        """Returns the header of a file, by its relative name: what is kept, or else what is read.

        See [Note: stale headers]. Errors are those of ``read``, which are never kept.
        """
        path = self.reach.folder / file
        state = _state(path)
        if file in self._old and self._old[file][0] == state:
            self._now[file] = self._old[file]
            return self._old[file][1]
        begin = time.time_ns()
        found = read()
        if (
            state is not None
            and max(state[1:3]) < begin - TICK
            and path not in self.reach.referring
        ):
            self._now[file] = state, found
            self._read += 1
        return found

    def save(self) -> None:
        """Writes the headers, if any of them is new; where nothing can be written that is all."""
        if not self._read:
            return
        body = json_lines(
            [name, state, self._codec.dump_python(header, mode="json")]
            for name, (state, header) in self._now.items()
        )
        head = json_lines([[self._about, hashlib.sha256(body).hexdigest()]])
        if (place := self._place()) is None:
            return
        try:
            with created_aside(place, concurrent=True) as file:
                file.write(head + body)
        except OSError as error:
            log.debug("%s: cannot be written: %s", place, error)

    def _place(self) -> Path | None:
        """Returns where the cache may be; None where the user has no folder of his own."""
        try:
            folder = make_private(user_folder("XDG_CACHE_HOME", "headers"))
        except OSError as error:
            log.debug("no cache of headers: %s", error)
            return None
        real = os.path.realpath(self.reach.folder)
        return folder / hashlib.sha256(os.fsencode(real)).hexdigest()

    def _load(self) -> dict[str, tuple[State, Header]]:
        if (place := self._place()) is None:
            return {}
        try:
            with open_plain(place, links=False) as file:
                head, body = value_of_json(file.readline(1000)), file.read(MOST_BYTES)
            about, checksum = head
            if about != self._about:
                return {}  # of another version, or read with other options
            if checksum != hashlib.sha256(body).hexdigest():
                raise ValueError("its checksum does not fit")
            rows = [value_of_json(line) for line in body.splitlines()]
            check = self._codec.validate_python
            found = {name: ([*map(int, state)], check(value)) for name, state, value in rows}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError) as error:
            log.warning("%s is ignored: %s", place, error)
            return {}
        return found


def _state(path: Path) -> State | None:
    """Returns the state of a plain file; None of anything else, or where there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(found.st_mode):
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
