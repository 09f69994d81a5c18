"""Average and maximum pooling."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from hyperslab.errors import LayoutError
from hyperslab.geometry import Interval, Window
from hyperslab.ops.chains.chain import result
from hyperslab.ops.common.arguments import PerDim, per_dim
from hyperslab.ops.common.constants import constant
from hyperslab.ops.common.forms import Operator, register_each, spatial_dims
from hyperslab.ops.common.result_type import result_type
from hyperslab.ops.common.unbatched import with_batch
from hyperslab.ops.kernels import choose
from hyperslab.ops.kernels.tile_average import TileAverage
from hyperslab.ops.pooling.flat_indices import move_indices
from hyperslab.ops.pooling.pooled import Pooled, Windows
from hyperslab.ops.pooling.tiled import pooled_chain
from hyperslab.ops.pooling.window_maximum import WindowGrid, WindowMaximum
from hyperslab.tensor import Sharded

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
MAX_WITH_INDICES = {
    1: F.max_pool1d_with_indices,
    2: F.max_pool2d_with_indices,
    3: F.max_pool3d_with_indices,
}
AVG: dict[int, Operator] = {2: F.avg_pool2d, 3: F.avg_pool3d}


def pool_windows(
    n: int,
    kernel: PerDim,
    stride: PerDim | None = None,
    padding: PerDim = 0,
    dilation: PerDim = 1,
) -> tuple[Window, ...]:
    """One window per spatial dim; an absent stride is the kernel's extent."""
    kernels = per_dim(kernel, n)
    strides = kernels if stride is None or stride == [] or stride == () else per_dim(stride, n)
    pads = per_dim(padding, n)
    for k, p in zip(kernels, pads, strict=True):
        if not 0 <= p <= k // 2:
            raise ValueError(f"padding {p} must be at most half of the pooling window {k}")
    dilations = per_dim(dilation, n)
    return tuple(
        Window(k, s, p, p, d) for k, s, p, d in zip(kernels, strides, pads, dilations, strict=True)
    )


def max_pool(x: Sharded, windows: Windows, ceil: bool) -> Sharded:
    """The maximum of every window."""
    p = _for_maximum(x, windows, ceil)
    chain = pooled_chain(p, maximum=True)
    if chain is not None:
        return result(chain, p.x, p.partition)
    dilation = [w.dilation for w in windows]
    if choose.maximum_version(p.block, p.kernel, max(dilation)) == "windows":
        shapes = (p.kernel, p.stride, p.padding, p.out.shape[2:])
        grid = WindowGrid(*map(tuple, shapes))
        dtype = result_type(p.name, p.block.dtype, p.block.device)
        return p.wrap(WindowMaximum.apply(p.block, grid, dtype))
    run = MAX[len(windows)]
    return p.wrap(run(p.block, p.kernel, p.stride, p.padding, dilation, ceil))


def max_pool_with_indices(x: Sharded, windows: Windows, ceil: bool) -> tuple[Sharded, Sharded]:
    """The maxima and their flat positions in the whole volume."""
    p = _for_maximum(x, windows, ceil)
    dilation = [w.dilation for w in windows]
    run = MAX_WITH_INDICES[len(windows)]
    y, index = run(p.block, p.kernel, p.stride, p.padding, dilation, ceil)

    def move(dim: int, at: torch.Tensor) -> torch.Tensor:
        at = at + p.first[dim]
        # Padding wins where all is -inf: torch names the window's first element that is not.
        return torch.where(at < 0, at % p.windows[dim].dilation, at)

    return p.wrap(y), p.wrap(move_indices(index, p.block.shape[2:], move, p.inputs))


