"""Draws random bits as a function of a seed and a global index, for any box, on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hyperslab.geometry import Box
from hyperslab.util.capture import refuse_capture

_GOLDEN = -7046029254386353131  # 2**64 / golden ratio, as a signed 64-bit integer
_MIX_64 = (-4658895280553007687, -7723592293110705685)  # Steele et al. 2014, SplitMix64
_MIX_32 = (0x7FEB352D, -2073254261)  # Wellons 2018, "lowbias32"


def draw_seed() -> int:
    """Draws a seed by the CPU's generator, which is in the same state on all ranks.

    Raises:
        UnsupportedOp: a CUDA graph is being captured, whose replays would all have this seed.
    """
    refuse_capture(
        "the seed of a random operator (dropout, say) on a volume",
        "run this step eagerly, or capture a network in evaluation mode or with a dropout of 0",
    )
    return int(torch.randint(2**62, ()).item())


def uniform_bits(shape: Sequence[int], box: Box, seed: int, device: torch.device) -> torch.Tensor:
    """Draws integers evenly distributed in [0, 2**31), one for every element of ``box``.

    Element ``i`` of a tensor of the global ``shape`` gets the same number whatever the box. Outer
    dims are hashed in 64 bits (few numbers), the two innermost in 32 bits under the outer's key.
    """
    split = max(0, len(shape) - 2)
    outer = _linear_index(shape[:split], box, 0, torch.int64, device)
    inner = _linear_index(shape[split:], box, split, torch.int64, device)
    if math.prod(shape[split:]) >= 2**31:
        raise ValueError(f"the two innermost dims of {tuple(shape)} exceed 2**31 elements")
    key = _mix64(outer * _GOLDEN + seed)
    low = key.to(torch.int32)
    high = (key >> 32).to(torch.int32)
    low = low.view(*low.shape, *[1] * inner.dim())
    high = high.view(*high.shape, *[1] * inner.dim())
    bits = _mix32(inner.to(torch.int32) ^ low)
    return _mix32(bits.add_(high)) & 0x7FFFFFFF


def _linear_index(
    shape: Sequence[int], box: Box, first: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    index = torch.zeros((), dtype=dtype, device=device)
    for dim, extent in enumerate(shape, start=first):
        lo, hi = box.interval(dim)
        index = index.unsqueeze(-1) * extent + torch.arange(lo, hi, dtype=dtype, device=device)
    return index


def _shift(x: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Shifts logically to the right; torch's shift is arithmetic."""
    return (x >> bits) & ((1 << (width - bits)) - 1)


def _mix64(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30, 64)) * _MIX_64[0]
    x = (x ^ _shift(x, 27, 64)) * _MIX_64[1]
    return x ^ _shift(x, 31, 64)


def _mix32(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 16, 32)) * _MIX_32[0]
    x = (x ^ _shift(x, 15, 32)) * _MIX_32[1]
    return x ^ _shift(x, 16, 32)
