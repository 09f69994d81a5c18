"""Computes maxima over windows that may overlap, with a byte an element for the gradient.

Torch's own keeps the block and eight bytes an element of the result. A *tap* is an element of
the window, numbered row by row; the *winner* is the first tap that is not less than any other,
or the last NaN. The operators ``window_maximum`` and ``window_maximum_backward`` have no graph:
`hyperslab.ops.pooling` has. First the plain references, then the compiled versions.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hyperslab.kernels.compile import (
    PLANS_KEPT,
    TYPE_CODES,
    Library,
    Sizes,
    addresses,
    blocks_in,
    call,
    integers,
    three,
)
from hyperslab.kernels.memory_format import (
    CHANNELS_LAST,
    MOST_TAPS,
    as_dense,
    compute_dtype,
    memory_format_by_strides,
    strides_in,
)
from hyperslab.kernels.registry import Operands, declare


def window_maximum(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    extents: Sequence[int],
    mark: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the maxima (N, C, *extents) in ``dtype`` and in x's memory format, and the winners.

    Those are uint8, as the maxima; empty without ``mark``. Window o begins at o * stride - padding;
    what lies beyond the block is left out. Every window meets the block. It takes a pass over the
    result for every tap.
    """
    check_windows(kernel)
    memory_format = memory_format_by_strides(x)
    margins: list[int] = []
    for e, k, s, p, o in zip(x.shape[2:], kernel, stride, padding, extents, strict=True):
        margins[:0] = [p, max(0, (o - 1) * s + k - e - p)]
    values = F.pad(x, margins, value=-math.inf)
    best = x.new_full((*x.shape[:2], *extents), -math.inf)
    winner = torch.zeros((), dtype=torch.int64, device=x.device)
    for k, s, p, o in zip(kernel, stride, padding, extents, strict=True):
        # The first tap of a window that lies in the block wins where no value is larger than -inf.
        first = (p - torch.arange(o, device=x.device) * s).clamp(min=0)
        winner = winner[..., None] * k + first
    winner = winner.expand(best.shape)
    for tap, place in enumerate(itertools.product(*map(range, kernel))):
        value = values
        for dim, (t, s, o) in enumerate(zip(place, stride, extents, strict=True), start=2):
            value = value.narrow(dim, t, (o - 1) * s + 1).unfold(dim, 1, s).squeeze(-1)
        wins = (value > best) | value.isnan()
        best = torch.where(wins, value, best)
        winner = torch.where(wins, tap, winner)
    y = torch.empty(best.shape, dtype=dtype, device=x.device, memory_format=memory_format)
    y.copy_(best)
    if not mark:
        return y, x.new_empty(0, dtype=torch.uint8)
    return y, torch.empty_like(y, dtype=torch.uint8).copy_(winner)


def window_maximum_backward(
    g: torch.Tensor,
    winners: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    shape: Sequence[int],
    channels_last: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns dx of x's ``shape``, in ``dtype`` and channels last or not; can be differentiated.

    ``g`` is the gradient of the maxima; summed in float32, of float64 in float64.
    """
    flat = torch.zeros((), dtype=torch.int64, device=g.device)
    taps = winners.to(torch.int64)
    rest = math.prod(kernel)
    for dim, (k, s, p) in enumerate(zip(kernel, stride, padding, strict=True), start=2):
        rest //= k
        begin = torch.arange(g.shape[dim], device=g.device) * s - p
        at = taps // rest % k + begin.view(-1, *[1] * (g.dim() - 1 - dim))
        flat = flat * shape[dim] + at
    sums = g.new_zeros((*shape[:2], math.prod(shape[2:])), dtype=compute_dtype(g))
    sums = sums.scatter_add(2, flat.flatten(2), g.to(sums.dtype).flatten(2))
    dx = sums.view(*shape).to(dtype)
    return dx.contiguous(memory_format=CHANNELS_LAST[dx.dim()]) if channels_last else dx


def check_windows(kernel: Sequence[int]) -> None:
    """Checks that a byte can name every tap."""
    if math.prod(kernel) > MOST_TAPS:
        raise ValueError(f"windows {list(kernel)} of more than {MOST_TAPS} taps: use torch's own")


def compiled_window_maximum(
    functions: Library, given: Operands
) -> tuple[torch.Tensor, torch.Tensor]:
    x, kernel, stride, padding, extents, mark, dtype = given
    windows = (tuple(kernel), tuple(stride), tuple(padding))
    memory_format = memory_format_by_strides(x)
    last = memory_format != torch.contiguous_format
    numbers = _window_numbers(x.shape, tuple(extents), windows, (x.dtype, dtype), last)
    if numbers is None:
        return NotImplemented
    x = as_dense(x, memory_format)
    result = (*x.shape[:2], *extents)
    strides = strides_in(result, memory_format)
    y = torch.empty_strided(result, strides, dtype=dtype)
    if mark:
        winners = torch.empty_strided(result, strides, dtype=torch.uint8)
    else:
        winners = torch.empty(0, dtype=torch.uint8)
    tensors = addresses(x, y, winners if mark else None)
    call(functions.window_maximum, tensors + numbers, x.numel())
    return y, winners


def compiled_window_maximum_backward(functions: Library, given: Operands) -> torch.Tensor:
    g, winners, kernel, stride, padding, shape, channels_last, dtype = given
    shape = tuple(shape)
    windows = (tuple(kernel), tuple(stride), tuple(padding))
    numbers = _window_numbers(shape, tuple(g.shape[2:]), windows, (g.dtype, dtype), channels_last)
    if numbers is None:
        return NotImplemented
    if winners.shape != g.shape or winners.dtype != torch.uint8:
        raise ValueError(f"winners {tuple(winners.shape)} for a gradient {tuple(g.shape)}")
    memory_format = CHANNELS_LAST[g.dim()] if channels_last else torch.contiguous_format
    g = as_dense(g, memory_format)
    winners = as_dense(winners, memory_format)
    dx = torch.empty_strided(shape, strides_in(shape, memory_format), dtype=dtype)
    call(functions.window_spread, addresses(g, dx, winners) + numbers, dx.numel())
    return dx


@functools.lru_cache(PLANS_KEPT)
def _window_numbers(
    shape: Sizes,
    extents: Sizes,
    windows: tuple[Sizes, Sizes, Sizes],
    types: tuple[torch.dtype, torch.dtype],
    channels_last: bool,
) -> bytes | None:
    """Packs the numbers for C; None where it does not know the types or the number of dims."""
    check_windows(windows[0])
    known = all(dtype in TYPE_CODES for dtype in types)
    if not known or not 3 <= len(shape) <= 5 or not math.prod(shape) * math.prod(extents):
        return None
    kernel, stride, padding = windows
    return integers(
        *(TYPE_CODES[dtype] for dtype in types),
        *blocks_in(shape, channels_last),
        *three(shape[2:]),
        *three(extents),
        *three(kernel),
        *three(stride),
        *three(padding, 0),
    )


declare(window_maximum, compiled_window_maximum, "windows.c")
declare(window_maximum_backward, compiled_window_maximum_backward, "windows.c")
