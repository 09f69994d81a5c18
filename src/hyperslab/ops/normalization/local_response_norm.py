"""Normalisation across channels alone."""

from __future__ import annotations

import torch.nn.functional as F

from hyperslab.ops.common.placement import check_channels
from hyperslab.tensor import Sharded, register


@register(F.local_response_norm, family="normalization")
def local_response_norm(
    input: Sharded, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Sharded:
    """Across neighbouring channels, which are not cut: block by block."""
    x = input
    check_channels(x, "local_response_norm")
    return x.like(F.local_response_norm(x.local, size, alpha, beta, k))
