"""Sends messages and sums tensors through memory that the ranks of one machine share.

gloo sends them over loopback sockets, through a thread of its own and several copies: 0.3 ms for
a message that takes 0.02 ms here, and four times the time for the sum of a network's gradients.

In reading order: `share_file`, memory that all ranks open; `shared_buffers`, large tensors that
all ranks map; a `Segment` of memory with semaphores, by which ranks wait for each other;
`SharedChannels`, messages and sums. POSIX semaphores order memory: what a rank wrote before it
posts is seen by the rank that waits, on every processor.

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

from hyperslab.comm.agreement import OUT_OF_STEP, lost_contact
from hyperslab.comm.bootstrap import backend_of, own_rank, ranks_in, world
from hyperslab.errors import CommError
from hyperslab.kernels.memory_format import CHANNELS_LAST
from hyperslab.util.free_memory import free_memory
from hyperslab.util.torch_internals import time_limit_of

T = TypeVar("T")

MOST_OF_FREE_MEMORY = 0.5  # of the memory that is free: what ranks share is at most that


def share_file(nbytes: int, open_file: Callable[[Path], T]) -> T | None:
    """Return what every rank makes of one file of a size; all call this.

    None where the ranks are on several machines, where the system has no shared memory, or where
    there is too little. The file is memory that never has a name, so nothing is left of it
    wherever a process ends: the others open it by the descriptor of rank 0, which keeps it until
    all have.
    """
    held = _reserve_file(nbytes) if own_rank() == 0 else None
    try:
        message = [None if held is None else (held, os.getpid(), os.readlink(_descriptor(held)))]
        dist.broadcast_object_list(message, group=world(), group_src=0)
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
    descriptor = None
    try:
        if not hasattr(os, "memfd_create") or size > MOST_OF_FREE_MEMORY * free_memory():
            return None
        descriptor = os.memfd_create(f"hyperslab-{uuid.uuid4().hex}")
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


def _all_ranks(flag: bool) -> bool:
    everywhere = torch.tensor(int(flag), device="cpu")
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=world())
    return bool(everywhere.item())


def shared_buffers(nbytes: int) -> list[torch.Tensor] | None:
    """Return memory of ``nbytes`` of each rank, by rank; all ranks call this.

    It begins as zeros and lasts as long as a tensor in it. None as `share_file`.
    """

    def map_file(path: Path) -> torch.Tensor:
        with path.open("r+b", buffering=0) as file, torch.inference_mode(False):
            return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)

    each = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = share_file(each * ranks_in(), map_file)
    if whole is None:
        return None
    with torch.inference_mode(False):  # or they could not be written to outside that mode
        return [part[:nbytes] for part in whole.split(each)]


CACHE_LINE = 64  # [B] a cache line: semaphores on one line would slow each other down
SPINS = 4000  # tries, of half a microsecond each, before a waiting rank goes to sleep
LIVENESS_CHECK = 0.2  # [s] between two looks at whether the rank that is waited for still lives

SLOT_FULL, SLOT_FREE, SUM_TOKEN = range(3)
"""Number a pair's semaphores: a message came, a slot is free, the sender advanced in a sum."""

SLOTS = 2
FIRST_SEMAPHORE_VALUES = (0, SLOTS, 0)


