"""Computes how much memory a process could get, and lets it keep what it has freed."""

from __future__ import annotations

import ctypes
import math
import mmap
from contextlib import suppress
from functools import cache
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def free_memory(groups: Path = CGROUPS, mine: Path = OWN_CGROUP) -> int:
    """Computes what this process could get [B] of the machine and its control groups (Linux)."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free: float = int(fields["MemAvailable"].split()[0]) * 1024
    # Some containers do not show a process its groups.
    for line in mine.read_text().splitlines() if mine.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            free = min(free, _left_in_cgroup(groups, path, "memory.max", "memory.current"))
        elif "memory" in controllers.split(","):  # the older kind
            files = "memory.limit_in_bytes", "memory.usage_in_bytes"
            free = min(free, _left_in_cgroup(groups / "memory", path, *files))
    return int(free)


def _left_in_cgroup(groups: Path, path: str, limit: str, used: str) -> float:
    """Computes what a control group and those around it leave [B]; a container may see only one.

    Cached pages of files count as used until somebody needs the memory.
    """
    left = math.inf
    folder = groups / path.lstrip("/")
    for place in (folder, *folder.parents):
        if (place / limit).exists() and (most := (place / limit).read_text().strip()).isdigit():
            stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
            cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            left = min(left, max(0, int(most) - int((place / used).read_text()) + cached))
        if place == groups:
            break
    return left


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_KEEP_ALL = -1  # as a size_t: no block is too large
LARGE_BLOCK = 1 << 29
"""Bytes of a block from which on `FreedMemory` has it given back to the system when freed."""


def keep_freed_memory() -> None:
    """Let glibc reuse freed blocks of any size; a no-op where the C library is another one.

    By default glibc maps every large block afresh, so each activation of each step pays a page
    fault per 4 KiB: measured at 40 % of a CosmoFlow-128 step on two cores.
    """
    _mallopt(_M_MMAP_THRESHOLD, _KEEP_ALL)
    _mallopt(_M_TRIM_THRESHOLD, _KEEP_ALL)


@cache  # the C library is asked once
def share_the_heap() -> None:
    """Let threads that start from here on use the heap of the main one.

    In a heap of its own a thread gets blocks of more than 64 MiB afresh every time, whatever
    `keep_freed_memory` says, which was 7 % of the processor time of a training on volumes of 512^3.
    """
    _mallopt(_M_ARENA_MAX, 1)


class FreedMemory:
    """Gives freed blocks back to the system: large ones at once, others now and then.

    A U-Net over slabs makes the same blocks again and again, of up to a quarter of a GiB. Taken
    afresh each time they were a seventh of its processor time, and kept for good they were a fifth
    more memory, as they leave holes between what stays (docs/log.md).
    """

    MOST_HOLES = 1 << 29

    def __init__(self) -> None:
        self._libc: ctypes.CDLL | None = None
        with suppress(OSError, AttributeError):  # another C library, or one before 2021
            libc = ctypes.CDLL("libc.so.6")
            libc.mallinfo2.restype = _MallInfo
            libc.mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)
            self._libc = libc
        self._without = self._beyond_blocks()

    def give_back(self) -> None:
        """Give holes back where they have become more than `MOST_HOLES` since the last time."""
        if self._libc is not None and self._beyond_blocks() - self._without > self.MOST_HOLES:
            self._libc.malloc_trim(0)
            self._without = self._beyond_blocks()

    def _beyond_blocks(self) -> int:
        """Compute what is resident [B] beside files and the blocks that are taken."""
        if self._libc is None:
            return 0
        resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
        info = self._libc.mallinfo2()
        taken: int = info.uordblks + info.hblkhd
        return (resident - shared) * mmap.PAGESIZE - taken


class _MallInfo(ctypes.Structure):
    """Is what `mallinfo2` returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _mallopt(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(option, value)
