"""Activations that know one dim from another: slopes of the channels, halves of a dim."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hyperslab.errors import LayoutError
from hyperslab.ops.common.operands import check_uncut
from hyperslab.tensor import Sharded, register


@register(F.prelu, torch.prelu, torch.Tensor.prelu, family="elementwise")
def prelu(input: torch.Tensor, weight: torch.Tensor) -> Sharded:
    """One slope or one for each channel, which are not cut."""
    if not isinstance(input, Sharded) or isinstance(weight, Sharded):
        raise LayoutError("prelu: the input is cut, the slopes are an ordinary tensor")
    if weight.numel() != 1 and input.dim() > 1 and input.partition.cuts[1] is not None:
        raise LayoutError(
            f"prelu takes dim 1 for the channels, but it is cut: {input.partition}\n"
            "    use hyperslab.gather(x, axes) before it"
        )
    return input.like(torch.prelu(input.block, weight), fresh=True)


@register(F.glu, family="elementwise", dims=["dim"])
def glu(input: Sharded, dim: int = -1) -> Sharded:
    """Halves of a dim that is not cut; otherwise refused."""
    check_uncut(input, (dim,), "glu needs all of")
    block = F.glu(input.block, dim)
    return input.like(block, input.partition.with_dim(dim, block.shape[dim], None))
