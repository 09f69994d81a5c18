"""Messages and sums through memory that the ranks of one machine share.

gloo sends them over loopback sockets, through a thread of its own and several copies: 0.3 ms for
a message that takes 0.02 ms here, and four times the time for the sum of a network's gradients.

Legend: every ordered pair of ranks has a *channel* of `SLOTS` slots for messages; for sums see
`sums`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable, Iterable, Sequence

import torch
import torch.distributed as dist

from hyperslab.comm.shared_memory.pairs import FIRST_VALUES, FREE, FULL, SLOTS, RankPairs
from hyperslab.comm.shared_memory.segment import Segment, connect
from hyperslab.comm.shared_memory.sums import SharedSums, Shown, area_bytes, check_size
from hyperslab.memory_format import CHANNELS_LAST

BUDGET = 32 << 20  # [B] of all slots together
LARGEST = 4 << 20  # [B] of one slot: what is larger goes through a socket and is copied for it


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
        """Whether a message of this shape and type goes through a slot."""
        return x.device.type == "cpu" and x.nbytes <= self.slot

    def send(self, x: torch.Tensor, peer: int, what: str) -> None:
        """Put ``x``, contiguous or not, where ``peer`` finds it.

        It travels in the order in which it lies in memory: with the channels last if they are.
        """
        self._pairs.wait(self.rank, peer, FREE, peer, what)
        last = _channels_last(x)
        self._slot(self.rank, peer, self._sent[peer], x, last).copy_(x)
        number = self._number(self.rank, peer, self._sent[peer])
        self.segment.numbers[number] = 2 * x.nbytes + last
        self._sent[peer] += 1
        self._pairs.post(self.rank, peer, FULL)

    def receive(self, out: torch.Tensor, peer: int, what: str) -> None:
        """Fill ``out`` with the next message of ``peer``.

        Raises:
            CommError: that is not as large as ``out``, or see `Segment.wait`.
        """
        self._pairs.wait(peer, self.rank, FULL, peer, what)
        number = self._number(peer, self.rank, self._received[peer])
        found, last = divmod(self.segment.numbers[number], 2)
        check_size(self.rank, peer, out.nbytes, found, what)
        out.copy_(self._slot(peer, self.rank, self._received[peer], out, bool(last)))
        self._received[peer] += 1
        self._pairs.post(peer, self.rank, FREE)

    def all_reduce(
        self, x: torch.Tensor, ranks: Sequence[int], what: str, scale: float = 1.0
    ) -> None:
        """``scale`` times the sum over ``ranks``, in place; see `SharedSums.all_reduce`."""
        self._sums.all_reduce(x, ranks, what, scale)

    def average_shown(self, sums: Iterable[Shown], what: str, *, nbytes: int) -> None:
        """The mean over all ranks in memory that all map; see `SharedSums.average_shown`."""
        self._sums.average_shown(sums, what, nbytes=nbytes)

    def _slot(
        self, sender: int, receiver: int, number: int, like: torch.Tensor, last: bool
    ) -> torch.Tensor:
        """The part of a slot that a message fills, with its channels ``last`` in memory or not."""
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
        """Where stands twice the size [B] of a message, and one more if its channels are last.

        The sizes of the areas stand before them all.
        """
        return len(self._sent) + SLOTS * self._pairs.index[sender, receiver] + number % SLOTS


def _channels_last(x: torch.Tensor) -> bool:
    return x.dim() in CHANNELS_LAST and x.stride(1) == 1 and not x.is_contiguous()


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
    segment = connect(group, FIRST_VALUES * pairs, numbers, shared_bytes(size))
    return None if segment is None else Shared(segment, dist.get_rank(), size, _slot(size))


def shared_bytes(size: int) -> int:
    """Of all slots and areas of so many ranks of a machine [B].

    >>> shared_bytes(1), shared_bytes(2) >> 20
    (0, 24)
    """
    pairs = size * (size - 1)
    return pairs * SLOTS * _slot(size) + size * area_bytes(size) if pairs else 0


def _slot(size: int) -> int:
    """Of one of so many ranks' slots [B]."""
    return min(LARGEST, BUDGET // (size * (size - 1) * SLOTS)) // 4096 * 4096