class Segment:
    """Maps a block of memory on all ranks, by which they wait for each other.

    It begins with the semaphores of every ordered pair of ranks and as many whole numbers as
    ``numbers``, each on a line of its own. Then come ``data``, the remaining bytes.

    Every rank locks one byte of the file. However its process ends, the system takes that lock
    away at once, and it does not need to show processes to each other for that.
    """

    def __init__(self, path: Path, numbers: int, limit: float) -> None:
        self.rank = own_rank()
        self.limit = limit
        pairs = itertools.permutations(range(ranks_in()), 2)
        self.pairs = {pair: number for number, pair in enumerate(pairs)}
        self._file = path.open("r+b", buffering=0)
        memory = mmap.mmap(self._file.fileno(), 0)
        with torch.inference_mode(False):  # or it could not be written to outside that mode
            whole = torch.frombuffer(memory, dtype=torch.uint8)
        kinds = [(*pair, kind) for pair in self.pairs for kind in range(3)]
        begin = len(kinds) * CACHE_LINE
        end = begin + numbers * CACHE_LINE
        lines = range(whole.data_ptr(), whole.data_ptr() + begin, CACHE_LINE)
        self._semaphores = dict(zip(kinds, map(ctypes.c_void_p, lines), strict=True))
        self.numbers = memoryview(memory)[begin:end].cast("q")[:: CACHE_LINE // 8]
        self.data = whole[end:]
        self._libc = ctypes.CDLL(None, use_errno=True)
        # With fewer cores than ranks, one that spins keeps another from running; or a program
        # beside them, of which users tell OpenMP's threads in this way.
        enough = len(os.sched_getaffinity(0)) >= ranks_in()
        asleep = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
        self._spins = SPINS if enough and not asleep else 1

    def prepare(self) -> None:
        """Give every semaphore its first value; one rank does, before anybody uses them."""
        for (_, _, kind), semaphore in self._semaphores.items():
            if self._libc.sem_init(semaphore, 1, FIRST_SEMAPHORE_VALUES[kind]) != 0:
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

    def post(self, sender: int, receiver: int, kind: int) -> None:
        self._libc.sem_post(self._semaphores[sender, receiver, kind])

    def wait(self, sender: int, receiver: int, kind: int, what: str) -> None:
        """Wait for a post of the other rank of a pair, of which this one is the other.

        Raises:
            CommError: it has left, its process has ended, or the time limit has passed.
        """
        semaphore = self._semaphores[sender, receiver, kind]
        for _ in range(self._spins):
            if self._libc.sem_trywait(semaphore) == 0:
                return
        peer = receiver if sender == self.rank else sender
        begin = time.monotonic()
        while True:
            alive = self._alive(peer)  # before the last try: it may have posted, then left
            if self._timed_wait(semaphore, LIVENESS_CHECK if alive else 0):
                return
            if not alive:
                raise lost_contact(self.rank, [peer], what, "it has ended")
            if time.monotonic() - begin > self.limit:
                why = f"no answer within {self.limit:.0f} s"
                raise lost_contact(self.rank, [peer], what, why)

    def _timed_wait(self, semaphore: ctypes.c_void_p, seconds: float) -> bool:
        """Tell whether there was a post in time; a signal may end the wait early."""
        if hasattr(self._libc, "sem_clockwait"):
            until = _timespec(time.monotonic() + seconds)
            return bool(self._libc.sem_clockwait(semaphore, time.CLOCK_MONOTONIC, until) == 0)
        # Before glibc 2.30 there is only the clock that can be set: a post always ends the wait,
        # but after setting that clock back it is late to notice that the rank has ended.
        return bool(self._libc.sem_timedwait(semaphore, _timespec(time.time() + seconds)) == 0)

    def _alive(self, peer: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, peer)
        except BlockingIOError:
            return True
        return False


def _timespec(seconds: float) -> ctypes.Array[ctypes.c_long]:
    """Return a ``struct timespec``: seconds and nanoseconds."""
    return (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))


ALL_SLOTS = 32 << 20  # [B] of all slots together
LARGEST_SLOT = 4 << 20  # [B] of one slot: what is larger goes through a socket and is copied for it
SMALL_SUM = 16 << 10  # [B] up to which every rank adds up everything by itself
ALL_AREAS = 16 << 20  # [B] of all areas together
LARGEST_AREA = 4 << 20  # [B] of one: two chunks that the processor's cache holds
SUM_PIECE = 1 << 16  # numbers that are added up at once: they stay in the processor's cache
_HALF = (torch.float16, torch.bfloat16)


