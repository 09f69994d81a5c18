"""Communicators: messages and sums among some ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from hyperslab.comm.agreement import lost_contact
from hyperslab.comm.bootstrap import GroupReference, device_of_rank, group_has_ended
from hyperslab.comm.shared_memory.channels import shared_channels
from hyperslab.errors import CommError

PeerTensor = tuple[int, torch.Tensor]
"""A rank, and what it is sent or the buffer for what it sends."""


class Arriving(Protocol):
    """Messages under way."""

    def wait(self) -> list[torch.Tensor]:
        """The received buffers, in the order in which they were asked for."""


class Communicator(Protocol):
    """Some ranks and their way to each other."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Their numbers among all ranks."""

    def rank(self) -> int:
        """Which of them this one is."""

    def size(self) -> int:
        """How many they are."""

    def exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], what: str
    ) -> Arriving:
        """Begin to send and to receive; ranks are numbered among all."""

    def sum_in_place(self, x: torch.Tensor, what: str) -> torch.Tensor:
        """Sum a contiguous tensor over the ranks, in place.

        Raises:
            CommError: one of them died or did not answer within the time limit.
        """


class GroupCommunicator:
    """Over a process group; between ranks of one machine through the memory that they share."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = GroupReference(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        on_device = device_of_rank(group).type == "cuda"
        self._through_host = on_device and "nccl" not in dist.get_backend(group)

    @property
    def group(self) -> dist.ProcessGroup:
        """
        Raises:
            CommError: it has ended.
        """
        return self._group("a question for it")

    def rank(self) -> int:
        return self.group.rank()

    def size(self) -> int:
        return len(self.ranks)

    def exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], what: str
    ) -> Arriving:
        way = ThroughHost if self._through_host else Pending
        return way(self._group(what), sends, receives, what)

    def sum_in_place(self, x: torch.Tensor, what: str) -> torch.Tensor:
        shared = shared_channels()
        if shared is not None and x.device.type == "cpu":
            shared.all_reduce(x, self.ranks, what)
            return x
        group = self._group(what)
        try:
            dist.all_reduce(x, group=group)
        except RuntimeError as error:
            me = dist.get_rank()
            others = [rank for rank in self.ranks if rank != me]
            raise lost_contact(me, others, what, error) from error
        return x


class Pending:
    """Messages under way: the buffers to fill and the handles to wait for.

    Between ranks of one machine small ones go through shared memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        sends: Sequence[PeerTensor],
        receives: Sequence[PeerTensor],
        what: str,
    ) -> None:
        self._receives = receives
        self._what = what
        self._shared = shared = shared_channels()
        far = [(peer, b) for peer, b in receives if shared is None or not shared.fits(b)]
        self._sends = []  # kept alive until the messages have left
        for peer, piece in sends:
            if shared is not None and shared.fits(piece):
                shared.send(piece, peer, what)
            else:
                self._sends.append((peer, _packed(piece)))
        self._turned = [(b, _contiguous_like(b)) for _, b in far if not b.is_contiguous()]
        into = {id(buffer): contiguous for buffer, contiguous in self._turned}
        far = [(peer, into.get(id(buffer), buffer)) for peer, buffer in far]
        self._peers = [peer for peer, _ in (*far, *self._sends)]
        try:
            ops = [dist.P2POp(dist.irecv, buffer, peer, group) for peer, buffer in far]
            ops += [dist.P2POp(dist.isend, buffer, peer, group) for peer, buffer in self._sends]
            self._works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            raise self._lost(self._peers, error) from error
        except ValueError as error:
            raise group_has_ended(what) from error

    def wait(self) -> list[torch.Tensor]:
        """The received buffers, in the order of the plan.

        Raises:
            CommError: a peer died or did not answer within the process group's time limit.
        """
        for index, work in enumerate(self._works):
            peers = self._peers if len(self._works) < len(self._peers) else [self._peers[index]]
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost(peers, error) from error
        for buffer, contiguous in self._turned:
            buffer.copy_(contiguous)
        for peer, buffer in self._receives:
            if self._shared is not None and self._shared.fits(buffer):
                self._shared.receive(buffer, peer, self._what)
        return [buffer for _, buffer in self._receives]

    def _lost(self, peers: Sequence[int], error: RuntimeError) -> CommError:
        return lost_contact(dist.get_rank(), peers, self._what, error)


def _packed(piece: torch.Tensor) -> torch.Tensor:
    # gloo refuses non-contiguous buffers, and a view would pin all of its tensor until it has left.
    piece = piece.resolve_conj().resolve_neg()  # it would send what lies in memory
    own = piece.device.type == "cuda" or piece.untyped_storage().nbytes() == piece.nbytes
    if piece.is_contiguous() and own:  # what a GPU sends is waited for by the same operator
        return piece
    return piece.clone(memory_format=torch.contiguous_format)


def _contiguous_like(buffer: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(buffer, memory_format=torch.contiguous_format)


class ThroughHost:
    """Messages of CUDA tensors by gloo, which sends from the host's memory alone.

    Both copies wait for what is queued on the device, so nothing hides behind them: it is how
    several ranks share one device to be tested there.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        sends: Sequence[PeerTensor],
        receives: Sequence[PeerTensor],
        what: str,
    ) -> None:
        self._buffers = [buffer for _, buffer in receives]
        arriving = [(peer, torch.empty(b.shape, dtype=b.dtype)) for peer, b in receives]
        leaving = [(peer, piece.detach().cpu()) for peer, piece in sends]
        self._pending = Pending(group, leaving, arriving, what)

    def wait(self) -> list[torch.Tensor]:
        """As `Pending.wait`."""
        for buffer, arrived in zip(self._buffers, self._pending.wait(), strict=True):
            buffer.copy_(arrived)
        return self._buffers
