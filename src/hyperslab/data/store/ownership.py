"""Ownership: which replica keeps which sample, found by every rank alike, without a message."""

from __future__ import annotations

from dataclasses import dataclass

from hyperslab.data.sampler import Schedule
from hyperslab.geometry import Cut


def consumers(count: int, replicas: int) -> list[tuple[int, ...]]:
    """For each slot of a mini-batch of ``count`` samples, the replicas that compute it.

    One of them, as `Grid.partition` cuts the batch; all of them where there are fewer samples than
    replicas.

    >>> consumers(3, 2)
    [(0,), (0,), (1,)]
    >>> consumers(1, 2)
    [(0, 1)]
    """
    cut = Cut.balanced("data", count, replicas)
    if cut.thin:
        return [tuple(range(replicas))] * count
    return [(i,) for i, (lo, hi) in enumerate(cut.intervals) for _ in range(lo, hi)]


@dataclass(frozen=True, slots=True)
class Ownership:
    """The samples that each replica keeps, in the order in which it gets them.

    A sample that none keeps is read again each time by the replica that computes it.
    """

    kept: tuple[tuple[int, ...], ...]

    @classmethod
    def deal(cls, schedule: Schedule, replicas: int, capacity: int) -> Ownership:
        """Deal out the samples, at most ``capacity`` to each replica.

        A sample goes to the replica that computes it in epoch 0 and would read it then anyway (if
        all do, to the emptiest); where that one is full, to the emptiest one that is not. What is
        shown again is kept already.
        """
        kept: list[list[int]] = [[] for _ in range(replicas)]
        dealt: set[int] = set()
        for batch in schedule.batches(0):
            for sample, first in zip(batch, consumers(len(batch), replicas), strict=True):
                if sample in dealt:
                    continue
                dealt.add(sample)
                wanted = min(first, key=lambda replica: len(kept[replica]))
                if len(kept[wanted]) >= capacity:
                    wanted = min(range(replicas), key=lambda replica: len(kept[replica]))
                if len(kept[wanted]) < capacity:
                    kept[wanted].append(sample)
        return cls(tuple(map(tuple, kept)))

    @property
    def replica(self) -> dict[int, int]:
        """The replica that keeps a sample, of those that are kept."""
        return {sample: replica for replica, part in enumerate(self.kept) for sample in part}

    @property
    def most(self) -> int:
        """The most samples that a replica keeps."""
        return max(map(len, self.kept))
