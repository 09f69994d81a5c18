"""Normalising vectors by their norm, over dims that may be cut."""

from __future__ import annotations

import torch.nn.functional as F

from hyperslab.ops.reductions.base import Dims, reduced_dims, without_empty_shards
from hyperslab.ops.reductions.norms import norm_block
from hyperslab.tensor import Sharded, register


@register(F.normalize, family="normalization", dims=["dim"])
def normalize(input: Sharded, p: float = 2.0, dim: Dims = 1, eps: float = 1e-12) -> Sharded:
    """By the norm over any dims, cut or not."""
    dims = reduced_dims(input, dim)
    x = without_empty_shards(input, dims)
    return x.like(x.local / norm_block(x, float(p), dims, True, None).clamp_min(eps))
