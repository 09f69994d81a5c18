"""Represents a box, a half-open region of a volume in global indices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Interval = tuple[int, int]
"""Denotes a half-open interval ``[lo, hi)`` of one dim, in global indices."""


@dataclass(frozen=True, slots=True)
class Box:
    """Denotes the region ``lo[i] <= index[i] < hi[i]`` of every dim ``i``.

    A box may be empty (``hi <= lo`` in some dim); empty boxes intersect nothing.

    >>> Box((0, 2), (4, 5)).shape
    (4, 3)
    >>> Box((0, 0), (4, 4)).intersect(Box((3, 4), (9, 9))).empty
    True
    """

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.lo) != len(self.hi):
            raise ValueError(f"box corners differ in length: lo={self.lo} hi={self.hi}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def of(cls, intervals: Sequence[Interval]) -> Box:
        """Return the product of one interval per dim."""
        return cls(tuple(i[0] for i in intervals), tuple(i[1] for i in intervals))

    @property
    def ndim(self) -> int:
        return len(self.lo)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple([max(0, b - a) for a, b in zip(self.lo, self.hi, strict=True)])

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def empty(self) -> bool:
        return any(b <= a for a, b in zip(self.lo, self.hi, strict=True))

    def interval(self, dim: int) -> Interval:
        return self.lo[dim], self.hi[dim]

    def intersect(self, other: Box) -> Box:
        """Return the common part; empty if there is none."""
        lo = tuple(map(max, self.lo, other.lo))
        return Box(lo, tuple(map(max, lo, map(min, self.hi, other.hi))))

    @classmethod
    def around(cls, boxes: Sequence[Box]) -> Box:
        """Return the smallest that contains all of them, at least one.

        >>> Box.around([Box((0, 3), (1, 4)), Box((2, 2), (5, 3))])
        Box(lo=(0, 2), hi=(5, 4))
        """
        lo = tuple(map(min, zip(*(box.lo for box in boxes), strict=True)))
        return cls(lo, tuple(map(max, zip(*(box.hi for box in boxes), strict=True))))

    def without(self, inner: Box) -> list[Box]:
        """Return the slabs at the sides of ``inner``, a box within this one, that make up the rest.

        >>> Box((0, 0), (4, 4)).without(Box((1, 0), (3, 3)))
        [Box(lo=(0, 0), hi=(1, 4)), Box(lo=(3, 0), hi=(4, 4)), Box(lo=(1, 3), hi=(3, 4))]
        """
        slabs = []
        for dim in range(self.ndim):
            for side in ((self.lo[dim], inner.lo[dim]), (inner.hi[dim], self.hi[dim])):
                lo = (*inner.lo[:dim], side[0], *self.lo[dim + 1 :])
                hi = (*inner.hi[:dim], side[1], *self.hi[dim + 1 :])
                slabs.append(Box(lo, hi))
        return [slab for slab in slabs if not slab.empty]

    def shift(self, offset: Sequence[int]) -> Box:
        """Return the box moved by ``offset``."""
        return Box(
            tuple(a + o for a, o in zip(self.lo, offset, strict=True)),
            tuple(b + o for b, o in zip(self.hi, offset, strict=True)),
        )

    def contains(self, other: Box) -> bool:
        """Tell whether ``other`` lies in this box; an empty one, too, has a place and extents."""
        return self.intersect(other) == other

    def slices(self, origin: Box | None = None) -> tuple[slice, ...]:
        """Index expression of this box in an array that holds ``origin`` (default: from zero).

        >>> Box((4, 2), (6, 3)).slices(Box((3, 0), (8, 8)))
        (slice(1, 3, None), slice(2, 3, None))
        """
        base = origin.lo if origin is not None else (0,) * self.ndim
        corners = zip(self.lo, self.hi, base, strict=True)
        return tuple([slice(a - o, b - o) for a, b, o in corners])
