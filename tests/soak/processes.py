"""Processes of a launch, as /proc shows them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank to process id, of those that a launcher has started and that are alive."""
    found = {}
    for pid in _alive():
        environ = _read(pid, "environ").split(b"\0")
        if f"HYPERSLAB_LAUNCHER={launcher}".encode() in environ:
            found |= {int(v[5:]): pid for v in environ if v.startswith(b"RANK=")}
    return found


def alive_with(word: str) -> list[int]:
    """Those with a word on their command line; zombies have none."""
    return [pid for pid in _alive() if word.encode() in _read(pid, "cmdline")]


def _alive() -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if pid != os.getpid() and _read(pid, "stat").rpartition(b")")[2].split()[:1] not in (
            [],
            [b"Z"],
            [b"X"],
        ):
            yield pid


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it ended meanwhile
        return b""
