"""Average and maximum pooling."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.comm import plan_exchange
from hyperslab.comm.exchange import fetch
from hyperslab.errors import LayoutError
from hyperslab.geometry import Window
from hyperslab.ops.common.arguments import per_dim
from hyperslab.ops.common.placement import (
    check_input,
    output_partition,
    place_outputs,
    read_cover,
)
from hyperslab.ops.kernels import choose
from hyperslab.ops.kernels.tile_average import TileAverage
from hyperslab.ops.pooling.flat_indices import move_indices
from hyperslab.tensor import Sharded, register

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
MAX_WITH_INDICES = {
    1: F.max_pool1d_with_indices,
    2: F.max_pool2d_with_indices,
    3: F.max_pool3d_with_indices,
}
AVG = {2: F.avg_pool2d, 3: F.avg_pool3d}


def pool_windows(n: int, kernel: Any, stride: Any, padding: Any, dilation: Any) -> list[Window]:
    """One window per spatial dim; an absent stride is the kernel's extent."""
    kernels = per_dim(kernel, n)
    strides = kernels if stride is None or stride == [] or stride == () else per_dim(stride, n)
    pads, dilations = per_dim(padding, n), per_dim(dilation, n)
    for k, p in zip(kernels, pads, strict=True):
        if not 0 <= p <= k // 2:
            raise ValueError(f"padding {p} must be at most half of the pooling window {k}")
    return [
        Window(k, s, p, p, d) for k, s, p, d in zip(kernels, strides, pads, dilations, strict=True)
    ]


class Pooled:
    """A pooling's input with its halo, and where its output lies.

    Distribution scheme: 1. place every output on the rank that owns the centre of its window,
    2. fetch the halo; beyond the volume's edge is ``fill``, 3. pool without padding along the cut
    dims, with the op's own padding along the others.
    """

    def __init__(
        self, n: int, x: Sharded, windows: list[Window], ceil: bool, fill: float, name: str
    ) -> None:
        check_input(x, n, name)
        self.windows = windows
        self.inputs = tuple(x.shape[2:])
        extents = [w.outputs(e, ceil=ceil) for w, e in zip(windows, self.inputs, strict=True)]
        x, self.cuts = place_outputs(x, windows, extents, name)
        self.partition = output_partition(x.partition, x.shape[1], extents, self.cuts)
        covered = [cut is not None for cut in self.cuts]
        cover = read_cover(x.partition, windows, self.cuts, extents, covered)
        plan = plan_exchange(x.partition, cover, x.grid)
        self.local = fetch(x.local, plan, fill=fill, what=f"the halo exchange of {name}")
        self.first = plan.wanted.lo[2:]
        self.padding = [0 if c else w.before for c, w in zip(covered, windows, strict=True)]
        self.out = self.partition.box(x.grid.coords)
        self.x = x

    @property
    def kernel(self) -> list[int]:
        return [w.kernel for w in self.windows]

    @property
    def stride(self) -> list[int]:
        return [w.stride for w in self.windows]

    def wrap(self, local: torch.Tensor) -> Sharded:
        return self.x.like(local, self.partition)


