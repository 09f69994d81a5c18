"""Linear layers, over a last dim that is not cut."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hyperslab.errors import LayoutError
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import gather_first


@register(F.linear, family="linalg")
def linear_layer(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Sharded:
    """Over the last dim, which must not be cut."""
    if not isinstance(input, Sharded) or isinstance(weight, Sharded):
        raise LayoutError("linear: the input is cut, weight and bias are ordinary tensors")
    last = input.dim() - 1
    cut = input.partition.cuts[last]
    if cut is not None:
        raise LayoutError(
            f"linear contracts the last dim, which is cut: {input.partition}\n"
            f"    use x.flatten(1) to leave space;\n{gather_first(cut.axis)}"
        )
    partition = input.partition.with_dim(last, weight.shape[0], None)
    return input.like(F.linear(input.local, weight, bias), partition)
