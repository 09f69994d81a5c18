"""Sends messages and sums tensors through memory that the ranks of one machine share.

gloo sends them over loopback sockets, through a thread of its own and several copies: 0.3 ms for
a message that takes 0.02 ms here, and four times the time for the sum of a network's gradients.

In reading order: a `Segment` of memory with semaphores; `RankPairs`, by which ranks wait for
each other; `shared_buffers`, large tensors that all ranks map; sums; messages. POSIX semaphores
order memory: what a rank wrote before it posts is seen by the rank that waits, on every
processor.

Legend: every rank has an *area* in which it shows the others its part of a sum; a *chunk* is
what half an area holds. Every ordered pair of ranks has a *channel* of `SLOTS` slots for
messages.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from hyperslab.comm.agreement import lost_contact
from hyperslab.errors import CommError
from hyperslab.kernels.memory_format import CHANNELS_LAST
from hyperslab.util.torch_internals import time_limit_of

T = TypeVar("T")

MOST_OF_FREE_MEMORY = 0.5  # of the memory that is free: what ranks share is at most that
CACHE_LINE = 64  # [B] a cache line: semaphores on one line would slow each other down
SPINS = 4000  # tries, of half a microsecond each, before a waiting rank goes to sleep
LIVENESS_CHECK = 0.2  # [s] between two looks at whether the rank that is waited for still lives


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Segment:
    """Maps a block of memory on all ranks; made by `connect_segment`.

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
            if self._timed_wait(address, LIVENESS_CHECK if alive else 0):
                return
            if not alive:
                raise lost_contact(self.rank, [peer], what, "it has ended")
            if time.monotonic() - begin > self.limit:
                why = f"no answer within {self.limit:.0f} s"
                raise lost_contact(self.rank, [peer], what, why)

    def _timed_wait(self, address: ctypes.c_void_p, seconds: float) -> bool:
        """Tell whether there was a post in time; a signal may end the wait early."""
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


def connect_segment(
    group: dist.ProcessGroup, semaphores: Sequence[int], numbers: int, data: int
) -> Segment | None:
    """Make a segment for the ranks of the default group, which all call this; None as `share_file`.

    Args:
        semaphores: their first values.
        numbers: how many the ranks share.
        data: [B] that the ranks share.
    """

    def open_segment(path: Path) -> Segment:
        limit = time_limit_of(group, torch.device("cpu")).total_seconds()
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
    """Return what every rank of the default group makes of one file of a size; all call this.

    None where the ranks are on several machines, where the system has no shared memory, or where
    there is too little. The file is memory that never has a name, so nothing is left of it
    wherever a process ends: the others open it by the descriptor of rank 0, which keeps it until
    all have.
    """
    held = _reserve_file(nbytes) if dist.get_rank() == 0 else None
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


def _reserve_file(size: int) -> int | None:
    """Make a file that memory backs already, so that it cannot run out later."""
    if not hasattr(os, "memfd_create") or size > MOST_OF_FREE_MEMORY * _free_memory():
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
    """Return what the machine could give now [B]: for more, the system would kill a process."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


SLOT_FULL, SLOT_FREE, SUM_TOKEN = range(3)
"""Number a pair's semaphores: a message came, a slot is free, the sender advanced in a sum."""

FIRST_SEMAPHORE_VALUES = (0, 2, 0)
"""Two slots are free at the beginning."""

SLOTS = FIRST_SEMAPHORE_VALUES[SLOT_FREE]


class RankPairs:
    """Waits for ranks of a segment, and posts to them; ``index`` numbers the ordered pairs."""

    def __init__(self, segment: Segment, size: int) -> None:
        self._segment = segment
        self.index = {pair: i for i, pair in enumerate(itertools.permutations(range(size), 2))}
        self._first = {pair: i * len(FIRST_SEMAPHORE_VALUES) for pair, i in self.index.items()}

    def post(self, sender: int, receiver: int, kind: int) -> None:
        self._segment.post(self._first[sender, receiver] + kind)

    def wait(self, sender: int, receiver: int, kind: int, peer: int, what: str) -> None:
        """Until there is a post for this rank, which is the sender or the receiver.

        Raises:
            CommError: see `Segment.wait`.
        """
        self._segment.wait(self._first[sender, receiver] + kind, peer, what)


