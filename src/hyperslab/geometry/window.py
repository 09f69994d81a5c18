"""Windows: which inputs an output of a convolution or a pooling reads, along one dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hyperslab.geometry.box import Interval
from hyperslab.geometry.partition import Cut


class WindowMap(Protocol):
    """Which inputs outputs read, and where outputs go: what placing an operator asks for."""

    def reads(self, out: Interval) -> Interval:
        """Inputs that the outputs ``out`` read; not clipped to the volume."""

    def cut_outputs(self, cut: Cut, outputs: int) -> Cut:
        """The cut of the outputs that follows from the cut of the inputs."""


def place_bounds(cut: Cut, inner: Sequence[int], outputs: int) -> Cut:
    """``outputs`` cut at ``inner``, as far as these lie inside.

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
        """Inputs from the first to the last one that a single output reads."""
        return (self.kernel - 1) * self.dilation + 1

    def outputs(self, extent: int, *, ceil: bool = False) -> int:
        """Number of outputs of ``extent`` inputs; ``ceil`` as torch's ``ceil_mode``.

        With ``ceil`` the last window has to start inside the volume or its padding before.
        """
        room = extent + self.before + self.after - self.span
        if not ceil:
            return room // self.stride + 1
        count = -(-room // self.stride) + 1
        return count - 1 if (count - 1) * self.stride >= extent + self.before else count

    def reads(self, out: Interval) -> Interval:
        """Inputs that the outputs ``out`` read; not clipped: what is outside is padding."""
        lo, hi = out
        return lo * self.stride - self.before, (hi - 1) * self.stride - self.before + self.span

    def cut_outputs(self, cut: Cut, outputs: int) -> Cut:
        """The cut of the outputs: each goes to the rank that owns the centre of its window.

        So strided layers stay aligned with the cut of their input, and halos are symmetric.
        """
        centre = (self.span - 1) // 2 - self.before
        inner = [-((centre - bound) // self.stride) for bound in cut.bounds[1:-1]]
        return place_bounds(cut, inner, outputs)

    def taps(self, output: int, inputs: Interval) -> Interval:
        """The kernel taps with which ``output`` reads ``inputs``, as ``[first, last + 1)``.

        >>> Window(3, before=1, after=1).taps(4, (3, 4))
        (0, 1)
        """
        start = output * self.stride - self.before
        first = max(0, -((start - inputs[0]) // self.dilation))
        last = min(self.kernel, (inputs[1] - 1 - start) // self.dilation + 1)
        return first, max(first, last)
