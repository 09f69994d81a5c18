"""The zero frequency in the middle, and back."""

from __future__ import annotations

import torch

from hyperslab.ops.common.forms import Operator, register_each
from hyperslab.ops.spatial.flip_roll import rolled
from hyperslab.tensor import Sharded


@register_each(torch.fft.fftshift, torch.fft.ifftshift, family="fourier", dims=["dim"])
def shift(operator: Operator, input: Sharded, dim: int | tuple[int, ...] | None = None) -> Sharded:
    """Any dims; along cut dims as roll."""
    dims = (dim,) if isinstance(dim, int) else tuple(range(input.dim())) if dim is None else dim
    cut = [d for d in dims if input.partition.cuts[d] is not None]
    whole = tuple(d for d in dims if d not in cut)
    if whole or not cut:
        input = input.like(operator(input.local, whole))
    for d in cut:
        extent = input.shape[d]
        back = operator is torch.fft.ifftshift
        input = rolled(input, (extent + 1) // 2 if back else extent // 2, d)
    return input