def max_pool(
    n: int, x: Sharded, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> Sharded:
    p, options = _for_maximum(n, x, kernel, stride, padding, dilation, ceil)
    return p.wrap(MAX[n](p.local, p.kernel, p.stride, p.padding, *options))


def max_pool_with_indices(
    n: int, x: Sharded, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> tuple[Sharded, Sharded]:
    """The maxima and their flat positions in the whole volume."""
    p, options = _for_maximum(n, x, kernel, stride, padding, dilation, ceil)
    y, index = MAX_WITH_INDICES[n](p.local, p.kernel, p.stride, p.padding, *options)

    def move(dim: int, at: torch.Tensor) -> torch.Tensor:
        at = at + p.first[dim]
        # Padding wins where all is -inf: torch names the window's first element that is not.
        return torch.where(at < 0, at % p.windows[dim].dilation, at)

    return p.wrap(y), p.wrap(move_indices(index, p.local.shape[2:], move, p.inputs))


def _for_maximum(
    n: int, x: Sharded, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> tuple[Pooled, tuple[Any, ...]]:
    """The input, and what else torch's own pooling of it takes."""
    windows = pool_windows(n, kernel, stride, padding, dilation)
    lowest = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    p = Pooled(n, x, windows, ceil, lowest, f"max_pool{n}d")
    for window, extent in zip(windows, p.inputs, strict=True):
        _check_not_empty(window, extent, ceil, x)
    return p, ([w.dilation for w in windows], ceil)


def _check_not_empty(window: Window, extent: int, ceil: bool, x: Sharded) -> None:
    """Refuse a window that steps over the volume: torch's backward pass would write elsewhere."""
    outputs = range(window.outputs(extent, ceil=ceil) if extent < window.dilation else 0)
    taps = (window.taps(o, (0, extent)) for o in outputs)
    if any(first == end for first, end in taps):
        raise LayoutError(
            f"max_pool of {x.partition} on {x.grid}: {window} reads nothing of the extent {extent} "
            "but its padding\n    use a smaller dilation or less padding"
        )


def avg_pool(
    n: int,
    x: Sharded,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Sharded:
    windows = pool_windows(n, kernel, stride, padding, 1)
    p = Pooled(n, x, windows, ceil, 0.0, f"avg_pool{n}d")
    counts = [
        _divisors(w, e, p.out.interval(dim + 2), count_include_pad)
        for dim, (w, e) in enumerate(zip(windows, p.inputs, strict=True))
    ]
    full = all(c == w.kernel for w, per in zip(windows, counts, strict=True) for c in per)
    if full or divisor_override is not None:
        return p.wrap(_average(n, p, ceil, divisor_override))
    total = _average(n, p, ceil, 1)
    return p.wrap(total / _outer(counts, total))


def _average(n: int, p: Pooled, ceil: bool, divisor: int | None) -> torch.Tensor:
    plain = divisor is None and not any(p.padding)
    if plain and choose.average(p.local, p.kernel, p.stride) == "tiles":
        return TileAverage.apply(p.local, p.kernel)
    if n == 1:  # avg_pool1d knows no divisor: run it as an image of one row
        row = F.avg_pool2d(
            p.local.unsqueeze(2),
            [1, *p.kernel],
            [1, *p.stride],
            [0, *p.padding],
            ceil,
            divisor_override=divisor,
        )
        return row.squeeze(2)
    return AVG[n](p.local, p.kernel, p.stride, p.padding, ceil, divisor_override=divisor)


def _divisors(window: Window, extent: int, out: tuple[int, int], include: bool) -> list[int]:
    """How many elements torch counts in each output's window, along one dim."""
    counts = []
    for o in range(*out):
        start = o * window.stride - window.before
        end = min(start + window.kernel, extent + window.after)
        counts.append(end - start if include else min(end, extent) - max(start, 0))
    return counts


def _outer(counts: list[list[int]], like: torch.Tensor) -> torch.Tensor:
    out = like.new_ones(())
    for dim, per in enumerate(counts):
        shape = [len(per) if d == dim else 1 for d in range(len(counts))]
        out = out * like.new_tensor(per).view(shape)
    return out


def _register_max(n: int) -> None:
    def rule(
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Sharded:
        """Any window, with overlap, padding, dilation and ceil_mode."""
        return max_pool(n, input, kernel_size, stride, padding, dilation, ceil_mode)

    def pair(
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = True,
    ) -> tuple[Sharded, Sharded]:
        """Any window; the indices are the maxima's flat positions in the whole volume."""
        return max_pool_with_indices(n, input, kernel_size, stride, padding, dilation, ceil_mode)

    register(MAX[n], getattr(torch, f"max_pool{n}d"), family="pooling")(rule)
    register(MAX_WITH_INDICES[n], family="pooling")(pair)
    if n == 1:
        register(torch.max_pool1d_with_indices, family="pooling")(pair)


def _register_avg(n: int) -> None:
    def rule(
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: Any = None,
    ) -> Sharded:
        """Any window, with overlap, padding, ceil_mode, count_include_pad and divisor_override."""
        return avg_pool(
            n, input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
        )

    register(getattr(F, f"avg_pool{n}d"), family="pooling")(rule)


for _n in (1, 2, 3):
    _register_max(_n)
    _register_avg(_n)
