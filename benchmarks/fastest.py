"""The passes of a block's convolution, each by the fastest kernel, on all ranks at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from block_kernels import BlockConvolution, Kernel, Operands, kernels, operands
from clock import slowest
from own_kernels import own_kernels
from torch import nn

import hyperslab as hs

NEAR = 1.5
"""Kernels that take longer than so many times the fastest one are not tried again."""
SHORT = 1e-3
"""[s] Passes below it are run again within a turn, up to ``REPEATS`` times."""
REPEATS = 5


class FastestPass:
    """One pass of a block, timed on all ranks at once with every kernel of torch's worth it.

    ``own``: with those of the library, too.
    """

    def __init__(
        self,
        block: BlockConvolution,
        which: str,
        given: Operands,
        grid: hs.Grid,
        near: float = NEAR,
        *,
        own: bool = False,
    ) -> None:
        """All ranks together: tries every kernel, and keeps those near the fastest.

        A kernel keeps its operands: few should be ``near`` where blocks are large.
        """
        self.grid = grid
        self.kernels: dict[str, Kernel] = {}
        times: dict[str, float] = {}
        for name, kernel in kernels(block, which, given):
            (times[name],) = slowest([_seconds(kernel)], grid.device)
            best = min(times.values())
            self.kernels[name] = kernel
            self.kernels = {
                name: kernel for name, kernel in self.kernels.items() if times[name] <= near * best
            }
        if own:
            self.kernels |= own_kernels(block, which, given)
        self.repeats = max(1, min(REPEATS, int(SHORT / best)))

    def run(self) -> list[float]:
        """Seconds of this rank with each of ``kernels``."""
        found = []
        for kernel in self.kernels.values():
            self.grid.barrier()
            found.append(min(_once(kernel) for _ in range(self.repeats)))
        return found

    def fastest(self) -> float:
        """Seconds of the slowest rank with the kernel that is fastest now."""
        return min(slowest(self.run(), self.grid.device))


def fastest_passes(
    layer: nn.Conv3d,
    shape: Sequence[int],
    dtype: torch.dtype,
    grid: hs.Grid,
    *,
    needs_dx: bool,
    near: float = NEAR,
) -> Iterator[FastestPass]:
    """Those of ``layer`` without its bias on a block of this shape, padded as the layer is.

    One at a time: each has operands of its own.
    """
    block = BlockConvolution(
        x=tuple(shape),
        weight=tuple(layer.weight.shape),
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        output_padding=(0, 0, 0),
        groups=layer.groups,
        transposed=False,
        bias=False,
        dtype=dtype,
        needs_dx=needs_dx,
    )
    given = operands(block)
    for which in block.passes:
        yield FastestPass(block, which, given, grid, near)


def _seconds(kernel: Kernel) -> float:
    """The second of two runs; infinity where this torch does not have the kernel."""
    try:
        kernel()
        return _once(kernel)
    except RuntimeError:
        return float("inf")


def _once(kernel: Kernel) -> float:
    begin = time.perf_counter()
    kernel()
    return time.perf_counter() - begin
