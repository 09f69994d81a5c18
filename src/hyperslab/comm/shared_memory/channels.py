"""Messages and sums through memory that the ranks of one machine share.

gloo sends them over loopback sockets, through a thread of its own and several copies: 0.3 ms for
a message that takes 0.02 ms here, and four times the time for the sum of a network's gradients.

Legend: every ordered pair of ranks has a *channel* of `SLOTS` slots for messages, every rank has
an *area* in which it shows the others its part of a sum.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist

from hyperslab.comm.shared_memory.segment import Segment, connect
from hyperslab.errors import CommError

SLOTS = 2
BUDGET = 32 << 20  # [B] of all slots together
LARGEST = 1 << 20  # [B] of one slot, and of one area
SMALL = 16 << 10  # [B] up to which every rank adds up everything by itself
FULL, FREE, TOKEN = range(3)  # the semaphores of an ordered pair


class Shared:
    """What the ranks of one machine share; see `connect_ranks`.

    A message fits if it fills no more than one slot; larger ones go through the process group.
    Two slots are enough that nobody ever waits for a free one in a circle: a rank sends at most
    one message to another before it receives that one's, so at most two are under way.
    """

    def __init__(self, segment: Segment, rank: int, size: int, slot: int) -> None:
        self.segment = segment
        self.rank = rank
        self.slot = slot
        self._pairs = {pair: i for i, pair in enumerate(itertools.permutations(range(size), 2))}
        slots = len(self._pairs) * SLOTS * slot
        areas = size * LARGEST
        self._slots = segment.data[:slots].view(len(self._pairs), SLOTS, slot)
        self._areas = segment.data[slots : slots + areas].view(size, LARGEST)
        self._sent = dict.fromkeys(range(size), 0)
        self._received = dict.fromkeys(range(size), 0)
        self._views: dict[Hashable, torch.Tensor] = {}
        self._readers: list[int] = []  # who may still read this rank's area

    def fits(self, x: torch.Tensor) -> bool:
        """Whether a message of this shape and type goes through a slot."""
        return x.device.type == "cpu" and x.nbytes <= self.slot

    def send(self, x: torch.Tensor, peer: int, what: str) -> None:
        """Put ``x``, contiguous or not, where ``peer`` finds it."""
        self._wait(self.rank, peer, FREE, peer, what)
        self._slot(self.rank, peer, self._sent[peer], x).copy_(x)
        self.segment.numbers[self._number(self.rank, peer, self._sent[peer])] = x.nbytes
        self._sent[peer] += 1
        self._post(self.rank, peer, FULL)

    def receive(self, out: torch.Tensor, peer: int, what: str) -> None:
        """Fill ``out`` with the next message of ``peer``.

        Raises:
            CommError: that is not as large as ``out``, or see `Segment.wait`.
        """
        self._wait(peer, self.rank, FULL, peer, what)
        self._check(self._number(peer, self.rank, self._received[peer]), out, peer, what)
        out.copy_(self._slot(peer, self.rank, self._received[peer], out))
        self._received[peer] += 1
        self._post(peer, self.rank, FREE)

    def all_reduce(
        self, x: torch.Tensor, ranks: Sequence[int], what: str, scale: float = 1.0
    ) -> None:
        """``scale`` times the sum over ``ranks``, in place of a contiguous tensor.

        Every rank gets the same bits: each element is added up once, in the order of the ranks.

        Raises:
            CommError: another rank adds up something of another size, or see `Segment.wait`.
        """
        for part in x.view(-1).split(LARGEST // x.element_size()):
            if part.nbytes <= SMALL:
                self._sum_all(part, ranks, what, scale)
            else:
                self._sum_share(part, ranks, what, scale)

    def _sum_all(self, part: torch.Tensor, ranks: Sequence[int], what: str, scale: float) -> None:
        """1. Show the own part, 2. add up everybody's."""
        self._may_write(part, what)
        self._area(self.rank, part).copy_(part)
        self._meet(ranks, part, what)
        _add_up([self._area(rank, part) for rank in ranks], part, scale)
        self._done(ranks)

    def _sum_share(self, part: torch.Tensor, ranks: Sequence[int], what: str, scale: float) -> None:
        """1. Show the others' shares of the own part, 2. add up the own share and show it,
        3. take the others' shares."""
        self._may_write(part, what)
        bounds = [part.numel() * i // len(ranks) for i in range(len(ranks) + 1)]
        share = {r: slice(bounds[i], bounds[i + 1]) for i, r in enumerate(ranks)}
        area = {rank: self._area(rank, part) for rank in ranks}
        mine = share[self.rank]
        others = [rank for rank in ranks if rank != self.rank]
        for rank in others:
            area[self.rank][share[rank]].copy_(part[share[rank]])
        self._meet(ranks, part, what)
        terms = [part[mine] if rank == self.rank else area[rank][mine] for rank in ranks]
        _add_up(terms, area[self.rank][mine], scale)
        part[mine].copy_(area[self.rank][mine])
        self._meet(ranks, part, what)
        for rank in others:
            part[share[rank]].copy_(area[rank][share[rank]])
        self._done(ranks)

    def _may_write(self, part: torch.Tensor, what: str) -> None:
        """Wait until nobody reads what the own area held."""
        while self._readers:
            self._wait(self._readers[-1], self.rank, TOKEN, self._readers[-1], what)
            self._readers.pop()
        self.segment.numbers[self.rank] = part.nbytes

    def _meet(self, ranks: Sequence[int], part: torch.Tensor, what: str) -> None:
        """All have shown what they have to show."""
        others = [rank for rank in ranks if rank != self.rank]
        for rank in others:
            self._post(self.rank, rank, TOKEN)
        for rank in others:
            self._wait(rank, self.rank, TOKEN, rank, what)
            self._check(rank, part, rank, what)

    def _done(self, ranks: Sequence[int]) -> None:
        """Tell the others that their areas have been read."""
        self._readers = [rank for rank in ranks if rank != self.rank]
        for rank in self._readers:
            self._post(self.rank, rank, TOKEN)

    def _slot(self, sender: int, receiver: int, number: int, like: torch.Tensor) -> torch.Tensor:
        """The part of a slot that a message fills."""
        key = (sender, receiver, number % SLOTS, like.shape, like.dtype)
        if key not in self._views:
            slot = self._slots[self._pairs[sender, receiver], number % SLOTS]
            with torch.inference_mode(False):  # or it could not be written to outside that mode
                self._views[key] = slot[: like.nbytes].view(like.dtype).view(like.shape)
        return self._views[key]

    def _number(self, sender: int, receiver: int, number: int) -> int:
        """Where the size [B] of a message stands; those of the areas stand before them all."""
        return len(self._sent) + SLOTS * self._pairs[sender, receiver] + number % SLOTS

    def _check(self, number: int, expected: torch.Tensor, peer: int, what: str) -> None:
        """Ranks that are at different places of a program must not take each other's numbers."""
        found = self.segment.numbers[number]
        if found != expected.nbytes:
            raise CommError(
                f"rank {self.rank} expected {expected.nbytes} B from rank {peer} during {what} but "
                f"got {found} B\n    run the same operations in the same order on every rank"
            )

    def _area(self, rank: int, like: torch.Tensor) -> torch.Tensor:
        return self._areas[rank, : like.nbytes].view(like.dtype)

    def _post(self, sender: int, receiver: int, kind: int) -> None:
        self.segment.post(3 * self._pairs[sender, receiver] + kind)

    def _wait(self, sender: int, receiver: int, kind: int, peer: int, what: str) -> None:
        self.segment.wait(3 * self._pairs[sender, receiver] + kind, peer, what)


def _add_up(terms: Sequence[torch.Tensor], out: torch.Tensor, scale: float) -> None:
    """Half precision is added up in float32; ``out`` may be one of the terms."""
    wide = out.dtype
    if wide in (torch.float16, torch.bfloat16):
        wide = torch.float32
    total = terms[0].to(wide) + terms[1].to(wide)
    for term in terms[2:]:
        total += term.to(wide)
    out.copy_(total if scale == 1.0 else total.mul_(scale))


_OF_GROUP: weakref.WeakKeyDictionary[dist.ProcessGroup, Shared | None] = weakref.WeakKeyDictionary()
"""Belongs to the process group, which may have several grids, and ends with it."""


def connect_ranks() -> None:
    """Let the ranks of the default process group share memory if they can; all ranks call this.

    From then on all of them must exchange messages in the same order.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is not None and group not in _OF_GROUP:
        _OF_GROUP[group] = _make(group) if _possible() else None


def shared_channels() -> Shared | None:
    """What `connect_ranks` made for the default process group."""
    group = dist.group.WORLD
    return None if group is None else _OF_GROUP.get(group)


def _possible() -> bool:
    return sys.platform == "linux" and dist.get_backend() == "gloo" and dist.get_world_size() > 1


def _make(group: dist.ProcessGroup) -> Shared | None:
    size = dist.get_world_size()
    pairs = size * (size - 1)
    numbers = size + pairs * SLOTS
    segment = connect(group, [0, SLOTS, 0] * pairs, numbers, shared_bytes(size))
    return None if segment is None else Shared(segment, dist.get_rank(), size, _slot(size))


def shared_bytes(size: int) -> int:
    """Of all slots and areas of so many ranks of a machine [B].

    >>> shared_bytes(1), shared_bytes(2) >> 20
    (0, 6)
    """
    pairs = size * (size - 1)
    return pairs * SLOTS * _slot(size) + size * LARGEST if pairs else 0


def _slot(size: int) -> int:
    """Of one of so many ranks' slots [B]."""
    return min(LARGEST, BUDGET // (size * (size - 1) * SLOTS)) // 4096 * 4096
