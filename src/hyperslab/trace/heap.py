"""How far the C library's heap grows: addresses by best fit, and what lies between them unused.

On the CPU freed memory is kept for the next activation (`hyperslab.comm.allocator`), so a rank's
memory is as high as its heap has ever grown, holes included. glibc takes the smallest hole into
which a block fits, joins neighbouring holes, and grows where there is none.
"""

from __future__ import annotations

import bisect

HEADER = 80  # [B] that glibc adds to an aligned block, alignment included
ALIGNMENT = 64


class Heap:
    """Blocks in a growing range of addresses that begins at 0; ``top`` is the highest so far."""

    def __init__(self) -> None:
        self.top = 0
        self._holes: list[tuple[int, int]] = []  # size, begin; sorted
        self._size_at: dict[int, int] = {}  # of the hole that begins there
        self._size_before: dict[int, int] = {}  # of the hole that ends there

    def take(self, nbytes: int) -> tuple[int, int]:
        """The begin and the size of a block for so many bytes.

        >>> heap = Heap()
        >>> first, second = heap.take(1000), heap.take(100)
        >>> heap.give(*first)
        >>> heap.take(500)[0] == first[0], heap.take(1000)[0] > second[0]
        (True, True)
        """
        size = -(-(nbytes + HEADER) // ALIGNMENT) * ALIGNMENT
        at = bisect.bisect_left(self._holes, (size, 0))
        if at == len(self._holes):
            return self._grow(size), size
        hole, begin = self._holes[at]
        self._remove(hole, begin)
        if hole > size:
            self._add(hole - size, begin + size)
        return begin, size

    def give(self, begin: int, size: int) -> None:
        """A block becomes a hole, one with the holes beside it."""
        after = self._size_at.get(begin + size)
        if after is not None:
            self._remove(after, begin + size)
            size += after
        before = self._size_before.get(begin)
        if before is not None:
            self._remove(before, begin - before)
            begin -= before
            size += before
        self._add(size, begin)

    def _grow(self, size: int) -> int:
        """The last hole, if it reaches the top, becomes a part of the block."""
        last = self._size_before.get(self.top, 0)
        if last:
            self._remove(last, self.top - last)
        begin = self.top - last
        self.top = begin + size
        return begin

    def _add(self, size: int, begin: int) -> None:
        bisect.insort(self._holes, (size, begin))
        self._size_at[begin] = size
        self._size_before[begin + size] = size

    def _remove(self, size: int, begin: int) -> None:
        del self._holes[bisect.bisect_left(self._holes, (size, begin))]
        del self._size_at[begin]
        del self._size_before[begin + size]
