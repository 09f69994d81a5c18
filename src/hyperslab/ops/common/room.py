"""Room in memory beside a block, for the halo of the convolution that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hyperslab.memory_format import CHANNELS_LAST, dense


@dataclass(slots=True)
class Room:
    """Planes before and after a block in its first spatial dim, in one buffer with it.

    Whoever computes the block asks for memory of it; who reads it fills what is beside it, where a
    copy of the block would be made otherwise.
    """

    before: int
    after: int
    buffer: torch.Tensor | None = field(default=None, init=False)

    def empty(self) -> Room:
        """As much, for another block."""
        return Room(self.before, self.after)

    def block(
        self, shape: Sequence[int], dtype: torch.dtype, memory_format: torch.memory_format
    ) -> torch.Tensor | None:
        """Memory for a block of this shape, a tensor of its own; once only.

        None where its planes do not lie one after the other: of several samples, or contiguous.
        """
        last = CHANNELS_LAST.get(len(shape))
        if self.buffer is not None or memory_format is not last or shape[0] != 1:
            return None
        samples, channels, extent, *rest = shape
        extents = (samples, channels, self.before + extent + self.after, *rest)
        self.buffer = torch.empty(extents, dtype=dtype, memory_format=last)
        return dense(self.buffer.narrow(2, self.before, extent), last).data
