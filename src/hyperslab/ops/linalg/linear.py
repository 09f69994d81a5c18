"""Linear layers, over a last dim that is not cut."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hyperslab.errors import LayoutError
from hyperslab.ops.filters import filter_share, operand_type
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import gather_first


@register(F.linear, family="linalg")
def linear_layer(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Sharded:
    """Over the last dim, which must not be cut; of many filters each rank computes its share."""
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
    share = filter_share(input, weight, partition, last) if weight.dim() == 2 else None
    if share is None:
        return input.like(F.linear(input.local, weight, bias), partition)
    homes = input.policy.homes
    rows = share.of(weight, operand_type(weight), homes)
    y = F.linear(input.local, rows, bias if bias is None else share.of(bias, bias.dtype, homes))
    return input.like(share.whole(y, "the gather of the filters of linear"), partition)
