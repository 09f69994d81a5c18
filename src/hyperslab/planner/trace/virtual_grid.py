"""Stands in for a grid of ranks that are not there: any number of them, seen by one.

`VirtualGrid` and its communicators write messages and sums into a `Journal` instead of sending
them; `GradientBuckets` says when gradients would travel, as DistributedDataParallel's buckets do;
`positions` and `busiest` choose the ranks that stand for all others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import nn

from hyperslab.comm import AXES, Communicator, Grid
from hyperslab.comm.communicator import PeerTensor
from hyperslab.errors import LayoutError
from hyperslab.planner.trace.recorder import Journal
from hyperslab.planner.trace.records import Exchange, Sum, Wait
from hyperslab.util.torch_internals import FIRST_BUCKET_BYTES


class VirtualCommunicator:
    """Stands in for a communicator: what ranks would send is recorded."""

    def __init__(self, ranks: tuple[int, ...], rank: int, journal: Journal) -> None:
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
        self._journal.add(Sum(*self._journal.place, what, "statistics", self.ranks, x.nbytes))
        return x


class _RecordedExchange:
    """Stands in for messages under way; their buffers stay as they are."""

    def __init__(
        self,
        journal: Journal,
        sends: Sequence[PeerTensor],
        receives: Sequence[PeerTensor],
        what: str,
    ) -> None:
        self._journal = journal
        self._receives = receives
        # As a real exchange does it: gloo and NCCL want contiguous memory.
        self._sent = [piece.contiguous() for _, piece in sends]
        sent, received = (
            tuple((rank, tensor.nbytes) for rank, tensor in messages)
            for messages in (sends, receives)
        )
        self._event = Exchange(*journal.place, what, sent, received)
        journal.add(self._event)

    def wait(self) -> list[torch.Tensor]:
        self._journal.add(Wait(self._event))
        self._sent.clear()
        return [buffer for _, buffer in self._receives]


class VirtualGrid(Grid):
    """Stands in for a grid of which one rank is traced, without process groups.

    Raises:
        LayoutError: an axis has no ranks.
    """

    has_values = False

    def __init__(
        self, extents: Mapping[str, int], rank: int = 0, journal: Journal | None = None
    ) -> None:
        self.extents = {axis: extents.get(axis, 1) for axis in AXES}
        if any(extent < 1 for extent in self.extents.values()):
            raise LayoutError(f"every axis of a grid needs at least one rank: {self}")
        self.data, self.depth, self.height, self.width = self.extents.values()
        self.size = math.prod(self.extents.values())
        self.rank = rank
        self.device = torch.device("cpu")
        self.coords = self.coords_of(rank)
        self.journal = Journal() if journal is None else journal
        self._groups = {}
        self._everybody = VirtualCommunicator(tuple(range(self.size)), rank, self.journal)

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
        # Those that differ from this rank along the axes only.
        places = itertools.product(*(range(self.extents[axis]) for axis in axes))
        ranks = [self.rank_of(self.coords | dict(zip(axes, at, strict=True))) for at in places]
        return VirtualCommunicator(tuple(ranks), self.rank, self.journal)


BUCKET_BYTES = 25 << 20  # [B] of DistributedDataParallel's buckets, but for the first one


class GradientBuckets:
    """Records how DistributedDataParallel would average gradients over virtual ranks.

    Its buckets are filled in the order in which gradients become ready (so it arranges them after
    the first step), and a full one leaves. They are always there: gradients are views of them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: int, journal: Journal) -> None:
        self.ranks = tuple(range(ranks))
        self.journal = journal
        self.filled = 0
        self.limit = FIRST_BUCKET_BYTES
        self.parameters = parameters
        self.views = {id(p): torch.empty_like(p) for p in parameters}

    def watch(self, stack: ExitStack) -> None:
        """Counts gradients as they become ready, until ``stack`` is closed."""
        for parameter in self.parameters:
            hook = parameter.register_post_accumulate_grad_hook(self._ready)
            stack.callback(hook.remove)

    def finish(self) -> None:
        """Sends the last bucket, as it is, at the end of a backward pass."""
        if self.filled:
            self._leave()
        self.limit = FIRST_BUCKET_BYTES

    def _leave(self) -> None:
        what = "the average of the gradients"
        place = self.journal.place
        self.journal.add(Sum(*place, what, "gradients", self.ranks, self.filled))
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


def positions(extents: Mapping[str, int]) -> list[int]:
    """Lists one rank for each kind of position: first, inside or last along each axis that cuts.

    A rank has no neighbour on one side or has both, along each axis; those of one kind do the same
    work but for shards that are one element smaller: the first ranks of an axis have the larger
    ones. All are of the first replica.

    >>> positions({"data": 2, "depth": 5, "width": 2})
    [0, 1, 2, 3, 8, 9]
    """
    _, *spatial = _shape_of(extents)
    places = [sorted({0, min(1, extent - 1), extent - 1}) for extent in spatial]
    return [_rank_at((0, *at), extents) for at in itertools.product(*places)]


def busiest(extents: Mapping[str, int]) -> int:
    """Finds the first rank of those with most neighbours and, among them, largest shards."""
    _, *spatial = _shape_of(extents)
    return _rank_at((0, *(int(extent > 2) for extent in spatial)), extents)


def _shape_of(extents: Mapping[str, int]) -> list[int]:
    return [extents.get(axis, 1) for axis in AXES]


def _rank_at(place: Sequence[int], extents: Mapping[str, int]) -> int:
    return int(np.ravel_multi_index(place, _shape_of(extents)))