def _for_maximum(x: Sharded, windows: Windows, ceil: bool) -> Pooled:
    lowest = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    p = Pooled(x, windows, ceil, lowest, f"max_pool{len(windows)}d")
    for window, extent in zip(windows, p.inputs, strict=True):
        _check_not_empty(window, extent, ceil, x)
    return p


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
    x: Sharded,
    windows: Windows,
    ceil: bool,
    *,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Sharded:
    """The mean of every window, or its sum over ``divisor``."""
    p = Pooled(x, windows, ceil, 0.0, f"avg_pool{len(windows)}d")
    counts = [
        _divisors(w, e, p.out.interval(dim + 2), count_include_pad)
        for dim, (w, e) in enumerate(zip(windows, p.inputs, strict=True))
    ]
    full = all(c == w.kernel for w, per in zip(windows, counts, strict=True) for c in per)
    chain = pooled_chain(p, maximum=False) if full and divisor is None else None
    if chain is not None:
        y = result(chain, p.x, p.partition)
        y.reordered = y.reordered or len(windows) == 3  # torch's is contiguous
        return y
    if full or divisor is not None:
        return p.wrap(_average(p, ceil, divisor))
    total = _average(p, ceil, 1)
    return p.wrap(total / _outer(counts, total))


def _average(p: Pooled, ceil: bool, divisor: int | None) -> torch.Tensor:
    plain = divisor is None and not any(p.padding)
    if plain and choose.average_version(p.block, p.kernel, p.stride) == "tiles":
        return TileAverage.apply(p.block, p.kernel)
    if len(p.windows) == 1:  # avg_pool1d knows no divisor: run it as an image of one row
        row = F.avg_pool2d(
            p.block.unsqueeze(2),
            [1, *p.kernel],
            [1, *p.stride],
            [0, *p.padding],
            ceil,
            divisor_override=divisor,
        )
        return row.squeeze(2)
    run = AVG[len(p.windows)]
    return run(p.block, p.kernel, p.stride, p.padding, ceil, divisor_override=divisor)


def _divisors(window: Window, extent: int, out: Interval, include: bool) -> list[int]:
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
        out = out * constant(per, like.device, like.dtype).view(shape)
    return out


@register_each(
    (F.max_pool1d, torch.max_pool1d),
    (F.max_pool2d, torch.max_pool2d),
    (F.max_pool3d, torch.max_pool3d),
    family="pooling",
    lazy=True,
)
@with_batch
def maximum(
    operator: Operator,
    input: Sharded,
    kernel_size: PerDim,
    stride: PerDim | None = None,
    padding: PerDim = 0,
    dilation: PerDim = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Sharded:
    """Any window, with overlap, padding, dilation and ceil_mode."""
    n = spatial_dims(operator)
    return max_pool(input, pool_windows(n, kernel_size, stride, padding, dilation), ceil_mode)


@register_each(
    (F.max_pool1d_with_indices, torch.max_pool1d_with_indices),
    F.max_pool2d_with_indices,
    F.max_pool3d_with_indices,
    family="pooling",
)
@with_batch
def maximum_with_indices(
    operator: Operator,
    input: Sharded,
    kernel_size: PerDim,
    stride: PerDim | None = None,
    padding: PerDim = 0,
    dilation: PerDim = 1,
    ceil_mode: bool = False,
    return_indices: bool = True,
) -> tuple[Sharded, Sharded]:
    """Any window; the indices are the maxima's flat positions in the whole volume."""
    windows = pool_windows(spatial_dims(operator), kernel_size, stride, padding, dilation)
    return max_pool_with_indices(input, windows, ceil_mode)


@register_each(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, family="pooling", lazy=True)
@with_batch
def average(
    operator: Operator,
    input: Sharded,
    kernel_size: PerDim,
    stride: PerDim | None = None,
    padding: PerDim = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Sharded:
    """Any window, with overlap, padding, ceil_mode, count_include_pad and divisor_override."""
    return avg_pool(
        input,
        pool_windows(spatial_dims(operator), kernel_size, stride, padding),
        ceil_mode,
        count_include_pad=count_include_pad,
        divisor=divisor_override,
    )
