"""The default budget of a store: each rank's part of half of the free memory."""

from __future__ import annotations

import math
import os
import shutil
import socket
import weakref
from pathlib import Path

from hyperslab.comm import Grid, per_grid
from hyperslab.comm.agreement import all_or_raise, from_all
from hyperslab.data.store.boxes import Store
from hyperslab.errors import DataError

SHARE = 0.5
"""Of the memory that is free; the rest is for the network and for reading ahead."""

DISK = 0.9
"""Of the space that is free on the disk of the staging folder."""

CGROUPS = Path("/sys/fs/cgroup")
MINE = Path("/proc/self/cgroup")


def memory_budget(grid: Grid) -> int:
    """What each rank's store may take [B]: its part of half of the free memory of its machine.

    The least of all ranks, so that they all keep equally many samples. Every rank calls it. What
    the other stores on this grid will still fill is not free.
    """
    promised = sum(store.room - store.bytes for store in stores(grid))
    return _least(free_memory(), SHARE, promised)


@per_grid
def stores(_grid: Grid) -> weakref.WeakSet[Store]:
    """Those that are in use on this rank."""
    return weakref.WeakSet()


def disk_budget(folder: Path, grid: Grid) -> int:
    """The same for the disk on which ``folder`` is, or will be, on each rank's machine [B]."""
    return _least(all_or_raise(lambda: _free_disk(folder)), DISK)


def _free_disk(folder: Path) -> int:
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        return shutil.disk_usage(there).free
    except OSError as error:
        raise DataError(f"staging folder {folder}: {error.strerror}; give another") from error


def free_memory(groups: Path = CGROUPS, mine: Path = MINE) -> int:
    """What this process could still get [B]: of the machine, and of its control groups (Linux)."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free: float = int(fields["MemAvailable"].split()[0]) * 1024
    for line in mine.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            free = min(free, _left(groups, path, "memory.max", "memory.current"))
        elif "memory" in controllers.split(","):  # the older kind
            files = "memory.limit_in_bytes", "memory.usage_in_bytes"
            free = min(free, _left(groups / "memory", path, *files))
    return int(free)


def _left(groups: Path, path: str, limit: str, used: str) -> float:
    """What a control group and those around it leave [B]; a container may see only the outermost.

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


def _least(machine: int, share: float, promised: int = 0) -> int:
    """The smallest share of a rank, where the ranks of a machine share what it has."""
    host = f"{socket.gethostname()} {_boot()}"
    here = from_all(host).count(host)
    return min(from_all(max(0, int(share * (machine // here - promised)))))


def _boot() -> str:
    """Tells machines of the same name apart."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else str(os.getppid())
