"""What is asked for when a block is resized, and what torch's own operator makes of a dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from hyperslab.memory_format import CHANNELS_LAST, memory_format_of
from hyperslab.ops.kernels import choose
from hyperslab.ops.spatial.interpolation_weights import InterpolationWeights, find_weights


@dataclass(frozen=True, slots=True)
class Resize:
    """What a call of torch's ``interpolate`` asks for; ``scales`` are those that torch samples by.

    Without them it samples by the ratio of the extents.
    """

    mode: str
    sizes: tuple[int, ...]
    scales: tuple[float, ...] | None
    align_corners: bool | None
    antialias: bool

    def run(self, x: torch.Tensor, dims: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Resize the spatial ``dims`` of ``x`` to ``sizes`` (of all dims), leave the others."""
        extents = x.shape[2:]
        to: list[int] | None = None
        by: list[float] | None = None
        if self.scales is None:
            to = [sizes[d] if d in dims else extent for d, extent in enumerate(extents)]
        else:
            by = [self.scales[d] if d in dims else 1.0 for d in range(len(extents))]
        return F.interpolate(x, to, by, self.mode, self.align_corners, antialias=self.antialias)


@dataclass(frozen=True, slots=True)
class Kind:
    """What else torch's arithmetic depends on: one kind of block."""

    dtype: torch.dtype
    device: torch.device
    channels: int
    last: bool  # channels
    at_once: bool  # by the compiled kernel

    @staticmethod
    def of(x: torch.Tensor) -> Kind:
        wide = torch.promote_types(x.dtype, torch.float32)
        last = memory_format_of(x) is not torch.contiguous_format
        at_once = choose.resample_version(x) == "sparse"
        return Kind(wide, x.device, min(x.shape[1], 8), last, at_once)


def taps_of(
    resize: Resize, dim: int, inputs: int, outputs: int, kind: Kind
) -> InterpolationWeights:
    """The taps of torch's operator from so many inputs to so many outputs along a spatial dim."""
    n = len(resize.sizes)
    rest = [d for d in range(n) if d != dim]

    def block_of(rows: torch.Tensor, others: int) -> torch.Tensor:
        extents = [inputs if d == dim else others for d in range(n)]
        layout = CHANNELS_LAST[n + 2] if kind.last else torch.contiguous_format
        return rows.new_zeros(len(rows), kind.channels, *extents).contiguous(memory_format=layout)

    def line(at: int) -> tuple[int | slice, ...]:
        return (slice(None), 0, *(slice(None) if d == dim else at for d in range(n)))

    def alone(rows: torch.Tensor) -> torch.Tensor:
        block = block_of(rows, 2)  # with 1 formats look alike
        block += rows.view(len(rows), 1, *(-1 if d == dim else 1 for d in range(n)))
        return resize.run(block, (dim,), (outputs,) * n)[line(0)]

    def within(rows: torch.Tensor) -> torch.Tensor:
        others = 8 if n == 2 else 2  # an output that has an input's weight once: cubes need more
        block = block_of(rows, others)
        block[line((others - 1) // 2)] = rows
        scales = resize.scales and tuple(
            2.0 if d in rest else s for d, s in enumerate(resize.scales)
        )
        sizes = [outputs if d == dim else 2 * others for d in range(n)]
        return replace(resize, scales=scales).run(block, range(n), sizes)[line(others - 1)]

    like = torch.zeros(inputs, dtype=kind.dtype, device=kind.device)
    return find_weights(alone, within, like, outputs)
