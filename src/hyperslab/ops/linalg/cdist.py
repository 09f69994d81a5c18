"""Distances of every vector of one set from every vector of another: codebooks, point clouds."""

from __future__ import annotations

import torch

from hyperslab.errors import LayoutError
from hyperslab.ops.linalg.contraction import batch_labels, contract
from hyperslab.tensor import register
from hyperslab.tensor.dispatch import describe

IF_NECESSARY = "use_mm_for_euclid_dist_if_necessary"
"""Torch's default: a product of matrices where there are more than 25 vectors."""


@register(torch.cdist, family="linalg")
def cdist(
    x1: torch.Tensor,
    x2: torch.Tensor,
    p: float = 2.0,
    compute_mode: str = IF_NECESSARY,
) -> torch.Tensor:
    """The vectors of either set may be cut; the numbers of a vector must be whole."""

    if min(x1.dim(), x2.dim()) < 2:
        raise LayoutError(f"cdist takes tensors of two dims or more\n{describe([x1, x2])}")
    if compute_mode == IF_NECESSARY:  # a block has fewer vectors than the whole
        product = max(x1.shape[-2], x2.shape[-2]) > 25
        compute_mode = f"{'' if product else 'donot_'}use_mm_for_euclid_dist"

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cdist(a, b, p, compute_mode)

    first, second = batch_labels(x1.dim() - 2), batch_labels(x2.dim() - 2)
    inputs = [[*first, "row", "number"], [*second, "column", "number"]]
    batch = max(first, second, key=len)
    return contract("cdist", [x1, x2], inputs, [*batch, "row", "column"], run, linear=False)
