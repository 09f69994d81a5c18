"""Draws flips and permutations of axes, applied to boxes first and to values read afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hyperslab.data.sampler import SYMMETRY, random_bits
from hyperslab.formats.source import Array
from hyperslab.geometry import Box


@dataclass(frozen=True, slots=True)
class Symmetry:
    """A map of a volume (C, D, H, W) to itself.

    Axis k of the augmented volume (0 depth, 1 height, 2 width) is axis ``order[k]`` of the stored
    one, backwards where ``flipped[k]``.

    >>> swap = Symmetry((1, 0, 2), (True, False, False))
    >>> swap.stored(Box((0, 0, 2, 0), (4, 1, 5, 6)), (4, 5, 5, 6))
    Box(lo=(0, 2, 4, 0), hi=(4, 5, 5, 6))
    """

    order: tuple[int, ...]
    flipped: tuple[bool, ...]

    @classmethod
    def draw(cls, shape: Sequence[int], *key: int, turns: bool = True) -> Symmetry:
        """Draw one of those that keep the shape (48 of a cube), evenly, by the key alone.

        Without ``turns`` it is one of the 8 flips: the axes of a scan are not interchangeable.
        """
        orders = [
            order
            for order in (itertools.permutations(range(3)) if turns else [(0, 1, 2)])
            if all(shape[1 + a] == shape[1 + k] for k, a in enumerate(order))
        ]
        numbers = [int(n) for n in random_bits(4, SYMMETRY, *key)]
        flipped = tuple(bool(n % 2) for n in numbers[1:])
        return cls(orders[numbers[0] % len(orders)], flipped)

    def stored(self, wanted: Box, shape: Sequence[int]) -> Box:
        """Returns the box of the stored volume that becomes ``wanted`` of the augmented one."""
        intervals = [wanted.interval(0)] * 4
        for k, (axis, flip) in enumerate(zip(self.order, self.flipped, strict=True), 1):
            lo, hi = wanted.interval(k)
            intervals[axis + 1] = (shape[k] - hi, shape[k] - lo) if flip else (lo, hi)
        return Box.of(intervals)

    def apply(self, values: Array) -> Array:
        """Returns the values (C, d, h, w) of a stored box, augmented; a view."""
        turned = values.transpose(0, *(axis + 1 for axis in self.order))
        return turned[(slice(None), *(slice(None, None, -1 if f else 1) for f in self.flipped))]


IDENTITY = Symmetry((0, 1, 2), (False, False, False))
"""The one that changes nothing."""

DrawSymmetry = Callable[[tuple[int, ...], int, int], Symmetry]
"""Draws the symmetry of a sample of a shape (C, D, H, W), given a pass and the sample's number."""
