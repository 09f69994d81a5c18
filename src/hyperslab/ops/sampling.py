"""Distributes ``grid_sample`` and ``affine_grid``, in which any output may read any input.

Registration moves voxels by a field, spatial transformers turn whole volumes. Which part of the
input a rank reads follows from the values of its coordinates. The ranks tell each other in one
small message; then each fetches the box that it reads. A box that is much larger than a rank's own
part is fetched and sampled piece by piece, so that memory does not grow with the displacement.

Legend: a *coordinate* is in voxels, counted along one spatial dim from the first voxel's centre. An
output has a few *taps* along every dim: indices of the input, each with a weight.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.comm import AXES, AllGatheredInts, ExchangePlan, Grid, fetch
from hyperslab.comm.exchange import give_back, new_exchange_plan
from hyperslab.errors import LayoutError
from hyperslab.geometry import Box, Cover, Cut, Partition
from hyperslab.kernels.memory_format import as_float32
from hyperslab.ops.linalg import DimLabel, contract
from hyperslab.ops.operands import block_of
from hyperslab.ops.placement import with_whole
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe
from hyperslab.util.derivatives import differentiable_once
from hyperslab.util.torch_internals import BlockFunction

_OUTPUTS_AT_ONCE = 1 << 16
"""Limits the outputs whose taps exist at the same time."""

_NOTHING_READ = (1 << 62, 0)
"""Stands for the interval of a rank without taps inside the volume."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Repeats torch's arithmetic from coordinates to indices and weights.

    Not torch's own operator on a box: it takes coordinates relative to the extents, which would
    have to be rounded anew, and a coordinate next to a voxel's centre would change sides. There the
    gradient jumps, and a field that moves nothing has all of its coordinates there.

    Args:
        mode: ``"bilinear"`` (any number of dims), ``"nearest"`` or ``"bicubic"``.
        padding: ``"zeros"``, ``"border"`` or ``"reflection"``.
        align: whether -1 and 1 are the centres of the outermost voxels, or else their outer edges.
        extents: those of the whole input.
    """

    mode: str
    padding: str
    align: bool
    extents: tuple[int, ...]

    def coordinates(self, points: torch.Tensor) -> list[torch.Tensor]:
        """Computes one (batch, output) tensor of coordinates for each dim, in the order of dims."""
        # Rounded as in torch's kernels: those for images on a CPU are vectorised.
        vectorised = len(self.extents) == 2 and points.device.type == "cpu"
        found = []
        for dim, extent in enumerate(self.extents):
            x = points[..., len(self.extents) - 1 - dim].flatten(1)
            if self.align:
                x = (x + 1) * ((extent - 1) / 2) if vectorised else (x + 1) / 2 * (extent - 1)
            else:
                x = (x + 1) * (extent / 2) - 0.5 if vectorised else ((x + 1) * extent - 1) / 2
            found.append(x if self.mode == "bicubic" else self._padded(x, extent))
        return found

    def _padded(self, x: torch.Tensor, extent: int) -> torch.Tensor:
        """Brings coordinates into the volume by the padding."""
        if self.padding == "zeros":
            return x.clamp(-4, extent + 3)  # beyond it no tap is inside, and numbers stay small
        if self.padding == "reflection":
            low = 0.0 if self.align else -0.5
            span = extent - 1 if self.align else extent
            if span == 0:
                return torch.zeros_like(x) * x
            x = torch.where(x < low, low - x, x - low)
            turns = torch.floor(x.detach() / span)
            over = torch.fmod(x, span)
            x = torch.where(turns % 2 == 0, over + low, span - over + low)
        # Unlike torch.clamp it has no gradient on the border itself.
        inside = (x > 0) & (x < extent - 1)
        return torch.where(inside, x, x.detach().clamp(0, extent - 1))

    def indices(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Computes the indices of all taps along a dim: (tap, batch, output)."""
        x = x.detach()
        if self.mode == "nearest":
            return x.round().long()[None]
        base = x.floor()
        if self.mode == "bilinear":
            return torch.stack([base, base + 1]).long()
        extent = self.extents[dim]
        taps = [self._padded(base + k, extent) for k in (-1, 0, 1, 2)]
        return torch.stack(taps).round().long()

    def weights(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the weights of all taps along a dim: (tap, batch, output), differentiable."""
        if self.mode == "nearest":
            return torch.ones_like(x)[None]
        base = x.detach().floor()
        if self.mode == "bilinear":
            return torch.stack([base + 1 - x, x - base])
        a = -0.75  # of the cubic convolution
        t = x - base
        near = [((a + 2) * d - (a + 3)) * d * d + 1 for d in (t, 1 - t)]
        far = [((a * d - 5 * a) * d + 8 * a) * d - 4 * a for d in (t + 1, 2 - t)]
        return torch.stack([far[0], near[0], near[1], far[1]])

    def reads(self, x: torch.Tensor, dim: int) -> tuple[int, int]:
        taps = self.indices(x, dim)
        extent = self.extents[dim]
        inside = (taps >= 0) & (taps < extent)
        if not inside.any():
            return _NOTHING_READ
        return (
            int(taps.where(inside, extent).amin()),
            int(taps.where(inside, -1).amax()) + 1,
        )


class _Sample(BlockFunction):
    """Samples a cut volume at this rank's coordinates.

    Distribution scheme, forward: for each plan 1. fetch a piece of the voxels that this rank reads,
    2. add the weighted taps in it. Backward: for each plan 1. fetch the piece again, 2. compute the
    gradients of its voxels and of the coordinates, 3. send the former to their owners, which add
    them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        block: torch.Tensor,
        sampler: Sampler,
        plans: Sequence[ExchangePlan],
        *coordinates: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(block, *coordinates)
        ctx.sampler = sampler
        ctx.plans = plans
        batch, outputs = coordinates[0].shape
        result = block.new_zeros(batch, outputs, block.shape[1])
        for plan in plans:
            piece = fetch(block, plan, what="a piece of a sampled volume")
            table = _rows_of(piece)
            for part in _parts(outputs):
                rows, weights = _taps(sampler, [x[:, part] for x in coordinates], plan.wanted)
                result[:, part] += F.embedding_bag(
                    rows.flatten(0, 1), table, per_sample_weights=weights.flatten(0, 1), mode="sum"
                ).view(batch, -1, block.shape[1])
        return result  # no view, which autograd would not let anyone change in place

    @staticmethod
    @differentiable_once("grid_sample")  # as torch's own is
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        block, *coordinates = ctx.saved_tensors
        sampler = ctx.sampler
        batch, outputs, channels = gradient.shape
        of_block = torch.zeros_like(block)
        of_coordinates = [torch.zeros_like(x) for x in coordinates]
        for plan in ctx.plans:
            piece = fetch(block, plan, what="a piece of a sampled volume")
            table = _rows_of(piece)
            of_table = torch.zeros_like(table)
            for part in _parts(outputs):
                of_part = gradient[:, part].reshape(-1, channels)
                with torch.enable_grad():
                    own = [x[:, part].detach().requires_grad_() for x in coordinates]
                    rows, weights = _taps(sampler, own, plan.wanted)
                of_weights = torch.empty_like(weights.detach()).flatten(0, 1)
                flat = weights.detach().flatten(0, 1)
                for tap, row in enumerate(rows.flatten(0, 1).unbind(1)):
                    of_table.index_add_(0, row, of_part * flat[:, tap, None])
                    of_weights[:, tap] = (table.index_select(0, row) * of_part).sum(1)
                if sampler.mode == "nearest":
                    continue  # a step has no slope
                found = torch.autograd.grad(weights, own, of_weights.view_as(weights))
                for whole, each in zip(of_coordinates, found, strict=True):
                    whole[:, part] += each
            of_piece = of_table[:-1].view(batch, -1, channels).transpose(1, 2).view(piece.shape)
            of_block += give_back(of_piece, plan, what="a piece of a sampled volume")
        return of_block, None, None, *of_coordinates


def _parts(outputs: int) -> Iterator[slice]:
    return (slice(begin, begin + _OUTPUTS_AT_ONCE) for begin in range(0, outputs, _OUTPUTS_AT_ONCE))


def _rows_of(piece: torch.Tensor) -> torch.Tensor:
    """Lays out (batch, channel, *space) as a table of voxels, and a last row of zeros."""
    rows = piece.flatten(2).transpose(1, 2).reshape(-1, piece.shape[1])
    return torch.cat([rows, rows.new_zeros(1, piece.shape[1])])


def _taps(
    sampler: Sampler, coordinates: Sequence[torch.Tensor], box: Box
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes rows of the table of a box, and weights: (batch, output, tap).

    Taps outside of the box read the last row.
    """
    space = box.shape[2:]
    batch = len(coordinates[0])
    rows = torch.zeros_like(coordinates[0], dtype=torch.int64)[..., None]
    inside = torch.ones_like(rows, dtype=torch.bool)
    weights = torch.ones_like(coordinates[0])[..., None]
    for dim, (x, first, extent) in enumerate(zip(coordinates, box.lo[2:], space, strict=True)):
        index = (sampler.indices(x, dim) - first).movedim(0, -1)
        weight = sampler.weights(x).movedim(0, -1)
        rows = (rows[..., None] * extent + index[..., None, :]).flatten(-2)
        held = (index >= 0) & (index < extent)
        inside = (inside[..., None] & held[..., None, :]).flatten(-2)
        weights = (weights[..., None] * weight[..., None, :]).flatten(-2)
    voxels = math.prod(space)
    begin = torch.arange(batch, device=rows.device).view(-1, 1, 1) * voxels
    return torch.where(inside, rows + begin, batch * voxels), weights


def plan_pieces(
    grid: Grid, partition: Partition, reads: Sequence[tuple[int, int]] | None
) -> list[ExchangePlan]:
    """Plans how every rank gets what it reads of a cut volume, piece by piece.

    Ranks at the same place on an axis get the same interval of the dim that it cuts. No piece is
    longer there than twice the longest shard; most fields need one piece.

    Args:
        grid: the ranks.
        partition: how the volume is cut.
        reads: this rank's interval in every spatial dim; None if its coordinates are not finite.
    """
    cuts = {dim: cut for dim, cut in enumerate(partition.cuts) if cut is not None and dim > 1}
    if grid.has_values:
        own = [-1] * 2 * len(cuts) if reads is None else [n for dim in cuts for n in reads[dim - 2]]
        rows = AllGatheredInts(grid, own, None, "what is read of a sampled volume").read()
        bad = [rank for rank, row in enumerate(rows) if row[0] == -1]
        if bad:
            raise LayoutError(
                f"grid_sample of {partition} on {grid}: the coordinates of rank "
                f"{', '.join(map(str, bad))} are infinite or not numbers\n    look for the first "
                "operator that made them so; a field that diverges is a frequent reason"
            )
        wanted = [
            _read_at_each_place(grid, cut, [row[2 * column : 2 * column + 2] for row in rows])
            for column, cut in enumerate(cuts.values())
        ]
    else:  # in a trace a field moves nothing by more than a voxel
        wanted = [
            [(max(lo - 1, 0), min(hi + 1, cut.extent)) for lo, hi in cut.intervals]
            for cut in cuts.values()
        ]
    cover = partition.cover
    plans = []
    for pieces in itertools.product(*map(_divided, cuts.values(), wanted)):
        intervals = list(cover.intervals)
        for dim, piece in zip(cuts, pieces, strict=True):
            intervals[dim] = piece
        plans.append(new_exchange_plan(grid, partition, Cover(cover.axes, tuple(intervals))))
    return plans


def _read_at_each_place(
    grid: Grid, cut: Cut, intervals: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """Joins the intervals of all ranks at the same place on a cut's axis."""
    wanted = [_NOTHING_READ] * cut.parts
    for rank, (lo, hi) in enumerate(intervals):
        place = grid.coords_of(rank)[cut.axis]
        wanted[place] = (min(lo, wanted[place][0]), max(hi, wanted[place][1]))
    return wanted


def _divided(cut: Cut, wanted: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], ...]]:
    """Divides each rank's interval into pieces of bounded length, as many for all of them.

    >>> _divided(Cut.balanced("depth", 8, 4), [(0, 2), (1, 7), (4, 6), (1, 0)])
    [((0, 2), (1, 5), (4, 6), (0, 0)), ((2, 2), (5, 7), (6, 6), (0, 0))]
    """
    longest = 2 * cut.largest
    spans = [(lo, hi) if lo < hi else (0, 0) for lo, hi in wanted]
    count = max(1, *(-(-(hi - lo) // longest) for lo, hi in spans))
    return [
        tuple((min(lo + i * longest, hi), min(lo + (i + 1) * longest, hi)) for lo, hi in spans)
        for i in range(count)
    ]


@register(F.grid_sample)
def grid_sample(
    input: torch.Tensor,
    grid: torch.Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> torch.Tensor:
    """Samples at coordinates, cut or not: each rank fetches what its own coordinates read.

    Distribution scheme: 1. leave the coordinates cut as they are, or cut them like the volume, 2.
    tell all ranks in one small message what each rank reads along every cut dim, 3. fetch pieces
    and sample them.
    """
    if input.dim() != grid.dim() or input.shape[0] != grid.shape[0]:
        raise LayoutError(f"grid_sample takes as many places as samples\n{describe([input, grid])}")
    n = input.dim() - 2
    if not isinstance(input, Sharded) or not any(input.partition.cuts[2:]):
        outputs: list[DimLabel] = [("output", d) for d in range(n)]
        labels: list[list[DimLabel]] = [
            ["batch", "channel", *[("input", d) for d in range(n)]],
            ["batch", *outputs, "coordinate"],
        ]
        how: dict[str, Any] = {"padding_mode": padding_mode, "align_corners": align_corners}
        run = partial(F.grid_sample, mode=mode, **how)
        output = ["batch", "channel", *outputs]
        return contract("grid_sample", (input, grid), labels, output, run, linear=False)
    x = with_whole(input, (1,), "grid_sample")
    # Torch itself says what it does not take, and which type it returns.
    one = (1,) * n
    dtype = F.grid_sample(
        input.block.new_zeros(1, 1, *one),
        torch.zeros(1, *one, grid.shape[-1], dtype=grid.dtype, device=grid.device),
        mode,
        padding_mode,
        align_corners,
    ).dtype
    where = Partition(tuple(grid.shape), (*_output_cuts(x, grid), None))
    points = as_float32(block_of(grid, where, x.grid, "aligning operands of grid_sample"))
    sampler = Sampler(mode, padding_mode, bool(align_corners), tuple(x.shape[2:]))
    coordinates = sampler.coordinates(points)
    reads = None
    finite = [torch.isfinite(each).all() for each in coordinates] if x.grid.has_values else []
    if finite and torch.stack(finite).all():
        reads = [sampler.reads(each, dim) for dim, each in enumerate(coordinates)]
    plans = plan_pieces(x.grid, x.partition, reads)
    found = _Sample.apply(as_float32(x.local), sampler, plans, *coordinates)
    block = found.transpose(1, 2).unflatten(2, points.shape[1:-1]).to(dtype)
    batch, *space = where.cuts[: n + 1]
    shape = (*x.shape[:2], *where.shape[1:-1])
    partition = Partition(shape, (batch, None, *space))
    return x.like(block, partition, fresh=True, reordered=True)


def _output_cuts(x: Sharded, points: torch.Tensor) -> list[Cut | None]:
    """Returns how batch and space of the output are cut: as the coordinates, then as the volume."""
    batch, _, *space = x.partition.cuts
    own = points.partition.cuts[1:-1] if isinstance(points, Sharded) else [None] * len(space)
    cuts: list[Cut | None] = [batch]
    cuts += [None if cut is None or (batch and cut.axis == batch.axis) else cut for cut in own]
    taken = {cut.axis for cut in cuts if cut is not None}
    for dim, (cut, extent) in enumerate(zip(space, points.shape[1:-1], strict=True), start=1):
        if cuts[dim] is None and cut is not None and cut.axis not in taken:
            cuts[dim] = cut.rebalanced(extent)
    return cuts


@register(F.affine_grid)
def affine_grid(theta: Sharded, size: Sequence[int], align_corners: bool | None = None) -> Sharded:
    """Computes each sample's coordinates by its own matrix, cut in space as a volume would be.

    Distribution scheme: every rank computes the coordinates of its own box.
    """
    batch, *matrix = theta.partition.cuts
    if any(matrix) or size[0] != theta.shape[0]:
        raise LayoutError(
            f"affine_grid takes a whole matrix for each of {size[0]} samples, got "
            f"{theta.partition}\n    use hyperslab.gather(x, axes) before it"
        )
    local = theta.local
    one = local.detach().new_zeros(1, *local.shape[1:])
    F.affine_grid(one, [1, 1, *[2] * (len(size) - 2)], align_corners)  # says what torch refuses
    space = tuple(size[2:])
    cuts = [
        None if cut.parts == 1 or cut.thin else cut
        for axis, extent in zip(AXES[-len(space) :], space, strict=True)
        for cut in [Cut.balanced(axis, extent, theta.grid.extents[axis])]
    ]
    partition = Partition((size[0], *space, len(space)), (batch, *cuts, None))
    box = partition.box(theta.grid.coords)
    lines = []
    for extent, own in zip(space, box.slices()[1:-1], strict=True):
        # A line of one voxel lies at 0; without aligned corners the line ends half a voxel earlier.
        line = torch.linspace(-1, 1, extent, dtype=local.dtype, device=local.device)
        line = line if extent > 1 else torch.zeros_like(line)
        lines.append((line if align_corners else line * (extent - 1) / extent)[own])
    places = [*reversed(torch.meshgrid(*lines, indexing="ij"))]
    base = torch.stack([*places, torch.ones_like(places[0])], -1).view(1, -1, len(space) + 1)
    with torch.autocast(local.device.type, enabled=False):  # as torch's own operator
        points = base.expand(len(local), -1, -1).bmm(local.transpose(1, 2))
    return theta.like(points.view(box.shape), partition, fresh=True)
