"""Maps outputs to the inputs they read along one dim, for convolution, pooling and resizing.

In reading order: `Window` of a convolution or a pooling, `TransposedWindow` of a transposed
convolution, `AdaptiveWindow` of adaptive pooling with `scale_cut`, which cuts in proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hyperslab.geometry.box import Interval
from hyperslab.geometry.partition import Cut


class WindowMap(Protocol):
    """Tells which inputs outputs read, and where outputs go, as placing an operator needs."""

    def reads(self, out: Interval) -> Interval:
        """Returns the inputs that the outputs ``out`` read; not clipped to the volume."""

    def cut_outputs(self, cut: Cut, outputs: int) -> Cut:
        """Return the cut of the outputs that follows from the cut of the inputs."""


def place_bounds(cut: Cut, inner: Sequence[int], outputs: int) -> Cut:
    """Cuts ``outputs`` at ``inner``, as far as these lie inside.

    Where that would leave a rank without outputs although there are enough, the cut is balanced.
    """
    placed = Cut(cut.axis, (0, *(min(max(bound, 0), outputs) for bound in inner), outputs))
    if placed.thin and outputs >= cut.parts:
        return Cut.balanced(cut.axis, outputs, cut.parts)
    return placed


@dataclass(frozen=True, slots=True)
class Window:
    """Output ``o`` reads inputs ``o * stride - before + j * dilation``, ``j = 0..kernel-1``.

    ``before`` and ``after`` are the padding at the two ends of the volume.

    >>> Window(3, stride=2, before=1, after=1).reads((0, 4))
    (-1, 8)
    """

    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1

    def __post_init__(self) -> None:
        if min(self.kernel, self.stride, self.dilation) < 1:
            raise ValueError(f"kernel, stride and dilation should be at least 1: {self}")

    @property
    def span(self) -> int:
        """Counts inputs from the first to the last one that a single output reads."""
        return (self.kernel - 1) * self.dilation + 1

    def outputs(self, extent: int, *, ceil: bool = False) -> int:
        """Return the number of outputs of ``extent`` inputs; ``ceil`` is torch's ``ceil_mode``.

        With ``ceil`` the last window has to start inside the volume or its padding before.
        """
        room = extent + self.before + self.after - self.span
        if not ceil:
            return room // self.stride + 1
        count = -(-room // self.stride) + 1
        return count - 1 if (count - 1) * self.stride >= extent + self.before else count

    def reads(self, out: Interval) -> Interval:
        """Returns the inputs that outputs ``out`` read; not clipped: what is outside is padding."""
        lo, hi = out
        return lo * self.stride - self.before, (hi - 1) * self.stride - self.before + self.span

    def cut_outputs(self, cut: Cut, outputs: int) -> Cut:
        """Return the cut of the outputs: each goes to the rank that owns the centre of its window.

        So strided layers stay aligned with the cut of their input, and halos are symmetric.
        """
        centre = (self.span - 1) // 2 - self.before
        inner = [-((centre - bound) // self.stride) for bound in cut.bounds[1:-1]]
        return place_bounds(cut, inner, outputs)

    def taps(self, output: int, inputs: Interval) -> Interval:
        """Return the kernel taps with which ``output`` reads ``inputs``, as ``[first, last + 1)``.

        >>> Window(3, before=1, after=1).taps(4, (3, 4))
        (0, 1)
        """
        start = output * self.stride - self.before
        first = max(0, -((start - inputs[0]) // self.dilation))
        last = min(self.kernel, (inputs[1] - 1 - start) // self.dilation + 1)
        return first, max(first, last)


@dataclass(frozen=True, slots=True)
class Crop:
    """Describes a transposed convolution of ``inputs`` that yields certain outputs and no others.

    ``padding`` and ``extra`` are the op's padding and output_padding: how many of all the outputs
    that the inputs touch are dropped before the first one, and how many more or fewer after the
    last one.
    """

    inputs: Interval
    padding: int
    extra: int


@dataclass(frozen=True, slots=True)
class TransposedWindow:
    """Output ``o`` reads inputs ``i`` with ``i * stride - padding + j * dilation == o``,
    ``j = 0..kernel-1``; ``extra`` outputs more at the end are torch's ``output_padding``.

    >>> TransposedWindow(3, stride=2, padding=1, extra=1).reads((4, 8))
    (2, 5)
    """

    kernel: int
    stride: int = 1
    padding: int = 0
    extra: int = 0
    dilation: int = 1

    def __post_init__(self) -> None:
        if min(self.kernel, self.stride, self.dilation) < 1:
            raise ValueError(f"kernel, stride and dilation should be at least 1: {self}")
        if min(self.padding, self.extra) < 0:
            raise ValueError(f"padding and output_padding should not be negative: {self}")
        if self.extra >= max(self.stride, self.dilation):
            raise ValueError(f"output_padding must be smaller than stride or dilation: {self}")

    @property
    def span(self) -> int:
        """Counts outputs from the first to the last one that a single input touches."""
        return (self.kernel - 1) * self.dilation + 1

    def outputs(self, extent: int) -> int:
        """Return the number of outputs of ``extent`` inputs."""
        return (extent - 1) * self.stride - 2 * self.padding + self.span + self.extra

    def reads(self, out: Interval) -> Interval:
        """Returns the inputs that touch outputs ``out``, not clipped; empty if there are none."""
        lo = out[0] + self.padding
        hi = out[1] + self.padding
        return -((self.span - 1 - lo) // self.stride), (hi - 1) // self.stride + 1

    def cut_outputs(self, cut: Cut, outputs: int) -> Cut:
        """Return the cut of the outputs: every input has the ``stride`` outputs in its middle.

        So a cut at ``b`` becomes one at about ``stride * b``, as the maps have that came down
        with the same stride, and halos are symmetric.
        """
        middle = max(0, -((self.stride - self.span) // 2)) - self.padding
        return place_bounds(cut, [b * self.stride + middle for b in cut.bounds[1:-1]], outputs)

    def crop(self, out: Interval, extent: int) -> Crop:
        """Plan how to compute just the outputs ``out`` of a volume of ``extent`` inputs.

        The inputs are those that touch the outputs, and a few more where the op could not drop
        as many outputs at one end as it must; those may lie outside the volume.
        """
        first, end = self.reads(out)
        latest = (out[0] + self.padding) // self.stride  # the op cannot begin later
        first = min(max(first, 0), latest)
        end = max(min(end, extent), first + 1)
        extra = sum(out) + 2 * self.padding + self.stride - self.span - self.stride * (first + end)
        while extra < 0:
            first -= 1
            extra += self.stride
        while extra >= max(self.stride, self.dilation):
            end += 1
            extra -= self.stride
        return Crop((first, end), out[0] + self.padding - first * self.stride, extra)


def scale_cut(cut: Cut, outputs: int) -> Cut:
    """Return the cut of ``outputs`` in proportion to that of the inputs, bounds rounded.

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
        """Returns the inputs that the outputs ``out`` read."""
        return out[0] * self.extent // self.outputs, -(-out[1] * self.extent // self.outputs)

    def cut_outputs(self, cut: Cut, outputs: int) -> Cut:
        """Return the cut of the outputs, in proportion."""
        return scale_cut(cut, outputs)
