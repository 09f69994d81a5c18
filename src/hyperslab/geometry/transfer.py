"""Answers the one question of this project: which part of a wanted box does each owner hold?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hyperslab.geometry.box import Box


@dataclass(frozen=True, slots=True)
class Transfer:
    """``box`` travels from or to ``rank``."""

    rank: int
    box: Box


def transfers(wanted: Box, owners: Iterable[tuple[int, Box]]) -> tuple[Transfer, ...]:
    """Return the non-empty parts of ``wanted`` that each owner holds, in the order of the owners.

    >>> transfers(Box((3,), (7,)), [(0, Box((0,), (4,))), (1, Box((4,), (8,)))])
    (Transfer(rank=0, box=Box(lo=(3,), hi=(4,))), Transfer(rank=1, box=Box(lo=(4,), hi=(7,))))
    """
    parts = ((rank, wanted.intersect(box)) for rank, box in owners)
    return tuple(Transfer(rank, part) for rank, part in parts if not part.empty)


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Describes one rank's part of an exchange; all boxes in global indices.

    ``own`` is the box that this rank owns and ``wanted`` the one that it asks for, either of them
    `None` where there is none. A wanted box may reach over the edge of the volume: nobody sends
    what is outside. ``kept`` is the part of it that this rank owns itself.

    The plan says nothing of how boxes travel: `hyperslab.comm.exchange` carries device tensors,
    `hyperslab.comm.host_p2p` the bytes of arrays in the background.
    """

    own: Box | None
    wanted: Box | None
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]

    @property
    def kept(self) -> Box | None:
        """Return the part of the wanted box that this rank owns itself, if there is any."""
        if self.own is None or self.wanted is None:
            return None
        common = self.wanted.intersect(self.own)
        return None if common.empty else common

    @property
    def local(self) -> bool:
        """Tell whether this rank neither sends nor receives."""
        return not self.sends and not self.receives


def plan_transfers(rank: int, owned: Mapping[int, Box], wanted: Mapping[int, Box]) -> TransferPlan:
    """Return the part of ``rank`` in an exchange after which every rank of ``wanted`` has its box.

    ``owned`` are the boxes of the ranks that hold something; where two of them hold the same
    element both send it, so name one owner for each element. Every rank works out its own part
    from the same two mappings, without a message.

    >>> halves = {0: Box((0,), (4,)), 1: Box((4,), (7,))}
    >>> plan = plan_transfers(0, halves, {0: Box((0,), (5,)), 1: Box((3,), (7,))})
    >>> plan.sends
    (Transfer(rank=1, box=Box(lo=(3,), hi=(4,))),)
    >>> plan.receives
    (Transfer(rank=1, box=Box(lo=(4,), hi=(5,))),)
    >>> plan_transfers(0, halves, {0: Box((0,), (7,))}).sends  # all goes to rank 0
    ()
    """
    own = owned.get(rank)
    wants = wanted.get(rank)
    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()
    if own is not None:
        sends = transfers(own, ((peer, box) for peer, box in wanted.items() if peer != rank))
    if wants is not None:
        receives = transfers(wants, ((peer, box) for peer, box in owned.items() if peer != rank))
    return TransferPlan(own, wants, sends, receives)
