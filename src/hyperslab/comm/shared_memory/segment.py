"""Memory that the ranks of one machine share, and semaphores in it to wait for each other.

POSIX semaphores order memory: what a rank wrote before it posts is seen by the rank that waits,
on every processor.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from hyperslab.comm.agreement import lost_contact

T = TypeVar("T")

FREE_SHARE = 0.5  # of the memory that is free: what ranks share is at most that
CACHE_LINE = 64  # [B] a cache line: semaphores on one line would slow each other down
SPINS = 4000  # tries, of half a microsecond each, before a waiting rank goes to sleep
CHECK = 0.2  # [s] between two looks at whether the rank that is waited for still lives


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Segment:
    """A block of memory that all ranks map; made by `connect`.

    It begins with ``semaphores`` semaphores and as many whole numbers as ``numbers``, each on a
    line of its own. Then come ``data``, the remaining bytes.

    Every rank locks one byte of the file. However its process ends, the system takes that lock
    away at once, and it does not need to show processes to each other for that.
    """

    def __init__(self, path: Path, semaphores: int, numbers: int, limit: float) -> None:
        self.rank = dist.get_rank()
        self.limit = limit
        self._file = path.open("r+b", buffering=0)
        memory = mmap.mmap(self._file.fileno(), 0)
        with torch.inference_mode(False):  # or it could not be written to outside that mode
            whole = torch.frombuffer(memory, dtype=torch.uint8)
        begin = semaphores * CACHE_LINE
        end = begin + numbers * CACHE_LINE
        address = whole.data_ptr()
        self._semaphores = [ctypes.c_void_p(address + at) for at in range(0, begin, CACHE_LINE)]
        self.numbers = memoryview(memory)[begin:end].cast("q")[:: CACHE_LINE // 8]
        self.data = whole[end:]
        self._libc = ctypes.CDLL(None, use_errno=True)
        # With fewer cores than ranks, one that spins keeps another from running.
        enough = len(os.sched_getaffinity(0)) >= dist.get_world_size()
        self._spins = SPINS if enough else 1

    def prepare(self, semaphores: Sequence[int]) -> None:
        """Give every semaphore its first value; one rank does, before anybody uses them."""
        for number, value in enumerate(semaphores):
            if self._libc.sem_init(self._semaphores[number], 1, value) != 0:
                raise OSError(ctypes.get_errno(), "sem_init")

    def enter(self) -> bool:
        """Show the others that this rank is there, from now on; whether it can.

        From now on, too, this process must not open and close the file again: it would lose the
        lock by that.
        """
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.rank)
        except OSError:
            return False
        return True

    def leave(self) -> None:
        """Tell the others that this rank will not answer any more."""
        self._file.close()  # that gives up the lock

    def post(self, semaphore: int) -> None:
        self._libc.sem_post(self._semaphores[semaphore])

    def wait(self, semaphore: int, peer: int, what: str) -> None:
        """Wait until ``peer`` posts.

        Raises:
            CommError: it has left, its process has ended, or the time limit has passed.
        """
        address = self._semaphores[semaphore]
        for _ in range(self._spins):
            if self._libc.sem_trywait(address) == 0:
                return
        begin = time.monotonic()
        while True:
            alive = self._alive(peer)  # before the last try: it may have posted, then left
            if self._timed_wait(address, CHECK if alive else 0):
                return
            if not alive:
                raise lost_contact(self.rank, [peer], what, "it has ended")
            if time.monotonic() - begin > self.limit:
                why = f"no answer within {self.limit:.0f} s"
                raise lost_contact(self.rank, [peer], what, why)

    def _timed_wait(self, address: ctypes.c_void_p, seconds: float) -> bool:
        """Whether there was a post in time; a signal may end the wait early."""
        if hasattr(self._libc, "sem_clockwait"):
            until = _timespec(time.monotonic() + seconds)
            return bool(self._libc.sem_clockwait(address, time.CLOCK_MONOTONIC, until) == 0)
        # Before glibc 2.30 there is only the clock that can be set: a post always ends the wait,
        # but after setting that clock back it is late to notice that the rank has ended.
        return bool(self._libc.sem_timedwait(address, _timespec(time.time() + seconds)) == 0)

    def _alive(self, peer: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, peer)
        except BlockingIOError:
            return True
        return False


def _timespec(seconds: float) -> object:
    whole = int(seconds)
    return ctypes.byref(_Timespec(whole, int((seconds - whole) * 1e9)))


def connect(
    group: dist.ProcessGroup, semaphores: Sequence[int], numbers: int, data: int
) -> Segment | None:
    """A segment for the ranks of the default group, which all call this; None as `share_file`.

    Args:
        semaphores: their first values.
        numbers: how many the ranks share.
        data: [B] that the ranks share.
    """

    def open_segment(path: Path) -> Segment:
        limit = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        segment = Segment(path, len(semaphores), numbers, limit)
        if dist.get_rank() == 0:
            segment.prepare(semaphores)
        return segment

    segment = share_file((len(semaphores) + numbers) * CACHE_LINE + data, open_segment)
    if segment is None:
        return None
    if not _all_ranks(segment.enter()):
        segment.leave()
        return None
    weakref.finalize(group, segment.leave)
    return segment


def _all_ranks(flag: bool) -> bool:
    everywhere = torch.tensor(int(flag), device="cpu")
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    return bool(everywhere.item())


def share_file(nbytes: int, open_file: Callable[[Path], T]) -> T | None:
    """What every rank of the default group makes of a file of so many bytes; all call this.

    None where the ranks are on several machines, where the system has no shared memory, or where
    there is too little. The file is memory that never has a name, so nothing is left of it
    wherever a process ends: the others open it by the descriptor of rank 0, which keeps it until
    all have.
    """
    held = _reserve(nbytes) if dist.get_rank() == 0 else None
    try:
        message = [None if held is None else (held, os.getpid(), os.readlink(_descriptor(held)))]
        dist.broadcast_object_list(message, src=0)
        if message[0] is None:
            return None
        descriptor, process, name = message[0]
        path = _descriptor(descriptor, process)
        opened = None
        with suppress(OSError):
            if os.readlink(path) == name:  # else a process of another machine has that number
                opened = open_file(path)
        everywhere = _all_ranks(opened is not None)  # all have opened it, or never will
    finally:
        if held is not None:
            os.close(held)
    return opened if everywhere else None


def _descriptor(number: int, process: int | str = "self") -> Path:
    return Path(f"/proc/{process}/fd/{number}")


def _reserve(size: int) -> int | None:
    """A file of so many bytes that memory backs already: later it cannot run out."""
    if not hasattr(os, "memfd_create") or size > FREE_SHARE * _free_memory():
        return None
    descriptor = None
    try:
        descriptor = os.memfd_create(f"hyperslab-{uuid.uuid4().hex}")
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def _free_memory() -> int:
    """What the machine could give now [B]: asked for more, the system would kill a process."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
