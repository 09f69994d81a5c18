"""What average and maximum pooling share: the input with its halo, the place of the output."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from hyperslab.comm import plan_exchange
from hyperslab.comm.exchange import fetch
from hyperslab.geometry import Window
from hyperslab.ops.common.placement import (
    check_input,
    output_partition,
    place_outputs,
    read_cover,
)
from hyperslab.tensor import Sharded

Windows = Sequence[Window]


class Pooled:
    """A pooling's input with its halo, and where its output lies.

    Distribution scheme: 1. place every output on the rank that owns the centre of its window,
    2. fetch the halo; beyond the volume's edge is ``fill``, 3. pool without padding along the cut
    dims, with the op's own padding along the others.
    """

    def __init__(self, x: Sharded, windows: Windows, ceil: bool, fill: float, name: str) -> None:
        check_input(x, len(windows), name)
        self.windows = windows
        self.inputs = tuple(x.shape[2:])
        extents = [w.outputs(e, ceil=ceil) for w, e in zip(windows, self.inputs, strict=True)]
        x, self.cuts = place_outputs(x, windows, extents, name)
        self.partition = output_partition(x.partition, x.shape[1], extents, self.cuts)
        covered = [cut is not None for cut in self.cuts]
        cover = read_cover(x.partition, windows, self.cuts, extents, covered)
        plan = plan_exchange(x.partition, cover, x.grid)
        self.plan = plan
        self.fill = fill
        self.name = name
        self.first = plan.wanted.lo[2:]
        self.kernel = [w.kernel for w in windows]
        self.stride = [w.stride for w in windows]
        self.padding = [0 if c else w.before for c, w in zip(covered, windows, strict=True)]
        self.out = self.partition.box(x.grid.coords)
        self.x = x

    @cached_property
    def block(self) -> torch.Tensor:
        """The rank's input with its halo."""
        what = f"the halo exchange of {self.name}"
        return fetch(self.x.block, self.plan, fill=self.fill, what=what)

    def wrap(self, block: torch.Tensor) -> Sharded:
        """A block of the output."""
        return self.x.like(block, self.partition, fresh=True)
