"""Plans transforms of cut dims, and puts off those of which few frequencies are used.

In reading order: the plan of a transform by pencils; arcs of frequencies; `Spectrum`, which is
transformed when it is known which frequencies are read.

Legend: a *pencil* is a block that is whole in the dims that are transformed next. The axes that
cut those dims cut another one meanwhile, their *home*, so that every rank has as much as before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from hyperslab.comm import log_once
from hyperslab.geometry import Partition
from hyperslab.ops.operands import LAYOUTS
from hyperslab.ops.overloads import Operator
from hyperslab.ops.placement import cut_elsewhere, cut_of_result
from hyperslab.ops.views import Span, crop, partition_of_crop
from hyperslab.tensor import Sharded


@dataclass(frozen=True, slots=True)
class Pencil:
    """Names a partition and the dims that are whole in it and are transformed there."""

    partition: Partition
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PencilPlan:
    """Lists the pencils in order, the result's partition, and axes that find no other dim."""

    pencils: tuple[Pencil, ...]
    result: Partition
    gathered: tuple[str, ...]


@functools.lru_cache(LAYOUTS)
def plan_pencils(
    partition: Partition, groups: tuple[tuple[int, ...], ...], extents: tuple[int, ...]
) -> PencilPlan:
    """Plans the transform of each group's dims in any order, one group after the other.

    Scheme: 1. dims that are whole are transformed at once, 2. of those that are left each axis that
    cuts one moves to its home, in one exchange, 3. again, until none is left. The result is cut
    where the input is. An axis that finds no home, because no other dim is free that has as many
    elements as it has ranks, cuts nothing meanwhile: its ranks repeat the work.

    Args:
        partition: how the tensor is cut.
        groups: the dims to transform.
        extents: of all dims after the transform.

    >>> from hyperslab.geometry import Cut
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
                now, alone = cut_elsewhere(now, left, left[:1], later)
                gathered += alone
                continue
            pencils.append(Pencil(now, whole))
            left = [dim for dim in left if dim not in whole]
            for dim in whole:
                now = now.with_dim(dim, extents[dim], None)
    result = Partition(extents, tuple(map(cut_of_result, partition.cuts, extents)))
    return PencilPlan(tuple(pencils), result, tuple(gathered))


def note_gathered(x: Sharded, plan: PencilPlan) -> None:
    """Logs once which axes have found no home."""
    if plan.gathered:
        log_once(
            x.grid,
            f"Fourier transform of {x.partition}: no other dim can be cut along "
            f"{', '.join(plan.gathered)}; gathered there, its ranks repeat the work meanwhile",
        )


def transform_block(x: Sharded, block: torch.Tensor) -> Sharded:
    """Wraps a transform, which may have changed the extents of dims that are not cut."""
    cuts = x.partition.cuts
    shape = (block.shape[d] if cut is None else x.shape[d] for d, cut in enumerate(cuts))
    return x.like(block, Partition(tuple(shape), cuts))


@dataclass(frozen=True, slots=True)
class Arc:
    """Selects ``count`` elements of a dim from ``start`` on; after the last comes the first.

    Shifts of the zero frequency, and slices after them, are arcs of the frequencies.
    """

    start: int
    count: int

    @staticmethod
    def around(spans: Iterable[Span], extent: int) -> Arc:
        """Returns the shortest arc that holds all spans, each of them in one piece.

        >>> Arc.around([Span(0, 2), Span(7, 1)], 8)
        Arc(start=7, count=3)
        """
        intervals = sorted((span.start, span.start + span.count) for span in spans)
        first, reach = intervals[0]
        gaps = []
        for lo, hi in intervals[1:]:
            gaps.append((lo - reach, lo))
            reach = max(reach, hi)
        gap, start = max([(first + extent - reach, first), *gaps], key=lambda found: found[0])
        return Arc(start, extent - gap)

    def taken(self, block: torch.Tensor, dim: int) -> torch.Tensor:
        """Takes these elements of a block that is whole along ``dim``, as a view if it can."""
        extent = block.shape[dim]
        start = self.start % extent
        front = min(self.count, extent - start)
        part = block.narrow(dim, start, front)
        if front == self.count:
            return part
        return torch.cat([part, block.narrow(dim, 0, self.count - front)], dim)

    def put_back(self, block: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
        """Puts these elements in their places among zeros; zeros behind them may be left away."""
        start = self.start % extent
        if start == 0:
            return block
        shape = list(block.shape)
        around = max(0, start + self.count - extent)
        shape[dim] = start - around
        gap = block.new_zeros(shape)
        if not around:
            return torch.cat([gap, block], dim)
        front = self.count - around
        return torch.cat([block.narrow(dim, front, around), gap, block.narrow(dim, 0, front)], dim)


def can_wait(x: Sharded) -> bool:
    """Tell whether a result that takes messages may be put off.

    Inside a parallelised module all ranks use it; elsewhere one alone may look at its block.
    """
    scope = x.policy.scope
    return scope is not None and scope.is_open


@dataclass(slots=True, eq=False)
class Spectrum:
    """Stands for a transform of which the frequencies that are read are not known yet.

    Few are, in networks with Fourier layers, and then few have to travel.

    Args:
        x: the tensor, which nobody else sees, cut in any way; other dims are transformed.
        operator: torch's transform of one dim.
        lengths: the dims that are still to be transformed, to so many frequencies.
        norm: as torch takes it.
        kept: the elements of each dim that are read.
        partition: the result's.
    """

    x: Sharded
    operator: Operator
    lengths: Mapping[int, int]
    norm: str | None
    kept: tuple[Arc, ...]
    partition: Partition
    with_graph: bool = field(init=False, default_factory=torch.is_grad_enabled)

    sources = ()
    recomputable = False

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def _extent(self, dim: int) -> int:
        return self.lengths.get(dim, self.x.shape[dim])

    def cropped(self, spans: Mapping[int, Span]) -> Spectrum | None:
        """Reads less; None where a slice leaves elements out."""
        if any(span.step != 1 for span in spans.values()):
            return None
        kept = list(self.kept)
        for dim, span in spans.items():
            kept[dim] = Arc(kept[dim].start + span.start, span.count)
        return replace(self, kept=tuple(kept), partition=partition_of_crop(self.partition, spans))

    def rolled(self, turns: Mapping[int, int]) -> Spectrum | None:
        """Rolls whole dims; None where one is not whole, or cut and not transformed."""
        kept = list(self.kept)
        for dim, turn in turns.items():
            cut = dim not in self.lengths and self.x.partition.cuts[dim] is not None
            if cut or kept[dim].count != self._extent(dim):
                return None
            kept[dim] = Arc(kept[dim].start - turn, kept[dim].count)
        return replace(self, kept=tuple(kept))

    def value(self) -> torch.Tensor:
        """Transforms what is read.

        Distribution scheme: 1. leave out what is not read of dims that are not to be transformed,
        2. transform the dims that are whole, one after the other, and leave out frequencies of each
        at once, 3. in one exchange, cut the tensor along other dims instead of the remaining ones,
        and transform these, 4. cut the result as it was promised.
        """
        with torch.set_grad_enabled(self.with_graph):
            x = self.x
            cuts = x.partition.cuts
            others = [d for d in range(x.dim()) if d not in self.lengths]
            spans = {d: Span(self.kept[d].start, self.kept[d].count) for d in others if cuts[d]}
            x = crop(x, {d: s for d, s in spans.items() if s != Span(0, x.shape[d])})
            block = x.block
            for dim in others:
                if cuts[dim] is None:
                    block = self.kept[dim].taken(block, dim)
            x = transform_block(x, block)
            extents = tuple(arc.count for arc in self.kept)
            for pencil in plan_pencils(x.partition, (tuple(self.lengths),), extents).pencils:
                x = x.redistribute(pencil.partition, "a pencil of a Fourier transform")
                block = x.block
                for dim in pencil.dims:
                    block = self.operator(block, self.lengths[dim], dim, self.norm)
                    block = self.kept[dim].taken(block, dim)
                x = transform_block(x, block)
            return x.redistribute(self.partition, "the way back from a Fourier transform").block
