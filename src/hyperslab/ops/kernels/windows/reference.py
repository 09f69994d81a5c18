"""The maximum over windows and its adjoint, by torch's single operators."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hyperslab.memory_format import CHANNELS_LAST
from hyperslab.ops.kernels.fused.layout import format_of

MOST_TAPS = 256
"""A winner is one byte."""


def window_maximum(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    extents: Sequence[int],
    mark: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the schema: a pass over the result for every tap."""
    check_windows(kernel)
    memory_format = format_of(x)
    margins: list[int] = []
    for e, k, s, p, o in zip(x.shape[2:], kernel, stride, padding, extents, strict=True):
        margins[:0] = [p, max(0, (o - 1) * s + k - e - p)]
    values = F.pad(x, margins, value=-math.inf)
    best = x.new_full((*x.shape[:2], *extents), -math.inf)
    winner = _first_taps(kernel, stride, padding, extents, x.device).expand(best.shape)
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
    """See the schema; can be differentiated."""
    flat = torch.zeros((), dtype=torch.int64, device=g.device)
    taps = winners.to(torch.int64)
    rest = math.prod(kernel)
    for dim, (k, s, p) in enumerate(zip(kernel, stride, padding, strict=True), start=2):
        rest //= k
        begin = torch.arange(g.shape[dim], device=g.device) * s - p
        at = taps // rest % k + begin.view(-1, *[1] * (g.dim() - 1 - dim))
        flat = flat * shape[dim] + at
    sums = g.new_zeros((*shape[:2], math.prod(shape[2:])), dtype=_wide(g.dtype))
    sums = sums.scatter_add(2, flat.flatten(2), g.to(sums.dtype).flatten(2))
    dx = sums.view(*shape).to(dtype)
    return dx.contiguous(memory_format=CHANNELS_LAST[dx.dim()]) if channels_last else dx


def check_windows(kernel: Sequence[int]) -> None:
    """A byte can name every tap.

    Raises:
        ValueError: it cannot.
    """
    if math.prod(kernel) > MOST_TAPS:
        raise ValueError(f"windows {list(kernel)} of more than {MOST_TAPS} taps: use torch's own")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _first_taps(
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    extents: Sequence[int],
    device: torch.device,
) -> torch.Tensor:
    """The first tap of every window that lies in the block: (*extents)."""
    first = torch.zeros((), dtype=torch.int64, device=device)
    for k, s, p, o in zip(kernel, stride, padding, extents, strict=True):
        taps = (p - torch.arange(o, device=device) * s).clamp(min=0)
        first = first[..., None] * k + taps
    return first
