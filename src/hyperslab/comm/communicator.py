"""Sends messages and sums tensors among some ranks, with one communicator for each purpose.

`Communicator` is the interface, `GroupCommunicator` the one over a process group. On a GPU what
goes through one communicator waits in line, on one stream. So halos, which the next operator
needs, have one of their own, with priority; so have statistics and the gradients, which travel
behind the backward pass.
"""

from __future__ import annotations

import math
import resource
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist

from hyperslab.comm.agreement import keeping_contact, lost_contact
from hyperslab.comm.bootstrap import (
    GroupReference,
    agree_on_group_names,
    backend_of,
    device_of_rank,
    group_has_ended,
    make_group,
    make_own_group,
    own_rank,
    ranks_of,
    time_limit,
    world,
)
from hyperslab.comm.shared_memory import shared_channels
from hyperslab.errors import CommError, UnsupportedOp
from hyperslab.util.capture import refuse_capture
from hyperslab.util.torch_internals import (
    begin_messages,
    set_time_limit,
    sum_in_group,
)

PeerTensor = tuple[int, torch.Tensor]
"""Pairs a rank with what it is sent, or with the buffer for what it sends."""


class Arriving(Protocol):
    """Represents messages under way."""

    def wait(self) -> list[torch.Tensor]:
        """Return the received buffers, in the order in which they were asked for."""


@contextmanager
def completing(arriving: Arriving) -> Iterator[Arriving]:
    """Receive what is under way also where the work inside fails.

    A program may catch that error and go on; the next operator would take these messages for its
    own.
    """
    try:
        yield arriving
    except BaseException:
        with suppress(CommError):
            arriving.wait()
        raise


class Communicator(Protocol):
    """Connects a group of ranks with each other."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return its ranks' numbers among all ranks."""

    def rank(self) -> int:
        """Return which of them this one is."""

    def size(self) -> int:
        """Return how many ranks there are."""

    def exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], what: str
    ) -> Arriving:
        """Begin to send and to receive; ranks are numbered among all, who form the group."""

    def sum_in_place(self, x: torch.Tensor, what: str) -> torch.Tensor:
        """Sum a contiguous tensor over the ranks, in place.

        Raises:
            CommError: one of them died or did not answer within the time limit.
        """


@dataclass(frozen=True)
class PackedMessages:
    """Describes messages, by rank and shape, that lie one behind the other in a flat tensor."""

    parts: Sequence[tuple[int, tuple[int, ...]]]

    @cached_property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for _, shape in self.parts]

    def pieces(self, flat: torch.Tensor) -> list[PeerTensor]:
        """Return the messages apart, in shapes: in shared memory channels may come last."""
        pieces = zip(self.parts, flat.split_with_sizes(self.sizes), strict=True)
        return [(rank, piece.view(shape)) for (rank, shape), piece in pieces]


class GroupCommunicator:
    """Over a process group; between ranks of one machine through the memory that they share."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = GroupReference(group)
        self.ranks = ranks_of(group)
        on_device = device_of_rank(group).type == "cuda"
        backend = backend_of(group)
        self._shares = "gloo" in backend  # memory between ranks of one machine, if they can
        self._through_host = on_device and "nccl" not in backend
        self._noted = on_device and not self._through_host

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the process group, unless it has ended (`CommError`)."""
        return self._group("a question for it")

    def rank(self) -> int:
        return self.group.rank()

    def size(self) -> int:
        return len(self.ranks)

    def exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], what: str
    ) -> Arriving:
        return PendingMessages(self._open(what), sends, receives, what, self._through_host)

    def _open(self, what: str) -> dist.ProcessGroup:
        """Return the process group; NCCL's operation for ``what`` begins there."""
        if self._noted:
            _BEGUN.append((time.time_ns(), what))
        return self._group(what)

    def sends_alone(self, x: torch.Tensor) -> bool:
        """Tell if the process group sends all messages of a tensor, out of the memory it is in."""
        if x.is_cuda:
            return self._noted
        return not self._shares or shared_channels() is None

    def exchange_flat(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], what: str
    ) -> None:
        """Exchange parts of flat tensors of a type that NCCL has, which need no look at each.

        Raises:
            CommError: a peer died or did not answer within the time limit.
        """
        works = _begin(self._open(what), sends, receives, what)
        _wait_for(works, sends, receives, what)

    def sum_in_place(self, x: torch.Tensor, what: str) -> torch.Tensor:
        wide = _SUMMED_AS.get(x.dtype)
        if wide is not None:
            return x.copy_(self.sum_in_place(x.to(wide), what))
        if x.dtype not in _SENT_AS_THEY_ARE and not x.is_complex():
            raise UnsupportedOp(
                f"{what}: ranks cannot add up {x.dtype}, of shape {tuple(x.shape)}\n"
                "    convert it to a type that holds the sum: x.to(torch.int64), x.float()"
            )
        shared = shared_channels() if self._shares and x.device.type == "cpu" else None
        if shared is not None:
            shared.all_reduce(x, self.ranks, what)
            return x
        group = self._open(what)
        try:
            sum_in_group(group, x)
        except RuntimeError as error:
            raise lost_contact(own_rank(), self.ranks, what, error) from error
        return x