def _slot_bytes(size: int) -> int:
    """Return the size of one slot [B]."""
    return min(LARGEST_SLOT, ALL_SLOTS // (size * (size - 1) * SLOTS)) // 4096 * 4096


def _area_bytes(size: int) -> int:
    """Return the size of each rank's area [B]."""
    return max(2 * SMALL_SUM, min(LARGEST_AREA, ALL_AREAS // size) // 4096 * 4096)


def shared_bytes(size: int) -> int:
    """Return the size of all slots and areas of a machine's ranks [B].

    >>> shared_bytes(1), shared_bytes(2) >> 20
    (0, 24)
    """
    pairs = size * (size - 1)
    return pairs * SLOTS * _slot_bytes(size) + size * _area_bytes(size) if pairs else 0


@dataclass(frozen=True, slots=True)
class Shown:
    """``parts``: one of every rank, flat and as large as the others. The numbers of those ranks
    that ``terms`` names are added up; others' are zero.
    """

    parts: Sequence[torch.Tensor]
    terms: Sequence[int]


class SharedChannels:
    """Carries messages and sums between the ranks of one machine; see `connect_ranks`.

    A message fits if it fills no more than one slot; larger ones go through the process group.
    Two slots are enough that nobody ever waits for a free one in a circle: a rank sends at most
    one message to another before it receives that one's, so at most two are under way.

    Sums are in place, and every rank gets the same bits, because one rank adds up each element, or
    all do in the order of the ranks. Half precision is added up in float32.
    """

    def __init__(self, segment: Segment, size: int) -> None:
        self.segment = segment
        self.rank = segment.rank
        self.size = size
        self.slot = _slot_bytes(size)
        slots = len(segment.pairs) * SLOTS * self.slot
        self._slots = segment.data[:slots].view(-1, self.slot)
        self._areas = segment.data[slots : slots + size * _area_bytes(size)].view(size, -1)
        self._sent = [0] * size
        self._received = [0] * size
        self._views: dict[Hashable, torch.Tensor] = {}
        self._small_views: dict[Hashable, list[torch.Tensor]] = {}
        self._readers: list[int] = []  # who may still read this rank's area

    def fits(self, x: torch.Tensor) -> bool:
        """Tell whether a message of this shape and type goes through a slot."""
        return x.device.type == "cpu" and x.nbytes <= self.slot

    def send(self, x: torch.Tensor, peer: int, what: str) -> None:
        """Put ``x``, contiguous or not, where ``peer`` finds it.

        It travels in the order in which it lies in memory: with the channels last if they are.
        """
        self.segment.wait(self.rank, peer, SLOT_FREE, what)
        slot = SLOTS * self.segment.pairs[self.rank, peer] + self._sent[peer] % SLOTS
        last = x.dim() in CHANNELS_LAST and x.stride(1) == 1 and not x.is_contiguous()
        self._message(slot, x, last).copy_(x)
        # One number for both: twice the size [B], and one more if the channels are last.
        self.segment.numbers[self.size + slot] = 2 * x.nbytes + last
        self._sent[peer] += 1
        self.segment.post(self.rank, peer, SLOT_FULL)

    def receive(self, out: torch.Tensor, peer: int, what: str) -> None:
        """Fill ``out`` with the next message of ``peer``.

        Raises:
            CommError: that is not as large as ``out``, or see `Segment.wait`.
        """
        self.segment.wait(peer, self.rank, SLOT_FULL, what)
        slot = SLOTS * self.segment.pairs[peer, self.rank] + self._received[peer] % SLOTS
        found, last = divmod(self.segment.numbers[self.size + slot], 2)
        self._check_size(peer, out.nbytes, found, what)
        out.copy_(self._message(slot, out, bool(last)))
        self._received[peer] += 1
        self.segment.post(peer, self.rank, SLOT_FREE)

    def _message(self, slot: int, like: torch.Tensor, last: bool) -> torch.Tensor:
        """Return the part of a slot that a message fills, with its channels ``last`` or not."""
        key = (slot, like.shape, like.dtype, last)
        if key not in self._views:
            with torch.inference_mode(False):  # or it could not be written to outside that mode
                flat = self._slots[slot, : like.nbytes].view(like.dtype)
                if last:
                    n, channels, *space = like.shape
                    self._views[key] = flat.view(n, *space, channels).movedim(-1, 1)
                else:
                    self._views[key] = flat.view(like.shape)
        return self._views[key]

    def all_reduce(self, x: torch.Tensor, ranks: Sequence[int], what: str) -> None:
        """Write the sum over ``ranks`` in place of a contiguous tensor.

        Raises:
            CommError: another rank adds up something of another size, or see `Segment.wait`.
        """
        others = [rank for rank in ranks if rank != self.rank]
        self._begin_sum(x.nbytes, what)
        if x.nbytes <= SMALL_SUM:
            self._sum_small(x.view(-1), ranks, others, what)
        else:
            self._sum_in_chunks(x.view(-1), ranks, others, what)
        self._readers = others
        for rank in others:
            self.segment.post(self.rank, rank, SUM_TOKEN)

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
        others = [rank for rank in range(self.size) if rank != self.rank]
        self._begin_sum(nbytes, what)
        self._meet_first(others, nbytes, what)
        for shown in sums:
            if self.rank in shown.terms:
                _average_share(shown, self.rank)
        self._meet(others, what)

    def _begin_sum(self, nbytes: int, what: str) -> None:
        """Say what this rank adds up, once nobody reads any more what its area held."""
        while self._readers:
            self.segment.wait(self._readers[-1], self.rank, SUM_TOKEN, what)
            self._readers.pop()
        self.segment.numbers[self.rank] = nbytes

    def _meet(self, others: Sequence[int], what: str) -> None:
        """Wait until all have shown what they have to show."""
        for rank in others:
            self.segment.post(self.rank, rank, SUM_TOKEN)
        for rank in others:
            self.segment.wait(rank, self.rank, SUM_TOKEN, what)

    def _meet_first(self, others: Sequence[int], nbytes: int, what: str) -> None:
        """Meet, and refuse the numbers of a rank that is at another place of the program."""
        self._meet(others, what)
        for rank in others:
            self._check_size(rank, nbytes, self.segment.numbers[rank], what)

    def _check_size(self, peer: int, expected: int, found: int, what: str) -> None:
        if found != expected:
            raise CommError(
                f"rank {self.rank} expected {expected} B from rank {peer} during {what} but "
                f"got {found} B\n    {OUT_OF_STEP}"
            )

    def _sum_small(
        self, x: torch.Tensor, ranks: Sequence[int], others: list[int], what: str
    ) -> None:
        """Sum ``x`` over the ranks: 1. show the own part, 2. add up everybody's."""
        key = (x.numel(), x.dtype)
        if key not in self._small_views:
            with torch.inference_mode(False):  # or they could not be written to outside that mode
                views = [area[: x.nbytes].view(x.dtype) for area in self._areas]
                self._small_views[key] = views
        parts = self._small_views[key]
        parts[self.rank].copy_(x)
        self._meet_first(others, x.nbytes, what)
        _add_up([parts[rank] for rank in ranks], x)

    def _sum_in_chunks(
        self, x: torch.Tensor, ranks: Sequence[int], others: list[int], what: str
    ) -> None:
        """Sum ``x`` over the ranks, chunk by chunk; every rank adds up its share of each.

        Steps of a chunk: 1. show the others their shares of the own numbers, 2. add up the own
        share of everybody's and show it, 3. take the others' shares. All meet after each. While a
        rank is at step 2 of one chunk it does step 1 of the next, so there is one meeting a chunk.
        A share always has the same place in a chunk, also in the last one: what a rank writes at
        step 1 is never where others still read at step 3 of the chunk before the last.
        """
        half = self._areas.shape[1] // 2  # [B] of a chunk: two take turns in an area
        place = half // len(ranks) // CACHE_LINE * CACHE_LINE  # [B] of a share
        begins = {rank: i * place for i, rank in enumerate(ranks)}
        chunks = [
            dict(zip(ranks, chunk.tensor_split(len(ranks)), strict=True))
            for chunk in x.split(place // x.element_size() * len(ranks))
        ]

        def shown(rank: int, number: int, owner: int) -> torch.Tensor:
            begin = begins[owner] + number % 2 * half
            share = chunks[number][owner]
            return self._areas[rank, begin : begin + share.nbytes].view(share.dtype)

        def show(number: int) -> None:
            for rank in others:
                shown(self.rank, number, rank).copy_(chunks[number][rank])

        def add_up(number: int) -> None:
            own = chunks[number][self.rank]
            total = shown(self.rank, number, self.rank)
            _add_up([own, *(shown(rank, number, self.rank) for rank in others)], total)
            own.copy_(total)

        show(0)
        self._meet_first(others, x.nbytes, what)
        for number, chunk in enumerate(chunks):
            add_up(number)
            if number + 1 < len(chunks):
                show(number + 1)
            self._meet(others, what)
            for rank in others:
                chunk[rank].copy_(shown(rank, number, rank))


def _average_share(shown: Shown, rank: int) -> None:
    """Divide a rank's share of the sum over the terms by the number of ranks, for all to see."""
    others = [term for term in shown.terms if term != rank]
    idle = [place for place in range(len(shown.parts)) if place not in shown.terms]
    places = [rank, *others, *idle]
    share = shown.terms.index(rank)
    shares = [shown.parts[place].tensor_split(len(shown.terms))[share] for place in places]
    for pieces in zip(*(part.split(SUM_PIECE) for part in shares), strict=True):
        own, *copies = pieces
        _add_up([own, *copies[: len(others)]], own, 1 / len(places))
        for copy in copies:
            copy.copy_(own)


def _add_up(terms: Sequence[torch.Tensor], out: torch.Tensor, scale: float = 1.0) -> None:
    """Write ``scale`` times the sum; ``out`` may be the first term."""
    total, *others = terms
    into = out
    if out.dtype in _HALF:
        total = into = total.float()
    for term in others:
        total = torch.add(total, term, out=into)
    if scale != 1.0:
        total = torch.mul(total, scale, out=into)
    if total is not out:
        out.copy_(total)


_OF_GROUP: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedChannels | None] = (
    weakref.WeakKeyDictionary()
)
"""Belongs to the process group, which may have several grids, and ends with it."""


def connect_ranks() -> None:
    """Let the ranks of a process group share memory if they can; all ranks call this.

    From then on all of them must exchange messages in the same order.
    """
    group = world()
    if group is not None and group not in _OF_GROUP:
        can = sys.platform == "linux" and backend_of() == "gloo" and ranks_in() > 1
        _OF_GROUP[group] = _make_channels(group) if can else None


def shared_channels() -> SharedChannels | None:
    """Return what `connect_ranks` made for the ranks of which grids are made."""
    group = world()
    return None if group is None else _OF_GROUP.get(group)


def _make_channels(group: dist.ProcessGroup) -> SharedChannels | None:
    size = ranks_in()
    pairs = size * (size - 1)
    numbers = size + pairs * SLOTS  # the sizes of what is summed, then those of messages
    lines = pairs * len(FIRST_SEMAPHORE_VALUES) + numbers
    limit = time_limit_of(group, torch.device("cpu")).total_seconds()

    def open_segment(path: Path) -> Segment:
        segment = Segment(path, numbers, limit)
        if segment.rank == 0:
            segment.prepare()
        return segment

    segment = share_file(lines * CACHE_LINE + shared_bytes(size), open_segment)
    if segment is None:
        return None
    if not _all_ranks(segment.enter()):
        segment.leave()
        return None
    weakref.finalize(group, segment.leave)
    return SharedChannels(segment, size)
