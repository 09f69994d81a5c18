"""Drops elements of a block by a hash of a seed and their index in the whole volume.

The operator ``drop_elements``: a plain reference, which the CPU runs, too, and a Triton version
with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hyperslab.geometry import Box
from hyperslab.kernels.random_bits import uniform_bits
from hyperslab.kernels.registry import declare


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


declare(drop_elements, cuda="tiles:triton_drop_elements", beside=(torch.int64,))
