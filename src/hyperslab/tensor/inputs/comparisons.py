"""Comparisons of what ranks state, whose outcome a CUDA device may owe for a while."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence

from hyperslab.comm import Grid, per_grid
from hyperslab.comm.rows import Rows

UNREAD = 8  # comparisons that a device may owe

Judge = Callable[[Sequence[Sequence[int]]], None]
"""Raises where the rows, by rank, do not agree."""


class Comparisons:
    """Those of a grid; on the CPU none is ever owed.

    On a CUDA device the first of a kind is waited for: a wrong sampler is found at the first step.
    Whoever waited for each would keep the host from queueing work ahead; so later ones are looked
    at when the next one is made, which is in the next step.
    """

    def __init__(self) -> None:
        self._owed: deque[tuple[Rows, Judge]] = deque()
        self._known: set[Hashable] = set()

    def add(self, rows: Rows, kind: Hashable, judge: Judge) -> None:
        """Judge these rows, and those before them, as soon as they are here."""
        self._owed.append((rows, judge))
        first = kind not in self._known
        self._known.add(kind)
        while self._owed:
            rows, judge = self._owed[0]
            if not (first or rows.here() or len(self._owed) > UNREAD):
                return
            self._owed.popleft()
            judge(rows.read())


@per_grid
def comparisons_of(_grid: Grid) -> Comparisons:
    """A grid's."""
    return Comparisons()
