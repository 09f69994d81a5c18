"""What the moments of a block are made of, in a form that parts and ranks add up."""

from __future__ import annotations

import torch


def reference(x: torch.Tensor, groups: int) -> torch.Tensor:
    """(3, K) in float64; K is C, or with ``groups`` N * groups: see the schema."""
    wide = x.double()
    if groups == 0:
        slices = wide.transpose(0, 1).flatten(1)
    else:
        slices = (
            wide.reshape(x.shape[0] * groups, -1)
            if x.numel()
            else wide.new_zeros(x.shape[0] * groups, 0)
        )
    count = max(1, slices.shape[1])
    total = slices.sum(1)
    around = (slices - total[:, None] / count).square().sum(1)
    return torch.stack([total, total * total / count, around])
