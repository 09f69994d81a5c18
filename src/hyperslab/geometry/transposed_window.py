"""Transposed windows: which inputs an output of a transposed convolution reads, along one dim."""

from __future__ import annotations

from dataclasses import dataclass

from hyperslab.geometry.box import Interval
from hyperslab.geometry.partition import Cut
from hyperslab.geometry.window import place_bounds


@dataclass(frozen=True, slots=True)
class Crop:
    """A transposed convolution of the inputs ``inputs`` that yields certain outputs and no others.

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
        """Outputs from the first to the last one that a single input touches."""
        return (self.kernel - 1) * self.dilation + 1

    def outputs(self, extent: int) -> int:
        """Number of outputs of ``extent`` inputs."""
        return (extent - 1) * self.stride - 2 * self.padding + self.span + self.extra

    def reads(self, out: Interval) -> Interval:
        """Inputs that touch the outputs ``out``, not clipped; empty if there are none."""
        lo = out[0] + self.padding
        hi = out[1] + self.padding
        return -((self.span - 1 - lo) // self.stride), (hi - 1) // self.stride + 1

    def cut_outputs(self, cut: Cut, outputs: int) -> Cut:
        """The cut of the outputs: to every input belong the ``stride`` outputs in its middle.

        So a cut at ``b`` becomes one at about ``stride * b``, as the maps have that came down
        with the same stride, and halos are symmetric.
        """
        middle = max(0, -((self.stride - self.span) // 2)) - self.padding
        return place_bounds(cut, [b * self.stride + middle for b in cut.bounds[1:-1]], outputs)

    def crop(self, out: Interval, extent: int) -> Crop:
        """How to compute just the outputs ``out`` of a volume of ``extent`` inputs.

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
