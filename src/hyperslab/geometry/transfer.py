"""The one question of this project: which part of a wanted box does each owner hold?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hyperslab.geometry.box import Box


@dataclass(frozen=True, slots=True)
class Transfer:
    """``box`` travels from or to ``rank``."""

    rank: int
    box: Box


def transfers(wanted: Box, owners: Iterable[tuple[int, Box]]) -> tuple[Transfer, ...]:
    """The non-empty parts of ``wanted`` that each owner holds, in the order of the owners.

    >>> transfers(Box((3,), (7,)), [(0, Box((0,), (4,))), (1, Box((4,), (8,)))])
    (Transfer(rank=0, box=Box(lo=(3,), hi=(4,))), Transfer(rank=1, box=Box(lo=(4,), hi=(7,))))
    """
    parts = ((rank, wanted.intersect(box)) for rank, box in owners)
    return tuple(Transfer(rank, part) for rank, part in parts if not part.empty)
