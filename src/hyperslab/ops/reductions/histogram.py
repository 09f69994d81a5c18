"""Histograms of cut tensors."""

from __future__ import annotations

import torch

from hyperslab.comm import all_reduce_sum
from hyperslab.ops.reductions.base import group_over
from hyperslab.ops.reductions.extrema import aminmax
from hyperslab.tensor import Sharded, register


@register(torch.histc, torch.Tensor.histc, family="reductions")
def histc(input: Sharded, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Of all elements: an ordinary tensor of counts.

    Distribution scheme: 1. without limits the smallest and the largest element of all ranks, 2. the
    counts of the block, 3. their sum.
    """
    with torch.no_grad():
        if min == max and input.numel():
            low, high = aminmax(input)
            min = low.item()
            max = high.item()
        counts = torch.histc(input.block, bins, min, max)
        return all_reduce_sum(counts, group_over(input, range(input.dim())), "the sum of histc")
