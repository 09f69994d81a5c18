"""How far the C library's heap grows: addresses by best fit, and what lies between them unused.

On the CPU freed memory is kept for the next activation (`hyperslab.comm.allocator`), so a rank's
memory is as high as its heap has ever grown, holes included. glibc takes the smallest hole into
which a block and its alignment fit, joins a hole with those beside it, and grows where there is
none. What alignment leaves over at both ends of a block becomes a small chunk; where such a chunk
was given to a small object, two holes cannot be joined. How often that happens depends on
everything else that the process allocates, so there are two bounds: always joined, and never.
"""

from __future__ import annotations

import bisect

ALIGNMENT = 64
HEADER = 16  # [B] of a chunk
SPARE = 96  # [B] more than a block that glibc 2.36 looks for, to align it


class Heap:
    """Blocks in a growing range of addresses that begins at 0; ``top`` is the highest so far."""

    def __init__(self, *, joining: bool = True) -> None:
        self.top = 0
        self.joining = joining
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
        at = bisect.bisect_left(self._holes, (size + SPARE, 0))
        if at == len(self._holes):
            return self._grow(size), size
        hole, begin = self._holes[at]
        self._remove(hole, begin)
        if self.joining or hole - size > 2 * SPARE:
            self._add(hole - size, begin + size)
        return begin, size

    def give(self, begin: int, size: int) -> None:
        """A block becomes a hole, one with the holes beside it where they are joined."""
        after = self._size_at.get(begin + size)
        if after is not None and self.joining:
            self._remove(after, begin + size)
            size += after
        before = self._size_before.get(begin)
        if before is not None and self.joining:
            self._remove(before, begin - before)
            begin -= before
            size += before
        self._add(size, begin)

    def _grow(self, size: int) -> int:
        """The last hole, if it reaches the top, becomes a part of the block."""
        last = self._size_before.get(self.top, 0) if self.joining else 0
        if last:
            self._remove(last, self.top - last)
        begin = self.top - last
        self.top = max(self.top, begin + size + SPARE)
        if self.joining:
            self._add(self.top - begin - size, begin + size)
        return begin

    def _add(self, size: int, begin: int) -> None:
        bisect.insort(self._holes, (size, begin))
        self._size_at[begin] = size
        self._size_before[begin + size] = size

    def _remove(self, size: int, begin: int) -> None:
        del self._holes[bisect.bisect_left(self._holes, (size, begin))]
        del self._size_at[begin]
        del self._size_before[begin + size]


class HeapBounds:
    """The same blocks in a heap whose holes are always joined, and in one where they never are."""

    def __init__(self) -> None:
        self.joined = Heap()
        self.apart = Heap(joining=False)

    def take(self, nbytes: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """A block in both; the first one's address is used."""
        return self.joined.take(nbytes), self.apart.take(nbytes)

    def give(self, blocks: tuple[tuple[int, int], tuple[int, int]]) -> None:
        """Free it in both."""
        self.joined.give(*blocks[0])
        self.apart.give(*blocks[1])

    @property
    def expected(self) -> int:
        """The harmonic mean of the two heights [B].

        Of the memory of 32 measured steps (`benchmarks/model.py`: CosmoFlow and the U-Net, on one
        rank and on two) the median is 3 % off, the worst 16 %.
        """
        both = self.joined.top + self.apart.top
        return 2 * self.joined.top * self.apart.top // both if both else 0
