"""Cut a tensor otherwise, so that operators meet uneven shards and operands cut differently."""

from __future__ import annotations

import random
from typing import Any

import hyperslab as hs
from hyperslab.geometry import Cut


def recut(x: Any, seed: int) -> Any:
    """The same tensor in random shards, sometimes not cut along an axis; 0 leaves it alone.

    Every rank draws the same. An ordinary tensor comes back as it is.
    """
    if not isinstance(x, hs.Sharded) or seed == 0:
        return x
    draw, partition = random.Random(seed), x.partition
    for dim, cut in enumerate(partition.cuts):
        if cut is None:
            continue
        inner = sorted(draw.sample(range(1, cut.extent), cut.parts - 1))
        new = Cut(cut.axis, (0, *inner, cut.extent)) if draw.random() < 0.8 else None
        partition = partition.with_dim(dim, cut.extent, new)
    return x.redistribute(partition)