_BEGUN: deque[tuple[int, str]] = deque(maxlen=4096)
"""Notes when [ns] this process began its last messages over NCCL, and what for."""


def note_messages(what: str) -> None:
    """Note messages over NCCL that begin without Python: those of a graph that is replayed."""
    _BEGUN.append((time.time_ns(), what))


def messages_begun() -> list[tuple[int, str]]:
    """Return when [ns since 1970] messages over NCCL were begun of late, and what for."""
    return list(_BEGUN)


def purposes_of_groups() -> dict[str, str]:
    """Return what each communicator is for, by its name in torch."""
    everybody = world()
    if everybody is None:
        return {}
    found: dict[str, str] = {everybody.group_name: "everything else"}
    made = _OF_WORLD.get(everybody)
    if made is not None:
        for purpose in ("halos", "statistics", "gradients"):
            found[getattr(made, purpose).group.group_name] = purpose
        for part in made.parts.values():
            found[part.group.group_name] = "statistics of a part of the ranks"
    return found


_Place = tuple[int, torch.Tensor, torch.Tensor, bool]
"""Holds a sender, a buffer, where its message arrives, and if that is through shared memory."""


class PendingMessages:
    """Holds messages under way: the buffers to fill and the handles to wait for.

    Between ranks of one machine small ones go through shared memory. Those of CUDA tensors go
    ``through_host`` over gloo, which sends from the host's memory alone: both copies wait for what
    is queued on the device, so nothing hides behind them. It is how several ranks share one device
    to be tested there.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        sends: Sequence[PeerTensor],
        receives: Sequence[PeerTensor],
        what: str,
        through_host: bool = False,
    ) -> None:
        if through_host:
            refuse_capture(what, "start the ranks with NCCL: gloo sends from the host's memory")
            sends = [(peer, piece.detach().cpu()) for peer, piece in sends]
        self._receives = receives
        self._what = what
        self._arrived = False
        self._shared = shared = shared_channels()
        self._sends: list[PeerTensor] = []  # kept alive until the messages have left
        for peer, piece in sends:
            if shared is not None and shared.fits(piece):
                shared.send(piece, peer, what)
            else:
                self._sends.append((peer, as_sent(_contiguous_piece(piece))))
        self._places: list[_Place] = []
        for peer, buffer in receives:
            arriving = torch.empty(buffer.shape, dtype=buffer.dtype) if through_host else buffer
            near = shared is not None and shared.fits(arriving)
            if not near and not arriving.is_contiguous():  # gloo and NCCL fill no other memory
                arriving = arriving.new_empty(arriving.shape)
            self._places.append((peer, buffer, arriving, near))
        self._arriving = [(peer, as_sent(far)) for peer, _, far, near in self._places if not near]
        self._works = _begin(group, self._sends, self._arriving, what)

    def wait(self) -> list[torch.Tensor]:
        """Return the received buffers, in the order of the plan; those of before if called again.

        Raises:
            CommError: a peer died or did not answer within the process group's time limit.
        """
        if self._arrived:
            return [buffer for _, buffer in self._receives]
        self._arrived = True
        _wait_for(self._works, self._sends, self._arriving, self._what)
        for peer, buffer, arriving, near in self._places:
            if near and self._shared is not None:
                self._shared.receive(arriving, peer, self._what)
            if arriving is not buffer:
                buffer.copy_(arriving)
        return [buffer for _, buffer in self._receives]


def _begin(
    group: dist.ProcessGroup,
    sends: Sequence[PeerTensor],
    receives: Sequence[PeerTensor],
    what: str,
) -> list[dist.Work]:
    """Begin messages; their works are one for each, what arrives first, or one for all of them."""
    if not sends and not receives:
        return []
    try:
        return begin_messages(group, receives, sends)
    except RuntimeError as error:
        peers = [peer for peer, _ in (*receives, *sends)]
        raise lost_contact(own_rank(), peers, what, error) from error
    except ValueError as error:
        raise group_has_ended(what) from error


def _wait_for(
    works: Sequence[dist.Work],
    sends: Sequence[PeerTensor],
    receives: Sequence[PeerTensor],
    what: str,
) -> None:
    for index, work in enumerate(works):
        try:
            work.wait()
        except RuntimeError as error:
            peers = [peer for peer, _ in (*receives, *sends)]
            late = peers if len(works) < len(peers) else [peers[index]]
            raise lost_contact(own_rank(), late, what, error) from error


_SENT_AS_THEY_ARE = frozenset(
    (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.bool,
    )
)
"""Lists the types that NCCL has; raw counts of particles are int16, spectra are complex."""

_SUMMED_AS = {
    torch.bool: torch.int32,  # NCCL's sum of two is True
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
"""Lists types that are added up in a wider one; complex numbers torch adds up by itself."""


def as_sent(buffer: torch.Tensor) -> torch.Tensor:
    """Return a contiguous buffer, as bytes where NCCL does not have its type."""
    if buffer.dtype in _SENT_AS_THEY_ARE:
        return buffer
    return buffer.view(-1).view(torch.uint8)


LITTLE_HELD = 1 << 18
"""[B] A view's whole tensor up to which a message may hold it until it has left."""


