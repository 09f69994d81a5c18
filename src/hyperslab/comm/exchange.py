"""Point-to-point exchange of boxes, and its adjoint.

Legend: a *cover* says which box every rank wants, a *partition* which box every rank owns. A
rank's *plan* is what it sends and receives; it follows from geometry alone, without messages,
and is made once per (partition, cover).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from hyperslab.comm.agreement import lost_contact
from hyperslab.comm.grid import Grid
from hyperslab.comm.per_grid import per_grid
from hyperslab.comm.shared_memory.channels import shared_channels
from hyperslab.errors import CommError
from hyperslab.geometry import Box, Cover, Partition, TransferPlan, plan_transfers
from hyperslab.memory_format import memory_format_of


@dataclass(frozen=True)
class ExchangePlan(TransferPlan):
    """A rank's part of an exchange in which every rank owns a box and wants one.

    With what its transport asks for in every step, worked out once.
    """

    own: Box
    wanted: Box

    @cached_property
    def brought(self) -> tuple[Box, ...]:
        """The parts of the wanted box that this rank keeps or receives."""
        return (*self.kept_parts, *(t.box for t in self.receives))

    @cached_property
    def kept_parts(self) -> tuple[Box, ...]:
        """The one that it keeps, if there is one."""
        return () if self.kept is None else (self.kept,)

    @cached_property
    def in_place(self) -> bool:
        """Whether the wanted box is a part of the own one, and nobody wants anything else."""
        return self.local and self.wanted.intersect(self.own) == self.wanted

    @cached_property
    def parts_sent(self) -> list[tuple[int, tuple[slice, ...], tuple[int, ...]]]:
        """Who gets which part of the own block, and its shape."""
        return [(t.rank, t.box.slices(self.own), t.box.shape) for t in self.sends]

    @cached_property
    def parts_received(self) -> list[tuple[int, tuple[int, ...]]]:
        """Who sends pieces of which shapes."""
        return [(t.rank, t.box.shape) for t in self.receives]


def plan_exchange(partition: Partition, cover: Cover, grid: Grid) -> ExchangePlan:
    """The plan of this rank to get its box of ``cover`` from a tensor cut as ``partition``.

    Along axes that do not cut the tensor every rank has its own copy and needs nobody else's.
    """
    return _plan_exchange(grid, partition, cover)


@per_grid
def _plan_exchange(grid: Grid, partition: Partition, cover: Cover) -> ExchangePlan:
    peers = {grid.rank_of(coords): coords for coords in partition.peers(grid.coords)}
    owned = {rank: partition.box(coords) for rank, coords in peers.items()}
    wanted = {rank: cover.box(coords) for rank, coords in peers.items()}
    plan = plan_transfers(grid.rank, owned, wanted)
    return ExchangePlan(owned[grid.rank], wanted[grid.rank], plan.sends, plan.receives)


class Pending:
    """Messages under way: the buffers to fill and the handles to wait for.

    Between ranks of one machine small ones go through shared memory.
    """

    def __init__(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        what: str,
    ) -> None:
        self._receives = receives
        self._what = what
        self._shared = shared = shared_channels()
        far = [(peer, b) for peer, b in receives if shared is None or not shared.fits(b)]
        ops = [dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in far]
        self._sends = []  # kept alive until the messages have left
        for peer, piece in sends:
            if shared is not None and shared.fits(piece):
                shared.send(piece, peer, what)
            else:
                self._sends.append((peer, _packed(piece)))
        ops += [dist.P2POp(dist.isend, buffer, peer) for peer, buffer in self._sends]
        self._peers = [peer for peer, _ in (*far, *self._sends)]
        try:
            self._works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            raise self._lost(self._peers, error) from error

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
        for peer, buffer in self._receives:
            if self._shared is not None and self._shared.fits(buffer):
                self._shared.receive(buffer, peer, self._what)
        return [buffer for _, buffer in self._receives]

    def _lost(self, peers: Sequence[int], error: RuntimeError) -> CommError:
        return lost_contact(dist.get_rank(), peers, self._what, error)


def start(x: torch.Tensor, plan: ExchangePlan, what: str) -> Pending:
    """Send the boxes of ``x`` that others want and begin to receive those that this rank wants.

    ``x`` holds ``plan.own``.
    """
    sends = [(rank, x[part]) for rank, part, _ in plan.parts_sent]
    receives = [(rank, x.new_empty(shape)) for rank, shape in plan.parts_received]
    return Pending(sends, receives, what)


def start_adjoint(
    pieces: Sequence[torch.Tensor], like: torch.Tensor, plan: ExchangePlan, what: str
) -> Pending:
    """The adjoint of `start`: received pieces' gradients travel back to the boxes' owners."""
    sends = [(rank, piece) for (rank, _), piece in zip(plan.parts_received, pieces, strict=True)]
    receives = [(rank, like.new_empty(shape)) for rank, _, shape in plan.parts_sent]
    return Pending(sends, receives, f"the adjoint of {what}")


def add_returned(
    gradient: torch.Tensor, returned: Sequence[torch.Tensor], plan: ExchangePlan
) -> None:
    """Add what `start_adjoint` brought home to the gradient of the own box, in place."""
    for (_, part, _), piece in zip(plan.parts_sent, returned, strict=True):
        gradient[part].add_(piece)


def _packed(piece: torch.Tensor) -> torch.Tensor:
    # gloo refuses non-contiguous buffers, and a view would pin all of its tensor until it has left.
    piece = piece.resolve_conj().resolve_neg()  # it would send what lies in memory
    if piece.is_contiguous() and piece.untyped_storage().nbytes() == piece.nbytes:
        return piece
    return piece.clone(memory_format=torch.contiguous_format)


def new_box(box: Box, parts: Sequence[Box], like: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
    """A tensor for ``box`` to be covered by ``parts``: ``fill`` where they leave a gap."""
    out = torch.empty(
        box.shape, dtype=like.dtype, device=like.device, memory_format=memory_format_of(like)
    )
    if sum(box.intersect(part).size for part in parts) < box.size:
        out.fill_(fill)
    return out


def copy_overlap(out: torch.Tensor, box: Box, part: torch.Tensor, at: Box) -> None:
    """Copy what ``part``, which holds the box ``at``, has of ``box`` into ``out``."""
    common = box.intersect(at)
    if not common.empty:
        out[common.slices(box)] = part[common.slices(at)]


class _Fetch(torch.autograd.Function):
    """From the own box of a cut tensor to any wanted box of it.

    Distribution scheme, forward: 1. send what others want of the own box, 2. copy what is kept,
    3. receive the rest. Backward: `_GiveBack`.
    """

    @staticmethod
    def forward(ctx, x, plan: ExchangePlan, fill: float, what: str):  # type: ignore[no-untyped-def]
        ctx.plan = plan
        ctx.what = what
        pending = start(x, plan, what)
        out = new_box(plan.wanted, plan.brought, x, fill)
        copy_overlap(out, plan.wanted, x, plan.own)
        for t, piece in zip(plan.receives, pending.wait(), strict=True):
            copy_overlap(out, plan.wanted, piece, t.box)
        return out

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return _GiveBack.apply(gradient, ctx.plan, ctx.what), None, None, None


class _GiveBack(torch.autograd.Function):
    """The adjoint of `_Fetch`: from the gradient of the wanted box to that of the own box.

    Distribution scheme: 1. send received pieces' gradients home, 2. copy the kept part's
    gradient, 3. add what came home. Backward: `_Fetch`.
    """

    @staticmethod
    def forward(ctx, gradient, plan: ExchangePlan, what: str):  # type: ignore[no-untyped-def]
        ctx.plan = plan
        ctx.what = what
        pieces = [gradient[t.box.slices(plan.wanted)] for t in plan.receives]
        pending = start_adjoint(pieces, gradient, plan, what)
        own = new_box(plan.own, plan.kept_parts, gradient)
        copy_overlap(own, plan.own, gradient, plan.wanted)
        add_returned(own, pending.wait(), plan)
        return own

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return _Fetch.apply(gradient, ctx.plan, 0.0, ctx.what), None, None


def fetch(x: torch.Tensor, plan: ExchangePlan, *, fill: float = 0.0, what: str) -> torch.Tensor:
    """The wanted box of a cut tensor, differentiable; ``x`` is the own box.

    Elements outside the volume are ``fill`` and have no gradient. Where the plan needs no
    message and stays inside the own box the result is a view.
    """
    if plan.in_place:
        return x if plan.own == plan.wanted else x[plan.wanted.slices(plan.own)]
    return _Fetch.apply(x, plan, fill, what)


def give_back(gradient: torch.Tensor, plan: ExchangePlan, *, what: str) -> torch.Tensor:
    """The adjoint of `fetch`, differentiable; ``gradient`` is that of the wanted box."""
    return _GiveBack.apply(gradient, plan, what)
