"""Draws random bits as a function of a seed and a global index, for any box, on any device.

They choose what dropout keeps: the operator ``drop_elements`` has a plain reference, which the CPU
runs, too, and a Triton version with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from hyperslab.geometry import Box
from hyperslab.kernels.registry import declare
from hyperslab.util.capture import beside_capture, refuse_capture
from hyperslab.util.torch_internals import graph_task

GOLDEN = -7046029254386353131  # 2**64 / golden ratio, as a signed 64-bit integer
_MIX_64 = (-4658895280553007687, -7723592293110705685)  # Steele et al. 2014, SplitMix64
_MIX_32 = (0x7FEB352D, -2073254261)  # Wellons 2018, "lowbias32"


def draw_seed(device: torch.device) -> torch.Tensor:
    """Draws a seed by the CPU's generator, which is in the same state on all ranks.

    It is a number on ``device``: one of `hyperslab.graphed` gets another value at each replay.

    Raises:
        UnsupportedOp: another CUDA graph is being captured, whose replays would all have this seed;
            or a backward pass repeats a forward pass in it, and would draw other numbers.
    """
    beside = beside_capture("the seed of a random operator (dropout, say) on a volume")
    if beside is None:
        return torch.full((), _draw(), device=device)
    if graph_task() != -1:
        refuse_capture(
            "a random operator that a backward pass computes again (activation checkpointing)",
            "leave dropout out of what is recomputed, or run this step eagerly",
        )
    beside.seeds.append(torch.empty((), dtype=torch.int64, device=device))
    return beside.seeds[-1]


def fill_seeds(seeds: Iterable[torch.Tensor]) -> None:
    """Draws the seeds of a captured step as `draw_seed` does in an eager one."""
    for seed in seeds:
        seed.fill_(_draw())


def _draw() -> int:
    return int(torch.randint(2**62, ()).item())


def uniform_bits(
    shape: Sequence[int], box: Box, seed: torch.Tensor | int, device: torch.device
) -> torch.Tensor:
    """Draws integers evenly distributed in [0, 2**31), one for every element of ``box``.

    Element ``i`` of a tensor of the global ``shape`` gets the same number whatever the box. Outer
    dims are hashed in 64 bits (few numbers), the two innermost in 32 bits under the outer's key.
    """
    split = max(0, len(shape) - 2)
    outer = _linear_index(shape[:split], box, 0, device)
    inner = _linear_index(shape[split:], box, split, device)
    if math.prod(shape[split:]) >= 2**31:
        raise ValueError(f"the two innermost dims of {tuple(shape)} exceed 2**31 elements")
    key = mix64(outer * GOLDEN + seed)
    low = key.to(torch.int32)
    high = (key >> 32).to(torch.int32)
    low = low.view(*low.shape, *[1] * inner.dim())
    high = high.view(*high.shape, *[1] * inner.dim())
    bits = _mix32(inner.to(torch.int32) ^ low)
    return _mix32(bits.add_(high)) & 0x7FFFFFFF


def _linear_index(shape: Sequence[int], box: Box, first: int, device: torch.device) -> torch.Tensor:
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, extent in enumerate(shape, start=first):
        lo, hi = box.interval(dim)
        index = index.unsqueeze(-1) * extent + torch.arange(lo, hi, device=device)
    return index


def _shift(x: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Shifts logically to the right; torch's shift is arithmetic."""
    return (x >> bits) & ((1 << (width - bits)) - 1)


def mix64(x: torch.Tensor) -> torch.Tensor:
    """Hashes integers of 64 bits, element by element, as SplitMix64 does its state."""
    x = (x ^ _shift(x, 30, 64)) * _MIX_64[0]
    x = (x ^ _shift(x, 27, 64)) * _MIX_64[1]
    return x ^ _shift(x, 31, 64)


def _mix32(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 16, 32)) * _MIX_32[0]
    x = (x ^ _shift(x, 15, 32)) * _MIX_32[1]
    return x ^ _shift(x, 16, 32)


def drop_elements(
    x: torch.Tensor, shape: Sequence[int], first: Sequence[int], seed: torch.Tensor, p: float
) -> torch.Tensor:
    """Zeroes elements with the probability ``p`` and scales the others by 1 / (1 - p).

    ``x`` is the box that begins at ``first`` of a volume of ``shape``; ``seed`` is one number.
    """
    box = Box(tuple(first), tuple(a + b for a, b in zip(first, x.shape, strict=True)))
    keep = uniform_bits(shape, box, seed, x.device) >= least_kept(p)
    kept = x * keep
    return kept if scale_of(p) == 1.0 else kept * scale_of(p)


def least_kept(p: float) -> int:
    """Returns the least of the 2^31 numbers by which an element is kept."""
    return math.floor(p * 2**31)


def scale_of(p: float) -> float:
    """Returns the factor of what is kept, so that the mean stays."""
    return 1 / (1 - p) if p < 1 else 0.0


declare(drop_elements, cuda="tiles", beside=(torch.int64,))
