"""How fast all ranks read files at once."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path

from hyperslab.comm import Grid
from hyperslab.comm.agreement import from_all
from hyperslab.machine.links import Reading

SIZES = (1 << 20, 64 << 20)  # [B] of files: one for the latency, one for the bandwidth
BLOCK = 1 << 20  # [B] of a read
TRIES = 3


def measure_reading(grid: Grid, folder: Path) -> Reading:
    """Every rank reads files of its own in ``folder``, past the page cache where that is possible.

    All ranks call this. ``total`` is what all of them get together.
    """
    times = []
    direct = True
    for size in SIZES:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".hyperslab-read-") as file:
            file.write(os.urandom(size))
            file.flush()
            os.fsync(file.fileno())
            tries = []
            for _ in range(TRIES):
                grid.barrier()
                seconds, past = _read(Path(file.name), size)
                tries.append(max(from_all(seconds)))
                direct = direct and past
            times.append(min(tries))
    small, large = SIZES
    bandwidth = (large - small) / max(times[1] - times[0], 1e-9)
    return Reading(
        bandwidth=bandwidth,
        total=bandwidth * grid.size,
        latency=max(times[0] - small / bandwidth, 0.0),
        cached=not all(from_all(direct)),
    )


def _read(path: Path, size: int) -> tuple[float, bool]:
    """The time [s] of one read, and whether it went past the page cache."""
    direct = getattr(os, "O_DIRECT", 0)
    try:
        file = os.open(path, os.O_RDONLY | direct)
    except OSError:  # this file system has none
        direct = 0
        file = os.open(path, os.O_RDONLY)
    try:
        buffer = mmap.mmap(-1, min(BLOCK, size))  # O_DIRECT wants whole pages
        begin = time.perf_counter()
        while os.readv(file, [buffer]):
            pass
        return time.perf_counter() - begin, bool(direct)
    finally:
        os.close(file)
