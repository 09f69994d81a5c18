"""Which dims are whole when: a plan of re-partitions after which every dim was whole once.

Legend: a *pencil* is a block that is whole in the dims that are transformed next. The axes that cut
those dims cut another one meanwhile, their *home*, so that every rank has as much as before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from hyperslab.geometry import Cut, Partition

_KEPT = 4096
"""Plans that are remembered, of transforms of one partition each."""


@dataclass(frozen=True, slots=True)
class Pencil:
    """Cut as ``partition`` the dims ``dims`` are whole, and transformed."""

    partition: Partition
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PencilPlan:
    """The pencils in their order; how the result is cut; axes for which there is no home."""

    pencils: tuple[Pencil, ...]
    result: Partition
    gathered: tuple[str, ...]


@functools.lru_cache(_KEPT)
def plan_pencils(
    partition: Partition, groups: tuple[tuple[int, ...], ...], extents: tuple[int, ...]
) -> PencilPlan:
    """The plan to transform the dims of each group in any order, one group after the other.

    Scheme: 1. dims that are whole are transformed at once, 2. of those that are left each axis that
    cuts one moves to its home, in one exchange, 3. again, until none is left. The result is cut
    where the input is. An axis that finds no home, because no other dim is free that has as many
    elements as it has ranks, cuts nothing meanwhile: its ranks repeat the work.

    Args:
        partition: how the tensor is cut.
        groups: the dims to transform.
        extents: of all dims after the transform.

    >>> halves = Cut.balanced("depth", 4, 2)
    >>> plan = plan_pencils(Partition((1, 4, 6), (None, halves, None)), ((1, 2),), (1, 4, 6))
    >>> [(str(pencil.partition), pencil.dims) for pencil in plan.pencils]
    [('1 x 4 x 6 (dim 1 in 2 by depth)', (2,)), ('1 x 4 x 6 (dim 2 in 2 by depth)', (1,))]
    """
    now = partition
    pencils: list[Pencil] = []
    gathered: list[str] = []
    for index, group in enumerate(groups):
        left = list(group)
        later = {dim for after in groups[index + 1 :] for dim in after}
        while left:
            whole = tuple(dim for dim in left if now.cuts[dim] is None)
            if not whole:
                now = _freed(now, left, later, gathered)
                continue
            pencils.append(Pencil(now, whole))
            left = [dim for dim in left if dim not in whole]
            for dim in whole:
                now = now.with_dim(dim, extents[dim], None)
    return PencilPlan(tuple(pencils), _result(partition, extents), tuple(gathered))


def _freed(
    partition: Partition, dims: Sequence[int], later: set[int], gathered: list[str]
) -> Partition:
    """Some of ``dims`` are not cut any more, the first one at least."""
    shape = partition.shape
    cuts = list(partition.cuts)
    for dim in dims:
        cut = cuts[dim]
        assert cut is not None
        free = [d for d, c in enumerate(cuts) if c is None and d not in dims]
        homes = [d for d in free if shape[d] >= cut.parts]
        if homes:
            # Evenly, and not where it would have to move once more.
            home = max(homes, key=lambda d: (d not in later, shape[d] % cut.parts == 0, shape[d]))
            cuts[home] = Cut.balanced(cut.axis, shape[home], cut.parts)
        elif dim == dims[0]:
            gathered.append(cut.axis)
        else:
            continue
        cuts[dim] = None
    return Partition(shape, tuple(cuts))


def _result(partition: Partition, extents: Sequence[int]) -> Partition:
    """Cut where ``partition`` is, unless a rank would have nothing."""
    cuts: list[Cut | None] = []
    for cut, before, extent in zip(partition.cuts, partition.shape, extents, strict=True):
        if cut is not None and before != extent:
            cut = Cut.balanced(cut.axis, extent, cut.parts)
            cut = None if cut.thin else cut
        cuts.append(cut)
    return Partition(tuple(extents), tuple(cuts))
