"""Distances of every vector of one set from every vector of another: codebooks, point clouds."""

from __future__ import annotations

import torch

from hyperslab.ops.linalg.contraction import batch_labels, contract
from hyperslab.tensor import register


@register(torch.cdist, family="linalg")
def cdist(
    x1: torch.Tensor,
    x2: torch.Tensor,
    p: float = 2.0,
    compute_mode: str = "use_mm_for_euclid_dist_if_necessary",
) -> torch.Tensor:
    """The vectors of either set may be cut; the numbers of a vector must be whole."""

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cdist(a, b, p, compute_mode)

    first, second = batch_labels(x1.dim() - 2), batch_labels(x2.dim() - 2)
    inputs = [[*first, "row", "number"], [*second, "column", "number"]]
    batch = max(first, second, key=len)
    return contract("cdist", [x1, x2], inputs, [*batch, "row", "column"], run, linear=False)
