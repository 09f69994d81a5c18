"""Stands in for a grid of ranks that are not there: any number of them, seen by one.

`VirtualGrid` and its communicators write messages and sums into a `MessageJournal` instead of
sending them; `GradientBuckets` says when gradients would travel, as DistributedDataParallel's
buckets do; `positions` and `busiest` choose the ranks that stand for all others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import nn

from hyperslab.comm import AXES, Communicator, Grid
from hyperslab.comm.communicator import PeerTensor
from hyperslab.comm.grid import SPATIAL_AXES
from hyperslab.errors import LayoutError
from hyperslab.planner.trace.recorder import Layers
from hyperslab.planner.trace.records import Exchange, Purpose, Sum, Trace, Wait
from hyperslab.train.profile import Stage
from hyperslab.util.torch_internals import FIRST_BUCKET_BYTES


class MessageJournal:
    """Records messages and sums; before ``trace`` is set they are forgotten."""

    def __init__(self, layers: Layers, stage: Callable[[], Stage]) -> None:
        self.layers = layers
        self.stage = stage
        self.trace: Trace | None = None
        self.notes: list[str] = []

    def exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], what: str
    ) -> Exchange:
        """Records messages that begin to travel."""
        event = Exchange(
            self.layers.current, self.stage(), what, _bytes_by_peer(sends), _bytes_by_peer(receives)
        )
        if self.trace is not None:
            self.trace.events.append(event)
        return event

    def wait(self, exchange: Exchange) -> None:
        """Records the wait for an exchange."""
        if self.trace is not None:
            self.trace.events.append(Wait(exchange))

    def sum(self, ranks: tuple[int, ...], nbytes: int, purpose: Purpose, what: str) -> None:
        """Records an all-reduce."""
        if self.trace is not None:
            layer = self.layers.current
            self.trace.events.append(Sum(layer, self.stage(), what, purpose, ranks, nbytes))


class VirtualCommunicator:
    """Stands in for a communicator: what ranks would send is recorded."""

    def __init__(self, ranks: tuple[int, ...], rank: int, journal: MessageJournal) -> None:
        self.ranks = ranks
        self._rank = rank
        self._journal = journal

    def rank(self) -> int:
        return self.ranks.index(self._rank)

    def size(self) -> int:
        return len(self.ranks)

    def exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], what: str
    ) -> _RecordedExchange:
        return _RecordedExchange(self._journal, sends, receives, what)

    def sum_in_place(self, x: torch.Tensor, what: str) -> torch.Tensor:
        self._journal.sum(self.ranks, x.nbytes, "statistics", what)
        return x


class _RecordedExchange:
    """Stands in for messages under way; their buffers stay as they are."""

    def __init__(
        self,
        journal: MessageJournal,
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
    """Stands in for a grid of which one rank is traced, without process groups.

    Raises:
        LayoutError: an axis has no ranks.
    """

    has_values = False

    def __init__(self, extents: Mapping[str, int], rank: int, journal: MessageJournal) -> None:
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


def _bytes_by_peer(messages: Sequence[PeerTensor]) -> tuple[tuple[int, int], ...]:
    return tuple((rank, tensor.nbytes) for rank, tensor in messages)


BUCKET_BYTES = 25 << 20  # [B] of DistributedDataParallel's buckets, but for the first one


class GradientBuckets:
    """Records how DistributedDataParallel would average gradients over virtual ranks.

    Its buckets are filled in the order in which gradients become ready (so it arranges them after
    the first step), and a full one leaves. They are always there: gradients are views of them.
    """

    def __init__(self, module: nn.Module, ranks: int, journal: MessageJournal) -> None:
        self.ranks = tuple(range(ranks))
        self.journal = journal
        self.filled = 0
        self.limit = FIRST_BUCKET_BYTES
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.views = {id(p): torch.empty_like(p) for p in self.parameters}

    def watch(self, stack: ExitStack) -> None:
        """Counts gradients as they become ready, until ``stack`` is closed."""
        for parameter in self.parameters:
            hook = parameter.register_post_accumulate_grad_hook(self._ready)
            stack.callback(hook.remove)

    def finish(self) -> None:
        """Sends the last bucket, as it is, at the end of a backward pass."""
        self._leave()
        self.limit = FIRST_BUCKET_BYTES

    def _leave(self) -> None:
        if self.filled:
            self.journal.sum(self.ranks, self.filled, "gradients", "the average of the gradients")
        self.filled = 0
        self.limit = BUCKET_BYTES

    def _ready(self, parameter: torch.Tensor) -> None:
        view = self.views[id(parameter)]
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view
        self.filled += parameter.nbytes
        if self.filled >= self.limit:
            self._leave()


POSITIONS_ON_AXIS = ("first", "inside", "last")


def positions(extents: Mapping[str, int]) -> dict[str, int]:
    """Lists one rank for each kind of position, such as "depth first, width inside".

    A rank has no neighbour on one side (first, last) or has both (inside), along each axis that
    cuts; those with equal words do the same work but for shards that are one element smaller: the
    first ranks of an axis have the larger ones. All are of the first replica.

    >>> positions({"depth": 3, "width": 2})
    {'depth first, width first': 0, 'depth first, width last': 1, 'depth inside, width first': 2,\
 'depth inside, width last': 3, 'depth last, width first': 4, 'depth last, width last': 5}
    """
    cut = [axis for axis in SPATIAL_AXES if extents.get(axis, 1) > 1]
    found = {}
    for at in itertools.product(*(_axis_positions(extents[axis]) for axis in cut)):
        words = ", ".join(f"{axis} {place}" for axis, (place, _) in zip(cut, at, strict=True))
        coords = {axis: index for axis, (_, index) in zip(cut, at, strict=True)}
        found[words or "alone"] = _rank_at(extents, coords)
    return found


def busiest(extents: Mapping[str, int]) -> int:
    """Finds the first rank of those with most neighbours and, among them, largest shards."""
    inside = {axis: 1 for axis in SPATIAL_AXES if extents.get(axis, 1) > 2}
    return _rank_at(extents, inside)


def _axis_positions(extent: int) -> list[tuple[str, int]]:
    if extent == 2:
        return [("first", 0), ("last", 1)]
    return list(zip(POSITIONS_ON_AXIS, (0, 1, extent - 1), strict=True))


def _rank_at(extents: Mapping[str, int], coords: Mapping[str, int]) -> int:
    rank = 0
    for axis in AXES:
        rank = rank * extents.get(axis, 1) + coords.get(axis, 0)
    return rank
