"""Memory that the ranks of one machine share, and semaphores in it to wait for each other.

POSIX semaphores order memory: what a rank wrote before it posts is seen by the rank that waits,
on every processor.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import time
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from hyperslab.errors import CommError

FOLDER = Path("/dev/shm")
LINE = 64  # [B] a cache line: semaphores on one line would slow each other down
SPINS = 400  # tries, of half a microsecond each, before a waiting rank goes to sleep
CHECK = 0.2  # [s] between two looks at whether the rank that is waited for still lives


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Segment:
    """A block of memory that all ranks map; made by `connect`.

    It begins with one line per rank, whose first byte says that the rank has left, and with
    ``semaphores`` semaphores. Then come ``data`` bytes.
    """

    def __init__(self, path: Path, rank: int, semaphores: int, data: int, limit: float) -> None:
        self.rank, self.limit = rank, limit
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        first = self.bytes.data_ptr() + self.bytes.numel() - data - semaphores * LINE
        self._semaphores = [ctypes.c_void_p(first + n * LINE) for n in range(semaphores)]
        self.data = self.bytes[self.bytes.numel() - data :]
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._peers: dict[int, int] = {}  # rank to process descriptor
        self._spins = 0

    def prepare(self, semaphores: Sequence[int]) -> None:
        """Give every semaphore its first value; one rank does, before anybody uses them."""
        for number, value in enumerate(semaphores):
            if self._libc.sem_init(self._semaphores[number], 1, value) != 0:
                raise OSError(ctypes.get_errno(), "sem_init")

    def watch(self, processes: Sequence[int]) -> None:
        """From now on notice when one of the ranks' processes ends."""
        for rank, process in enumerate(processes):
            if rank != self.rank:
                self._peers[rank] = os.pidfd_open(process)
        # With fewer cores than ranks, one that spins keeps another from running.
        self._spins = SPINS if len(os.sched_getaffinity(0)) >= len(processes) else 1

    def leave(self) -> None:
        """Tell the others that this rank will not answer any more."""
        self._map[self.rank * LINE] = 1
        while self._peers:
            os.close(self._peers.popitem()[1])

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
                raise self._lost(peer, what, "it has ended")
            if time.monotonic() - begin > self.limit:
                raise self._lost(peer, what, f"no answer within {self.limit:.0f} s")

    def _timed_wait(self, address: ctypes.c_void_p, seconds: float) -> bool:
        until = time.time() + seconds
        limit = _Timespec(int(until), int(until % 1 * 1e9))
        return bool(self._libc.sem_timedwait(address, ctypes.byref(limit)) == 0)

    def _alive(self, peer: int) -> bool:
        if self._map[peer * LINE]:
            return False
        poll = select.poll()
        poll.register(self._peers[peer], select.POLLIN)
        return not poll.poll(0)

    def _lost(self, peer: int, what: str, why: str) -> CommError:
        return CommError(f"rank {self.rank} lost contact with rank {peer} during {what}: {why}")


def connect(group: dist.ProcessGroup, semaphores: Sequence[int], data: int) -> Segment | None:
    """A segment for the ranks of the default group, which all call this; None if there is none.

    None where the ranks are on several machines, where the system has no shared memory, where
    that is full, or where processes cannot see each other.

    Args:
        semaphores: their first values.
        data: [B] that the ranks share.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    message: list[str | None] = [None]
    if rank == 0:
        message[0] = _reserve(size * LINE + len(semaphores) * LINE + data)
    dist.broadcast_object_list(message, src=0)
    if message[0] is None:
        return None
    path = FOLDER / message[0]
    try:
        segment = _open(path, group, semaphores, data)
    finally:
        dist.barrier()  # all have opened it, or never will
        if rank == 0:
            path.unlink()
    if segment is not None:
        weakref.finalize(group, segment.leave)
    return segment


def _reserve(size: int) -> str | None:
    """The name of a file of so many bytes that memory backs already: later it cannot run out."""
    name = f"hyperslab-{uuid.uuid4().hex}"
    try:
        descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return None
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        (FOLDER / name).unlink()
        return None
    finally:
        os.close(descriptor)
    return name


def _open(
    path: Path, group: dist.ProcessGroup, semaphores: Sequence[int], data: int
) -> Segment | None:
    limit = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    segment: Segment | None = None
    try:
        segment = Segment(path, dist.get_rank(), len(semaphores), data, limit)
        if dist.get_rank() == 0:
            segment.prepare(semaphores)
    except OSError:
        segment = None
    processes: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    try:
        if segment is not None:
            segment.watch(processes)
    except OSError:
        segment = None
    everywhere = torch.tensor(int(segment is not None))
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    return segment if everywhere.item() else None