def _contiguous_piece(piece: torch.Tensor) -> torch.Tensor:
    # gloo refuses non-contiguous buffers, and a view would pin all of its tensor until it has left.
    piece = piece.resolve_conj().resolve_neg()  # it would send what lies in memory
    if not piece.is_contiguous():
        return piece.clone(memory_format=torch.contiguous_format)
    if piece.device.type == "cuda":  # what a GPU sends is waited for by the same operator
        return piece
    held = piece.untyped_storage().nbytes()
    return piece if held <= max(piece.nbytes, LITTLE_HELD) else piece.clone()


RankParts = tuple[tuple[int, ...], ...]
"""Divides all ranks, each in one part."""


@dataclass(frozen=True, slots=True)
class Communicators:
    """Over all ranks, one for each purpose; `torch.distributed`'s own is for everything else.

    ``parts``: for sums over a part of the ranks, this rank's; grids with the same parts share them.
    """

    halos: GroupCommunicator
    statistics: GroupCommunicator
    gradients: GroupCommunicator
    parts: dict[RankParts, GroupCommunicator] = field(default_factory=dict)


_OF_WORLD: weakref.WeakKeyDictionary[dist.ProcessGroup, Communicators] = weakref.WeakKeyDictionary()
"""Belong to the process group of all ranks, which may have several grids, and end with it."""


def communicators_of_world() -> Communicators:
    """Return the communicators of all ranks, which they make together at the first call.

    Raises:
        CommError: a rank died or did not come within the time limit.
    """
    everybody = world()
    assert everybody is not None
    if everybody not in _OF_WORLD:
        # gloo connects every pair of ranks in every group: with 200 ranks they are more than the
        # 1024 files that a process may open unless it asks for as many as the system allows.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError, OSError):  # where "unlimited" is more than the kernel gives
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        _OF_WORLD[everybody] = Communicators(
            halos=_make_for_purpose("halos", urgent=True),
            statistics=_make_for_purpose("statistics"),
            gradients=_make_for_purpose("gradients"),
        )
    return _OF_WORLD[everybody]


def communicator_of_part(parts: Sequence[Sequence[int]]) -> GroupCommunicator:
    """Return the communicator of this rank's part; all ranks call this with the same parts.

    Raises:
        CommError: a rank died or did not come within the time limit.
    """
    made = communicators_of_world().parts
    key = tuple(map(tuple, parts))
    if key not in made:
        with keeping_contact("the start of the communicator for statistics of a part of the ranks"):
            agree_on_group_names()
            made[key] = _connect_group(make_own_group(key, timeout=time_limit()))
    return made[key]


def _make_for_purpose(purpose: str, *, urgent: bool = False) -> GroupCommunicator:
    """Make one; if ``urgent``, its kernels go before others that wait for the device."""
    options = None
    if urgent and "nccl" in backend_of():
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        set_time_limit(options, time_limit())  # torch warns where it differs from the group's
    with keeping_contact(f"the start of the communicator for {purpose}"):
        agree_on_group_names()
        return _connect_group(make_group(timeout=time_limit(), pg_options=options))


def _connect_group(group: dist.ProcessGroup) -> GroupCommunicator:
    """Return a group's communicator, once all its ranks have met there.

    Nobody must leave it while others still connect to it, and NCCL connects at the first call, for
    which it needs all ranks: that must not be a message between two of them.
    """
    here = torch.zeros(1, device=device_of_rank(group))
    dist.all_reduce(here, group=group)
    here.item()  # on a GPU it has only been queued so far
    return GroupCommunicator(group)
