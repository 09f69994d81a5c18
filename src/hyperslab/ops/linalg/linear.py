"""Dense layers: local wherever the contracted dim is whole."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from hyperslab.errors import LayoutError
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import gather_first


@register(F.linear, family="dense")
def linear(input: Any, weight: Any, bias: Any = None) -> Sharded:
    """Over the last dim, which must not be cut."""
    x: Sharded = input
    if not isinstance(x, Sharded) or isinstance(weight, Sharded):
        raise LayoutError("linear: the input is cut, weight and bias are ordinary tensors")
    last = x.dim() - 1
    cut = x.partition.cuts[last]
    if cut is not None:
        raise LayoutError(
            f"linear contracts the last dim, which is cut: {x.partition}\n"
            f"    use x.flatten(1) to leave space;\n{gather_first(cut.axis)}"
        )
    return x.like(
        F.linear(x.local, weight, bias), x.partition.with_dim(last, weight.shape[0], None)
    )
