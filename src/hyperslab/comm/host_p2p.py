"""Sends host arrays from rank to rank in the background, on a process group of their own."""

from __future__ import annotations

import datetime
import itertools
import logging
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hyperslab.comm.agreement import all_gather, any_rank, lost_contact
from hyperslab.comm.bootstrap import (
    agree_on_group_names,
    make_own_group,
    rank_in_torch,
    time_limit,
)
from hyperslab.comm.grid import Grid, per_grid
from hyperslab.errors import CommError

log = logging.getLogger("hyperslab.data")

T = TypeVar("T")

SAMPLE_EXCHANGE = "the exchange of samples"

LEAVE_GRACE = 10.0
"""Limits how long [s] a rank that leaves waits for the others to fetch its last boxes."""

ABANDONED_GRACE = 3.0
"""Limits how long [s] a rank that has let go waits for its own reading thread.

gloo ends what that waits for at once, but for one sum in hundreds of those that begin while the
other rank closes the connection: that one ends with its time limit.
"""

SentMessage = tuple[int, dist.Work, NDArray[Any]]
"""Holds the receiver, what is under way, and what must not change until it has arrived."""

SentMessages = list[list[SentMessage]]
"""Holds the messages of two steps."""


@dataclass(slots=True)
class PositionGroup:
    """Connects the ranks that only ``data`` tells apart, for all data sets of a grid.

    ``users`` counts the data sets so far, by which their messages are told apart; ``sent`` is what
    those that are open have under way. What one data set has abandoned none after it uses.
    """

    reference: weakref.ref[dist.ProcessGroup] | None = None  # it ends with torch's world
    users: int = 0
    sent: list[SentMessages] = field(default_factory=list)
    abandoned: threading.Event = field(default_factory=threading.Event)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Returns the process group, unless it is not made yet, has ended or is abandoned."""
        if self.reference is None or self.abandoned.is_set():
            return None
        return self.reference()

    def end(self) -> None:
        """Ends the process group, if it has not ended."""
        group = None if self.reference is None else self.reference()
        if group is not None:
            _end_group(group, [[], []])


@per_grid
def _position_group(_grid: Grid) -> PositionGroup:
    """Returns the grid's, which connects nobody yet."""
    return PositionGroup()


