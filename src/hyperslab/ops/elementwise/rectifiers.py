"""ReLU and leaky ReLU: links of a chain, otherwise pointwise."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hyperslab.ops.chains.chain import Chain, begin, result
from hyperslab.ops.elementwise.pointwise import apply_pointwise
from hyperslab.tensor import Sharded, register


@register(F.relu, torch.relu, torch.Tensor.relu, family="elementwise", lazy=True, merged=True)
def relu(input: Sharded, inplace: bool = False) -> Sharded:
    """Block by block; in one pass with a normalisation before and a pooling after it."""
    if _linked(input, 0.0, inplace):
        return input
    chain = None if inplace else _chain(input, 0.0)
    if chain is None:
        input.settle()
        return apply_pointwise(F.relu, (input,), {"inplace": inplace})
    return result(chain, input, input.partition)


@register(F.leaky_relu, family="elementwise", lazy=True, merged=True)
def leaky_relu(input: Sharded, negative_slope: float = 0.01, inplace: bool = False) -> Sharded:
    """Block by block; in one pass with a normalisation before and a pooling after it."""
    slope = float(negative_slope)
    if _linked(input, slope, inplace):
        return input
    chain = None if inplace else _chain(input, slope)
    if chain is None:
        input.settle()
        options = {"negative_slope": negative_slope, "inplace": inplace}
        return apply_pointwise(F.leaky_relu, (input,), options)
    return result(chain, input, input.partition)


def _chain(x: Sharded, slope: float) -> Chain | None:
    """``x`` with this activation as the next link, where one can be put off."""
    if isinstance(x.pending, Chain) and (x.pending.links.slope != 1 or x.pending.links.pool):
        x.settle()
    chain = begin(x) if x.private and torch.is_grad_enabled() and slope >= 0 else None
    if chain is None or slope == 1:
        return None
    return chain.linked(chain.links.activated(slope))


def _linked(x: Sharded, slope: float, inplace: bool) -> bool:
    """In place: whether ``x`` has become what its activation will be."""
    if not inplace or slope < 0 or slope == 1 or not torch.is_grad_enabled():
        return False
    x.settle_readers()
    pending = x.pending
    if isinstance(pending, Chain) and pending.links.slope == 1 and not pending.links.pool:
        x.pending = pending.linked(pending.links.activated(slope))
        return True
    if not x.replaceable:
        return False
    source = x.like(x.block, fresh=True)
    chain = begin(source)
    if chain is None:
        return False
    with torch.no_grad():
        x.become(torch.empty(0, dtype=x.dtype, device=x.device))
    x.defer(chain.linked(chain.links.activated(slope)))
    return True
