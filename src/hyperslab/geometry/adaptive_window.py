"""Maps that stretch or shrink a dim: cuts in proportion, and the windows of adaptive pooling."""

from __future__ import annotations

from dataclasses import dataclass

from hyperslab.geometry.box import Interval
from hyperslab.geometry.partition import Cut
from hyperslab.geometry.window import place_bounds


def scale_cut(cut: Cut, outputs: int) -> Cut:
    """The cut of ``outputs`` in proportion to that of the inputs, bounds rounded.

    So a map that grows by a whole factor is cut where the map was that shrank by it.

    >>> scale_cut(Cut("depth", (0, 4, 7)), 14).bounds
    (0, 8, 14)
    """
    double = 2 * cut.extent
    inner = [(2 * bound * outputs + cut.extent) // double for bound in cut.bounds[1:-1]]
    return place_bounds(cut, inner, outputs)


@dataclass(frozen=True, slots=True)
class AdaptiveWindow:
    """Output ``o`` reads inputs ``floor(o * extent / outputs)`` to ``ceil((o + 1) * extent /
    outputs)``, as torch's adaptive poolings do: windows that share an element where the extents
    do not divide.

    >>> [AdaptiveWindow(7, 3).reads((o, o + 1)) for o in range(3)]
    [(0, 3), (2, 5), (4, 7)]
    """

    extent: int
    outputs: int

    def reads(self, out: Interval) -> Interval:
        """Inputs that the outputs ``out`` read."""
        return out[0] * self.extent // self.outputs, -(-out[1] * self.extent // self.outputs)

    def cut_outputs(self, cut: Cut, outputs: int) -> Cut:
        """The cut of the outputs, in proportion."""
        return scale_cut(cut, outputs)
