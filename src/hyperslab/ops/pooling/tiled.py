"""Pooling of tiles that cover the block: the last link of a chain."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.ops.chains.chain import Chain, begin
from hyperslab.ops.common.forms import Operator
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
    links = replace(chain.links, pool=tuple(p.kernel), maximum=maximum, dtype=dtype)
    return replace(chain, links=links)


def _tiles(p: Pooled) -> bool:
    """Whether tiles cover the block of every rank: all decide alike, see `begin`."""
    if p.kernel != p.stride or any(w.before or w.after or w.dilation != 1 for w in p.windows):
        return False
    for cut, extent, k in zip(p.x.partition.cuts[2:], p.inputs, p.kernel, strict=True):
        ends = [extent] if cut is None else [hi for _, hi in cut.intervals]
        if any(end % k for end in ends):
            return False
    return True


@functools.lru_cache(64)
def _result_type_in(name: str, dtype: torch.dtype, device: torch.device, _mode: Any) -> torch.dtype:
    x = torch.zeros((1, 1) + (1,) * int(name[-2]), dtype=dtype, device=device)
    pool: Operator = getattr(F, name)
    return pool(x, 1).dtype


def result_type(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What torch's own returns: autocast may choose another type."""
    if not torch.is_autocast_enabled(device.type):
        return dtype
    return _result_type_in(name, dtype, device, torch.get_autocast_dtype(device.type))