class HostP2P:
    """Sends and receives for one data set; every rank makes one at the same time.

    A message is known by its tag, so that ranks which are not at the same step never take one for
    another: they wait until the process group's time limit.
    """

    def __init__(self, grid: Grid, *, same_position: bool = False) -> None:
        """Connects all ranks, or with ``same_position`` those that only ``data`` tells apart.

        A box travels between ranks of one position unless it is turned, so that a rank then has a
        connection for each replica and not for each rank, the same one for all data sets.
        """
        self.rank = grid.rank
        self.size = grid.size
        positions = grid.size // grid.data if same_position else 1
        self.peers = range(grid.rank % positions, grid.size, positions)
        self.received_bytes = 0
        self._sent: SentMessages = [[], []]  # before the last `settle`, and since
        self._shared = shared = _position_group(grid) if same_position else PositionGroup()
        self._number = shared.users
        shared.users += 1
        self._abandoned = threading.Event()
        with self.naming(None):
            group = shared.group
            if any_rank(group is None, what=SAMPLE_EXCHANGE):
                agree_on_group_names()
                # Kept, unlike a grid's: what ends a group waits for its messages, and a rank that
                # leaves after an error must not.
                every = [list(range(first, grid.size, positions)) for first in range(positions)]
                group = make_own_group(every, backend="gloo", timeout=time_limit())
                shared.reference = weakref.ref(group)
                shared.abandoned = threading.Event()
                if same_position:
                    weakref.finalize(grid, shared.end).atexit = False
            assert group is not None
            self.group = group
            self._abandoned = shared.abandoned
            dist.barrier(self.group)  # nobody must leave it while others still connect to it
        shared.sent.append(self._sent)
        ended = None if same_position else self.group
        self._forget = weakref.finalize(self, _end_group, ended, self._sent)
        self._forget.atexit = False  # too late: torch's threads have ended by then

    def send(self, values: NDArray[Any], peer: int, tag: int, what: str) -> None:
        """Begin to send a contiguous array, which must not change until two `settle` later."""
        log.debug("%s: %d B from rank %d to rank %d", what, values.nbytes, self.rank, peer)
        tag = tag_of(self._number, tag)
        with self.naming(peer):
            work = dist.isend(as_bytes(values), rank_in_torch(peer), group=self.group, tag=tag)
        assert work is not None
        self._sent[1].append((peer, work, values))

    def receive(self, out: NDArray[Any], peer: int, tag: int) -> Callable[[], None]:
        """Begin to fill a contiguous array; what is returned waits until it is filled.

        Raises:
            CommError, there too: the other rank died or did not answer in time.
        """
        tag = tag_of(self._number, tag)
        with self.naming(peer):
            work = dist.irecv(as_bytes(out), rank_in_torch(peer), group=self.group, tag=tag)
        assert work is not None
        self.received_bytes += out.nbytes

        def wait() -> None:
            with self.naming(peer):
                work.wait()

        return wait

    def settle(self) -> None:
        """Wait until what was sent before the last `settle` has arrived.

        The others may be a step behind; to wait for the newest messages would hold this rank up.
        """
        for peer, work, _ in _pop_each(self._sent[0]):
            with self.naming(peer):
                work.wait()
        self._sent[:] = [self._sent[1], []]

    def any(self, flag: bool) -> bool:
        """Tell whether any of these ranks has it set; all of them call this."""
        with self.naming(None):
            return any_rank(flag, self.group)

    def gather(self, mine: T) -> list[T]:
        """Return what each of these ranks has, by rank; all of them call this."""
        with self.naming(None):
            return all_gather(mine, self.group)

    def close(self) -> None:
        """Wait until all has arrived, unless a rank was lost; all ranks call this."""
        if self._abandoned.is_set():
            self._destroy()
            return
        with suppress(CommError):
            self.settle()
            self.settle()
        self._forget()
        self._shared.sent[:] = [sent for sent in self._shared.sent if sent is not self._sent]

    @property
    def abandoned(self) -> bool:
        return self._abandoned.is_set()

    def _destroy(self) -> None:
        if self._forget.detach() is not None:
            _end_group(self.group, [])

    def abandon(self) -> None:
        """Let go at once: all who wait, here or on another rank, get an error.

        gloo cannot be told to; but it closes a connection of which a message does not come in time.
        """
        self._abandoned.set()
        for peer in self.peers:
            if peer != self.rank:
                with suppress(RuntimeError, ValueError):
                    tag = tag_of("the end")
                    source = rank_in_torch(peer)
                    work = dist.irecv(torch.empty(1), source, group=self.group, tag=tag)
                    assert work is not None
                    work.wait(_timeout(0))

    def leave(self, seconds: float) -> None:
        """End in any case, after so many seconds for what was sent to arrive [s]."""
        end = time.monotonic() + seconds
        for sent in self._shared.sent:  # other data sets' too, which have the same connections
            _await_sent(sent, end - time.monotonic())
        self.abandon()
        self._destroy()

    @contextmanager
    def naming(self, peer: int | None) -> Iterator[None]:
        """Say which rank did not answer."""
        peers = () if peer is None else (peer,)
        if self._abandoned.is_set():
            why = "the data set was left after an error"
            raise lost_contact(self.rank, peers, SAMPLE_EXCHANGE, why)
        try:
            yield
        except CommError:
            raise
        except (RuntimeError, ValueError) as error:
            raise lost_contact(self.rank, peers, SAMPLE_EXCHANGE, error) from error


def tag_of(*key: object) -> int:
    """Number a message by what it is."""
    return zlib.crc32(repr(key).encode()) >> 1


def as_bytes(values: NDArray[Any]) -> torch.Tensor:
    """Return the memory of a contiguous array: not every backend sends every type."""
    return torch.from_numpy(values.reshape(-1).view(np.uint8))


def _timeout(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=max(seconds, 0.001))  # zero would be for ever


def _pop_each(sent: list[SentMessage]) -> Iterator[SentMessage]:
    """Yield each message once: gloo would wait for the arrival of a second one."""
    while sent:
        yield sent.pop(0)


def _await_sent(sent: SentMessages, seconds: float) -> None:
    end = time.monotonic() + seconds
    for _, work, _ in itertools.chain(*map(_pop_each, sent)):
        with suppress(RuntimeError, ValueError):
            work.wait(_timeout(end - time.monotonic()))


def _end_group(group: dist.ProcessGroup | None, sent: SentMessages) -> None:
    """Wait for what was sent, and end the group unless other data sets use it."""
    if dist.is_initialized():
        _await_sent(sent, LEAVE_GRACE)
        if group is not None:
            with suppress(ValueError):  # it has ended, or the one of which it was a part
                dist.destroy_process_group(group)
