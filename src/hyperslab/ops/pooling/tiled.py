"""Pooling of tiles that cover the block: the last link of a chain."""

from __future__ import annotations

import math

from hyperslab.ops.chains.chain import Chain, begin
from hyperslab.ops.common.result_type import result_type
from hyperslab.ops.pooling.pooled import Pooled

WINNERS = 256
"""Elements of a tile of which one byte can say which is the largest."""


def pooled_chain(p: Pooled, *, maximum: bool) -> Chain | None:
    """The input's chain with this pooling as the last link, where the windows tile the block."""
    if not _tiles(p):
        return None
    if isinstance(p.x.pending, Chain) and p.x.pending.links.pool:
        p.x.settle()
    chain = begin(p.x)
    if chain is None or (maximum and math.prod(p.kernel) > WINNERS):
        return None
    dtype = result_type(p.name, chain.dtype, chain.block.device)
    return chain.linked(chain.links.pooled(tuple(p.kernel), maximum, dtype))


def _tiles(p: Pooled) -> bool:
    """Whether tiles cover the block of every rank: all decide alike, see `begin`."""
    if p.kernel != p.stride or any(w.before or w.after or w.dilation != 1 for w in p.windows):
        return False
    for cut, extent, k in zip(p.x.partition.cuts[2:], p.inputs, p.kernel, strict=True):
        ends = [extent] if cut is None else [hi for _, hi in cut.intervals]
        if any(end % k for end in ends):
            return False
    return True
