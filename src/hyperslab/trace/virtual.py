"""A grid of ranks that are not there: any number of them, seen by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from hyperslab.comm import AXES, Communicator, Grid
from hyperslab.comm.communicator import PeerTensor
from hyperslab.errors import LayoutError
from hyperslab.trace.layers import Layers
from hyperslab.trace.records import Exchange, Purpose, Stage, Sum, Trace, Wait


class Messages:
    """Writes messages and sums down; before ``trace`` is set they are forgotten."""

    def __init__(self, layers: Layers, stage: Callable[[], Stage]) -> None:
        self.layers = layers
        self.stage = stage
        self.trace: Trace | None = None
        self.notes: list[str] = []

    def exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], what: str
    ) -> Exchange:
        """Messages that begin to travel."""
        event = Exchange(self.layers.current, self.stage(), what, _sizes(sends), _sizes(receives))
        if self.trace is not None:
            self.trace.events.append(event)
        return event

    def wait(self, exchange: Exchange) -> None:
        """They have to have arrived."""
        if self.trace is not None:
            self.trace.events.append(Wait(exchange))

    def sum(self, ranks: tuple[int, ...], nbytes: int, purpose: Purpose, what: str) -> None:
        """An all-reduce."""
        if self.trace is not None:
            layer = self.layers.current
            self.trace.events.append(Sum(layer, self.stage(), what, purpose, ranks, nbytes))


class VirtualCommunicator:
    """Between ranks that are not there: what they would send is written down."""

    def __init__(self, ranks: tuple[int, ...], rank: int, journal: Messages) -> None:
        self.ranks = ranks
        self._rank = rank
        self._journal = journal

    def rank(self) -> int:
        return self.ranks.index(self._rank)

    def size(self) -> int:
        return len(self.ranks)

    def exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], what: str
    ) -> _Recorded:
        return _Recorded(self._journal, sends, receives, what)

    def sum_in_place(self, x: torch.Tensor, what: str) -> torch.Tensor:
        self._journal.sum(self.ranks, x.nbytes, "statistics", what)
        return x


class _Recorded:
    """Messages that nobody sends; the buffers for them are as they are."""

    def __init__(
        self,
        journal: Messages,
        sends: Sequence[PeerTensor],
        receives: Sequence[PeerTensor],
        what: str,
    ) -> None:
        self._journal = journal
        self._receives = receives
        # As a real exchange does it: gloo and NCCL want contiguous memory.
        self._sent = [piece.contiguous() for _, piece in sends]
        self._event = journal.exchange(sends, receives, what)

    def wait(self) -> list[torch.Tensor]:
        self._journal.wait(self._event)
        self._sent.clear()
        return [buffer for _, buffer in self._receives]


class VirtualGrid(Grid):
    """A grid of which one rank is traced; the others, and process groups, are not there.

    Raises:
        LayoutError: an axis has no ranks.
    """

    has_values = False

    def __init__(self, extents: Mapping[str, int], rank: int, journal: Messages) -> None:
        self.extents = {axis: extents.get(axis, 1) for axis in AXES}
        if any(extent < 1 for extent in self.extents.values()):
            raise LayoutError(f"every axis of a grid needs at least one rank: {self}")
        self.data, self.depth, self.height, self.width = self.extents.values()
        self.size = math.prod(self.extents.values())
        self.rank = rank
        self.device = torch.device("cpu")
        self.coords = self.coords_of(rank)
        self.journal = journal
        self._groups = {}
        self._everybody = VirtualCommunicator(tuple(range(self.size)), rank, journal)

    @property
    def halos(self) -> Communicator:
        return self._everybody

    def warn(self, message: str) -> None:
        self.journal.notes.append(message)

    def same_on_all(self, number: int) -> bool:
        return True

    def barrier(self) -> None:
        return

    def _make_group(self, axes: tuple[str, ...]) -> Communicator | None:
        if not axes:
            return None
        ranks = (r for r in range(self.size) if self._differs_only(self.coords_of(r), axes))
        return VirtualCommunicator(tuple(ranks), self.rank, self.journal)

    def _differs_only(self, coords: Mapping[str, int], axes: Sequence[str]) -> bool:
        return all(coords[axis] == self.coords[axis] for axis in AXES if axis not in axes)


def _sizes(messages: Sequence[PeerTensor]) -> tuple[tuple[int, int], ...]:
    return tuple((rank, tensor.nbytes) for rank, tensor in messages)
