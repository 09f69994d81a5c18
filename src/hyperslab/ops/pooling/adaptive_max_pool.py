"""Adaptive maximum pooling, with or without the indices of the maxima."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hyperslab.geometry import Cut, Partition
from hyperslab.ops.common.constants import constant
from hyperslab.ops.common.forms import Operator, register_each, spatial_dims
from hyperslab.ops.common.unbatched import with_batch
from hyperslab.ops.pooling.adaptive_layout import AdaptiveLayout, Spans, layout_of, sizes_of
from hyperslab.ops.pooling.flat_indices import move_indices
from hyperslab.tensor import Sharded

WITH_INDICES: dict[int, Operator] = {
    1: F.adaptive_max_pool1d_with_indices,
    2: F.adaptive_max_pool2d_with_indices,
    3: F.adaptive_max_pool3d_with_indices,
}
VALUES: dict[int, Operator] = {
    1: F.adaptive_max_pool1d,
    2: F.adaptive_max_pool2d,
    3: F.adaptive_max_pool3d,
}
NOWHERE = torch.iinfo(torch.int64).max
"""The index of a window's maximum on a rank that holds nothing of the window."""


def adaptive_max_pool(x: Sharded, sizes: tuple[int, ...]) -> tuple[Sharded, Sharded]:
    """The maxima of a cut tensor (batch, channel, *spatial) and where in the volume they are.

    Distribution scheme:
    1. Cut the output in proportion to the input and fetch the windows of this rank's outputs;
       where an axis has more ranks than outputs, every rank keeps its part of every window.
    2. Repeat elements so that along the cut dims all windows are of one extent and lie side by
       side, as torch's own pooling of that block takes them. A repetition changes no maximum.
    3. Of the maxima of the ranks that share windows take the largest, of equals the first.
    """
    n = len(sizes)
    name = f"adaptive_max_pool{n}d"
    layout = layout_of(x, sizes, name)
    block = layout.fetch(x, name)
    tables = {spans.dim: _side_by_side(spans) for spans in layout.spans}
    for dim, table in tables.items():
        if table != list(range(block.shape[dim + 2])):
            block = block.index_select(dim + 2, constant(table, block.device))
    values, index = WITH_INDICES[n](block, layout.sizes)
    held = layout.held.lo[2:]

    def move(dim: int, at: torch.Tensor) -> torch.Tensor:
        return constant(tables[dim], at.device)[at] + held[dim] if dim in tables else at

    index = move_indices(index, block.shape[2:], move, x.shape[2:])
    for spans in layout.spans:
        values, index = _forget_absent(values, index, spans)
    for axis in layout.shared:
        values, index = _first_largest(x, values, index, layout, axis)
    return x.like(values, layout.output), x.like(index, layout.output)


def _side_by_side(spans: Spans) -> list[int]:
    """The inputs of all windows in turn, the last one of a window repeated to one extent."""
    extent = max(1, *(hi - lo for lo, hi in spans.inputs))
    return [min(lo + k, max(hi - 1, 0)) for lo, hi in spans.inputs for k in range(extent)]


def _forget_absent(
    values: torch.Tensor, index: torch.Tensor, spans: Spans
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let no maximum be where this rank holds nothing of the window."""
    if all(lo < hi for lo, hi in spans.inputs):
        return values, index
    shape = [-1 if d == spans.dim + 2 else 1 for d in range(values.dim())]
    absent = constant([lo == hi for lo, hi in spans.inputs], values.device).view(shape)
    return values.masked_fill(absent, -torch.inf), index.masked_fill(absent, NOWHERE)


def _first_largest(
    x: Sharded, values: torch.Tensor, index: torch.Tensor, layout: AdaptiveLayout, axis: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Along one axis, the largest value and its index; of equals the first, of NaN the last."""
    values = _beside(x, values, layout, axis)
    index = _beside(x, index, layout, axis)
    with torch.no_grad():
        nan = values.isnan()
        candidate = nan | (values == values.amax(2, keepdim=True))
        order = torch.where(nan, -index, index)
        choice = order.masked_fill(~candidate, NOWHERE).argmin(2, keepdim=True)
    return values.gather(2, choice).squeeze(2), index.gather(2, choice).squeeze(2)


def _beside(x: Sharded, block: torch.Tensor, layout: AdaptiveLayout, axis: str) -> torch.Tensor:
    """The blocks of all ranks along an axis, beside each other in a new dim 2."""
    ranks = x.grid.extents[axis]
    shape = layout.output.shape
    cuts = layout.output.cuts
    cut = Cut(axis, tuple(range(ranks + 1)))
    one = Partition((*shape[:2], ranks, *shape[2:]), (*cuts[:2], cut, *cuts[2:]))
    each = x.like(block.unsqueeze(2), one)
    return each.redistribute(one.without([axis]), "the parts of adaptive_max_pool").block


@register_each(
    # torch.adaptive_max_pool1d itself returns both
    (F.adaptive_max_pool1d_with_indices, torch.adaptive_max_pool1d),
    F.adaptive_max_pool2d_with_indices,
    F.adaptive_max_pool3d_with_indices,
    family="pooling",
)
@with_batch
def adaptive_maximum_with_indices(
    operator: Operator,
    input: Sharded,
    output_size: int | Sequence[int | None] | None,
    return_indices: bool = True,
) -> tuple[Sharded, Sharded]:
    """To any extents, with the maxima's flat positions in the whole volume."""
    n = spatial_dims(operator)
    return adaptive_max_pool(input, sizes_of(input, n, output_size, f"adaptive_max_pool{n}d"))


@register_each(*VALUES.values(), family="pooling")
def adaptive_maximum(
    operator: Operator,
    input: Sharded,
    output_size: int | Sequence[int | None] | None,
    return_indices: bool = False,
) -> Sharded:
    """To any extents; to fewer than ranks by partial maxima, without gathering the volume."""
    values, _ = adaptive_maximum_with_indices(operator, input, output_size)
    return values
