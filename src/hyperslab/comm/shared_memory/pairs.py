"""The semaphores of every ordered pair of ranks, by which they wait for each other."""

from __future__ import annotations

import itertools

from hyperslab.comm.shared_memory.segment import Segment

FULL, FREE, TOKEN = range(3)
"""Of a pair: a message has come, a slot is free, and the sender has got somewhere in a sum."""

FIRST_VALUES = (0, 2, 0)
"""Two slots are free at the beginning."""

SLOTS = FIRST_VALUES[FREE]


class RankPairs:
    """Waits for ranks of a segment, and posts to them; ``index`` numbers the ordered pairs."""

    def __init__(self, segment: Segment, size: int) -> None:
        self._segment = segment
        self.index = {pair: i for i, pair in enumerate(itertools.permutations(range(size), 2))}
        self._first = {pair: i * len(FIRST_VALUES) for pair, i in self.index.items()}

    def post(self, sender: int, receiver: int, kind: int) -> None:
        self._segment.post(self._first[sender, receiver] + kind)

    def wait(self, sender: int, receiver: int, kind: int, peer: int, what: str) -> None:
        """Until there is a post for this rank, which is the sender or the receiver.

        Raises:
            CommError: see `Segment.wait`.
        """
        self._segment.wait(self._first[sender, receiver] + kind, peer, what)