PAGE_BYTES = 4096  # [B]


def shared_buffers(nbytes: int) -> list[torch.Tensor] | None:
    """Memory of so many bytes of each rank of the default group, by rank; all ranks call this.

    It begins as zeros and lasts as long as a tensor in it. None where ranks cannot share memory, or
    where there is not as much (see `share_file`).
    """
    each = -(-max(nbytes, 1) // PAGE_BYTES) * PAGE_BYTES
    whole = share_file(each * dist.get_world_size(), _map_file)
    if whole is None:
        return None
    with torch.inference_mode(False):  # or they could not be written to outside that mode
        return [part[:nbytes] for part in whole.split(each)]


def _map_file(path: Path) -> torch.Tensor:
    with path.open("r+b", buffering=0) as file, torch.inference_mode(False):
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


SMALL_SUM = 16 << 10  # [B] up to which every rank adds up everything by itself
ALL_AREAS = 16 << 20  # [B] of all areas together
LARGEST_AREA = 4 << 20  # [B] of one: two chunks that the processor's cache holds
SUM_PIECE = 1 << 16  # numbers that are added up at once: they stay in the processor's cache
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Shown:
    """``parts``: one of every rank, flat and as large as the others. The numbers of those ranks
    that ``terms`` names are added up; others' are zero.
    """

    parts: Sequence[torch.Tensor]
    terms: Sequence[int]


class SharedSums:
    """Sums in place; every rank gets the same bits, because one rank adds up each element, or all
    do in the order of the ranks. Half precision is added up in float32.
    """

    def __init__(self, segment: Segment, rank: int, areas: torch.Tensor, pairs: RankPairs) -> None:
        """``areas`` are bytes, (ranks, bytes of one)."""
        self.rank = rank
        self.chunk = areas.shape[1] // 2  # [B]
        self._segment = segment
        self._areas = areas
        self._pairs = pairs
        self._views: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._readers: list[int] = []  # who may still read this rank's area

    def all_reduce(self, x: torch.Tensor, ranks: Sequence[int], what: str, scale: float) -> None:
        """``scale`` times the sum over ``ranks``, in place of a contiguous tensor.

        Raises:
            CommError: another rank adds up something of another size, or see `Segment.wait`.
        """
        others = [rank for rank in ranks if rank != self.rank]
        self._may_write(what)
        self._segment.numbers[self.rank] = x.nbytes
        if x.nbytes <= SMALL_SUM:
            self._sum_all(x, ranks, others, what, scale)
        else:
            _ChunkedSum(self, x.view(-1), ranks, others, scale).run(what)
        self._readers = others
        for rank in others:
            self._pairs.post(self.rank, rank, SUM_TOKEN)

    def average_shown(self, sums: Iterable[Shown], what: str, *, nbytes: int) -> None:
        """Replace tensors that all ranks map by the mean over all of them.

        A number is read where it was written, and its mean is written where it belongs; of every
        sum each rank that has a term does so for its share of the numbers.

        Args:
            sums: the same ones on all ranks; asked for when all have met, so that a generator can
                look at what the others show.
            what: for errors.
            nbytes: of the memory that they are in.

        Raises:
            CommError: see `all_reduce`.
        """
        others = [rank for rank in range(len(self._areas)) if rank != self.rank]
        self._may_write(what)
        self._segment.numbers[self.rank] = nbytes
        self.meet(others, what)
        self.check(others, nbytes, what)
        for shown in sums:
            if self.rank in shown.terms:
                _average_share(shown, self.rank)
        self.meet(others, what)

    def _sum_all(
        self, x: torch.Tensor, ranks: Sequence[int], others: list[int], what: str, scale: float
    ) -> None:
        """Sum ``x`` over the ranks: 1. show the own part, 2. add up everybody's."""
        parts = self._small_views(x)
        x = x.view(-1)
        parts[self.rank].copy_(x)
        self.meet(others, what)
        self.check(others, x.nbytes, what)
        _add_up([parts[rank] for rank in ranks], x, scale)

    def _small_views(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return all ranks' areas, as far as ``x`` fills them."""
        key = (x.numel(), x.dtype)
        if key not in self._views:
            with torch.inference_mode(False):  # or they could not be written to outside that mode
                self._views[key] = [area[: x.nbytes].view(x.dtype) for area in self._areas]
        return self._views[key]

    def shown(self, rank: int, number: int, begin: int, like: torch.Tensor) -> torch.Tensor:
        """Return what a rank shows from a byte of a chunk on; two chunks take turns in an area."""
        begin += number % 2 * self.chunk
        return self._areas[rank, begin : begin + like.nbytes].view(like.dtype)

    def meet(self, others: Sequence[int], what: str) -> None:
        """Wait until all have shown what they have to show."""
        for rank in others:
            self._pairs.post(self.rank, rank, SUM_TOKEN)
        for rank in others:
            self._pairs.wait(rank, self.rank, SUM_TOKEN, rank, what)

    def check(self, others: Sequence[int], nbytes: int, what: str) -> None:
        """Ranks that are at different places of a program must not take each other's numbers."""
        for rank in others:
            check_size(self.rank, rank, nbytes, self._segment.numbers[rank], what)

    def _may_write(self, what: str) -> None:
        """Wait until nobody reads what the own area held."""
        while self._readers:
            reader = self._readers[-1]
            self._pairs.wait(reader, self.rank, SUM_TOKEN, reader, what)
            self._readers.pop()


class _ChunkedSum:
    """Computes one large sum, chunk by chunk; every rank adds up its share of each.

    Steps of a chunk: 1. show the others their shares of the own numbers, 2. add up the own share of
    everybody's and show it, 3. take the others' shares. All meet after each. While a rank is at
    step 2 of one chunk it does step 1 of the next, so there is one meeting a chunk. A share always
    has the same place in a chunk, also in the last one: what a rank writes at step 1 is never where
    others still read at step 3 of the chunk before the last.
    """

    def __init__(
        self,
        sums: SharedSums,
        x: torch.Tensor,
        ranks: Sequence[int],
        others: Sequence[int],
        scale: float,
    ) -> None:
        self.sums = sums
        self.nbytes = x.nbytes
        self.others = others
        self.scale = scale
        place = sums.chunk // len(ranks) // CACHE_LINE * CACHE_LINE  # [B] of a share
        self.places = {rank: i * place for i, rank in enumerate(ranks)}
        chunks = x.split(place // x.element_size() * len(ranks))
        self.shares = [
            dict(zip(ranks, chunk.tensor_split(len(ranks)), strict=True)) for chunk in chunks
        ]

    def run(self, what: str) -> None:
        self._show(0)
        self.sums.meet(self.others, what)
        self.sums.check(self.others, self.nbytes, what)
        for number in range(len(self.shares)):
            self._add_up(number)
            if number + 1 < len(self.shares):
                self._show(number + 1)
            self.sums.meet(self.others, what)
            self._take(number)

    def _show(self, number: int) -> None:
        for rank in self.others:
            share = self.shares[number][rank]
            shown = self.sums.shown(self.sums.rank, number, self.places[rank], share)
            if self.scale == 1.0 or share.dtype in _HALF:
                shown.copy_(share)
            else:
                torch.mul(share, self.scale, out=shown)

    def _add_up(self, number: int) -> None:
        me = self.sums.rank
        own = self.shares[number][me]
        at = self.places[me]
        terms = [self.sums.shown(rank, number, at, own) for rank in self.others]
        total = self.sums.shown(me, number, at, own)
        if own.dtype in _HALF:
            _add_up([own, *terms], total, self.scale)
        else:  # the others' are scaled already
            alpha = {} if self.scale == 1.0 else {"alpha": self.scale}
            torch.add(terms[0], own, **alpha, out=total)
            for term in terms[1:]:
                total.add_(term)
        own.copy_(total)

    def _take(self, number: int) -> None:
        for rank in self.others:
            share = self.shares[number][rank]
            share.copy_(self.sums.shown(rank, number, self.places[rank], share))


def area_bytes(size: int) -> int:
    """Return the size of each rank's area [B]."""
    return max(2 * SMALL_SUM, min(LARGEST_AREA, ALL_AREAS // size) // 4096 * 4096)


def check_size(rank: int, peer: int, expected: int, found: int, what: str) -> None:
    """Raises:
    CommError: a rank shows something of another size than this one expects.
    """
    if found != expected:
        raise CommError(
            f"rank {rank} expected {expected} B from rank {peer} during {what} but "
            f"got {found} B\n    run the same operations in the same order on every rank"
        )


def _average_share(shown: Shown, rank: int) -> None:
    """Divide a rank's share of the sum over the terms by the number of ranks, for all to see."""
    places = [rank, *(term for term in shown.terms if term != rank)]
    places += [place for place in range(len(shown.parts)) if place not in places]
    share = shown.terms.index(rank)
    shares = [shown.parts[place].tensor_split(len(shown.terms))[share] for place in places]
    for pieces in zip(*(part.split(SUM_PIECE) for part in shares), strict=True):
        own, *copies = pieces
        terms = copies[: len(shown.terms) - 1]
        if own.dtype in _HALF:
            own.copy_(_sum_wide([own, *terms]).mul_(1 / len(places)))
        else:
            for term in terms:
                own.add_(term)
            own.mul_(1 / len(places))
        for copy in copies:
            copy.copy_(own)


def _add_up(terms: Sequence[torch.Tensor], out: torch.Tensor, scale: float) -> None:
    """``out`` may be one of the terms only where it is of half precision."""
    if out.dtype not in _HALF:
        torch.add(terms[0], terms[1], out=out)
        for term in terms[2:]:
            out.add_(term)
        if scale != 1.0:
            out.mul_(scale)
        return
    total = _sum_wide(terms)
    out.copy_(total if scale == 1.0 else total.mul_(scale))


def _sum_wide(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    wide = torch.float32 if terms[0].dtype in _HALF else terms[0].dtype
    total = terms[0].to(wide, copy=True)
    for term in terms[1:]:
        total += term.to(wide)
    return total


ALL_SLOTS = 32 << 20  # [B] of all slots together
LARGEST_SLOT = 4 << 20  # [B] of one slot: what is larger goes through a socket and is copied for it


class SharedChannels:
    """Holds what the ranks of one machine share; see `connect_ranks`.

    A message fits if it fills no more than one slot; larger ones go through the process group.
    Two slots are enough that nobody ever waits for a free one in a circle: a rank sends at most
    one message to another before it receives that one's, so at most two are under way.
    """

    def __init__(self, segment: Segment, rank: int, size: int, slot: int) -> None:
        self.segment = segment
        self.rank = rank
        self.slot = slot
        self._pairs = RankPairs(segment, size)
        count = len(self._pairs.index)
        slots = count * SLOTS * slot
        areas = segment.data[slots : slots + size * area_bytes(size)].view(size, -1)
        self._slots = segment.data[:slots].view(count, SLOTS, slot)
        self._sums = SharedSums(segment, rank, areas, self._pairs)
        self._sent = dict.fromkeys(range(size), 0)
        self._received = dict.fromkeys(range(size), 0)
        self._views: dict[Hashable, torch.Tensor] = {}

    def fits(self, x: torch.Tensor) -> bool:
        """Tell whether a message of this shape and type goes through a slot."""
        return x.device.type == "cpu" and x.nbytes <= self.slot

    def send(self, x: torch.Tensor, peer: int, what: str) -> None:
        """Put ``x``, contiguous or not, where ``peer`` finds it.

        It travels in the order in which it lies in memory: with the channels last if they are.
        """
        self._pairs.wait(self.rank, peer, SLOT_FREE, peer, what)
        last = _channels_last(x)
        self._slot(self.rank, peer, self._sent[peer], x, last).copy_(x)
        number = self._number(self.rank, peer, self._sent[peer])
        self.segment.numbers[number] = 2 * x.nbytes + last
        self._sent[peer] += 1
        self._pairs.post(self.rank, peer, SLOT_FULL)

    def receive(self, out: torch.Tensor, peer: int, what: str) -> None:
        """Fill ``out`` with the next message of ``peer``.

        Raises:
            CommError: that is not as large as ``out``, or see `Segment.wait`.
        """
        self._pairs.wait(peer, self.rank, SLOT_FULL, peer, what)
        number = self._number(peer, self.rank, self._received[peer])
        found, last = divmod(self.segment.numbers[number], 2)
        check_size(self.rank, peer, out.nbytes, found, what)
        out.copy_(self._slot(peer, self.rank, self._received[peer], out, bool(last)))
        self._received[peer] += 1
        self._pairs.post(peer, self.rank, SLOT_FREE)

    def all_reduce(
        self, x: torch.Tensor, ranks: Sequence[int], what: str, scale: float = 1.0
    ) -> None:
        """``scale`` times the sum over ``ranks``, in place; see `SharedSums.all_reduce`."""
        self._sums.all_reduce(x, ranks, what, scale)

    def average_shown(self, sums: Iterable[Shown], what: str, *, nbytes: int) -> None:
        """Average over all ranks in memory that all map; see `SharedSums.average_shown`."""
        self._sums.average_shown(sums, what, nbytes=nbytes)

    def _slot(
        self, sender: int, receiver: int, number: int, like: torch.Tensor, last: bool
    ) -> torch.Tensor:
        """Return the part of a slot that a message fills, with its channels ``last`` or not."""
        key = (sender, receiver, number % SLOTS, like.shape, like.dtype, last)
        if key not in self._views:
            slot = self._slots[self._pairs.index[sender, receiver], number % SLOTS]
            with torch.inference_mode(False):  # or it could not be written to outside that mode
                flat = slot[: like.nbytes].view(like.dtype)
                if last:
                    n, channels, *space = like.shape
                    view = flat.view(n, *space, channels).movedim(-1, 1)
                else:
                    view = flat.view(like.shape)
                self._views[key] = view
        return self._views[key]

    def _number(self, sender: int, receiver: int, number: int) -> int:
        """Locate twice the size [B] of a message, and one more if its channels are last.

        The sizes of the areas stand before them all.
        """
        return len(self._sent) + SLOTS * self._pairs.index[sender, receiver] + number % SLOTS


def _channels_last(x: torch.Tensor) -> bool:
    return x.dim() in CHANNELS_LAST and x.stride(1) == 1 and not x.is_contiguous()


_OF_GROUP: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedChannels | None] = (
    weakref.WeakKeyDictionary()
)
"""Belongs to the process group, which may have several grids, and ends with it."""


def connect_ranks() -> None:
    """Let the ranks of the default process group share memory if they can; all ranks call this.

    From then on all of them must exchange messages in the same order.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is not None and group not in _OF_GROUP:
        _OF_GROUP[group] = _make_channels(group) if _can_share() else None


def shared_channels() -> SharedChannels | None:
    """Return what `connect_ranks` made for the default process group."""
    group = dist.group.WORLD
    return None if group is None else _OF_GROUP.get(group)


def _can_share() -> bool:
    return sys.platform == "linux" and dist.get_backend() == "gloo" and dist.get_world_size() > 1


def _make_channels(group: dist.ProcessGroup) -> SharedChannels | None:
    size = dist.get_world_size()
    pairs = size * (size - 1)
    numbers = size + pairs * SLOTS
    segment = connect_segment(group, FIRST_SEMAPHORE_VALUES * pairs, numbers, shared_bytes(size))
    return (
        None
        if segment is None
        else SharedChannels(segment, dist.get_rank(), size, _slot_bytes(size))
    )


def shared_bytes(size: int) -> int:
    """Return the size of all slots and areas of a machine's ranks [B].

    >>> shared_bytes(1), shared_bytes(2) >> 20
    (0, 24)
    """
    pairs = size * (size - 1)
    return pairs * SLOTS * _slot_bytes(size) + size * area_bytes(size) if pairs else 0


def _slot_bytes(size: int) -> int:
    """Return the size of one slot [B]."""
    return min(LARGEST_SLOT, ALL_SLOTS // (size * (size - 1) * SLOTS)) // 4096 * 4096
