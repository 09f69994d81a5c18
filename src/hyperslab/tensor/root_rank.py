"""Moves boxes of tensors between ranks, and whole ones from or to the one rank that holds them.

`scatter` cuts a mini-batch that one rank holds, `gather_to_main` collects what the main rank is
to write or measure, `send_boxes` moves any boxes between any ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from hyperslab.comm import AllGatheredInts, Grid, all_reduce_sum
from hyperslab.errors import LayoutError
from hyperslab.geometry import Box, Partition, TransferPlan, plan_transfers
from hyperslab.tensor.inputs import (
    SPEC_INTS,
    Batch,
    InputSpec,
    box_held,
    check_spec,
    describe_specs,
    input_partition,
    memory_order,
    refuse_workers,
)
from hyperslab.tensor.sharded import Sharded
from hyperslab.util.derivatives import differentiable_once


def gather_to_main(x: Sharded) -> NDArray[Any] | None:
    """Return all of a cut tensor on the main rank, None on the others.

    Distribution scheme: 1. each rank sends its box to the main one, of ranks with equal copies
    only the first, 2. the main rank, which wants everything, puts them in their places.
    """
    whole = Box.whole(x.partition.shape)
    plan = plan_transfers(x.grid.rank, first_copies(x.partition, x.grid), {0: whole})
    block = x.local.detach().cpu()
    found = run_transfers(plan, block, block, x.grid, "the gather of a volume to the main rank")
    return None if found is None else found.numpy()


def send_boxes(
    block: torch.Tensor,
    owned: Mapping[int, Box],
    wanted: Mapping[int, Box],
    grid: Grid,
    what: str,
    fill: float | None = None,
) -> torch.Tensor | None:
    """Return the box that this rank wants, or None where it wants none; all ranks call it.

    ``block`` is this rank's own box. ``owned`` names one owner of each element; what nobody owns
    holds ``fill``.

    Distribution scheme: 1. each rank sends every other one the part of its box that is wanted
    there, all at the same time, 2. and puts what arrives into its place.
    """
    plan = plan_transfers(grid.rank, owned, wanted)
    return run_transfers(plan, block, block, grid, what, fill=fill, at_once=True)


def first_copies(partition: Partition, grid: Grid) -> dict[int, Box]:
    """Return the boxes of the first rank of each group with equal copies: one owner an element."""
    every = ((rank, grid.coords_of(rank)) for rank in range(grid.size))
    return {rank: partition.box(at) for rank, at in every if partition.is_first_copy(at)}


def run_transfers(
    plan: TransferPlan,
    held: torch.Tensor | None,
    like: torch.Tensor,
    grid: Grid,
    what: str,
    *,
    fill: float | None = None,
    at_once: bool = False,
) -> torch.Tensor | None:
    """Return the box that a plan wants, from ``held``, its own box, and what other ranks send.

    In new contiguous memory, of the type and on the device of ``like``. Unless ``at_once``,
    message after message: who holds all of a volume has no room for it twice.
    """
    own: Any = held  # where this rank sends or keeps something
    found: Any = None if plan.wanted is None else like.new_empty(plan.wanted.shape)
    if found is not None and fill is not None:
        found.fill_(fill)
    if plan.kept is not None:
        found[plan.kept.slices(plan.wanted)] = own[plan.kept.slices(plan.own)]
    each = [*(((t,), ()) for t in plan.sends), *(((), (t,)) for t in plan.receives)]
    for sends, receives in [(plan.sends, plan.receives)] if at_once and each else each:
        leaving = [(t.rank, own[t.box.slices(plan.own)].to(grid.device)) for t in sends]
        arriving = [(t.rank, like.new_empty(t.box.shape, device=grid.device)) for t in receives]
        grid.halos.exchange(leaving, arriving, what).wait()
        for t, (_, piece) in zip(receives, arriving, strict=True):
            found[t.box.slices(plan.wanted)] = piece
    return found


class _ScatterPlan:
    """Describes which rank holds which box of a mini-batch, and the order of its dims in memory."""

    def __init__(
        self, form: InputSpec, sources: dict[int, int], order: tuple[int, ...], grid: Grid
    ) -> None:
        """``sources``: the ranks that hold something, by their replica's place."""
        self.grid = grid
        self.order = order
        self.dtype = form.torch_dtype
        self.partition: Partition = input_partition(form, grid)
        self.held = {rank: box_held(form, data) for data, rank in sources.items()}

    def box(self, rank: int) -> Box:
        return self.partition.box(self.grid.coords_of(rank))

    def hand_out(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """Return this rank's box of what the sources hold, laid out in memory as it is there."""
        owned = {rank: self._in_memory(box) for rank, box in self.held.items()}
        wanted = {rank: self._in_memory(self.box(rank)) for rank in range(self.grid.size)}
        plan = plan_transfers(self.grid.rank, owned, wanted)
        held = None if tensor is None else tensor.detach().permute(self.order)
        like = torch.empty(0, dtype=self.dtype, device=self.grid.device)
        block = run_transfers(plan, held, like, self.grid, "the scatter of a tensor")
        assert block is not None
        return block.permute([self.order.index(dim) for dim in range(len(self.order))])

    def bring_back(self, block: torch.Tensor) -> torch.Tensor | None:
        """Return what sources hold, from all ranks' boxes; None on the others."""
        plan = plan_transfers(self.grid.rank, first_copies(self.partition, self.grid), self.held)
        return run_transfers(plan, block, block, self.grid, "the adjoint of the scatter")

    def _in_memory(self, box: Box) -> Box:
        return Box.of([box.interval(dim) for dim in self.order])


class _Scatter(torch.autograd.Function):
    """Scatters by `_ScatterPlan.hand_out`; backward brings the serial gradient to the sources."""

    @staticmethod
    def forward(ctx: Any, held: torch.Tensor, is_source: bool, deal: _ScatterPlan) -> torch.Tensor:
        ctx.deal = deal
        return deal.hand_out(held if is_source else None)

    @staticmethod
    @differentiable_once("scatter")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grid = ctx.deal.grid
        copies = grid.group([a for a in grid.extents if a not in ctx.deal.partition.axes])
        gradient = all_reduce_sum(gradient, copies, "the adjoint of the scatter") / grid.size
        return ctx.deal.bring_back(gradient), None, None


def scatter(
    tensor: torch.Tensor | None,
    grid: Grid,
    *,
    src: int = 0,
    channels: bool = True,
    batch: Batch = "global",
) -> Sharded:
    """Cut a tensor, batch included, that rank ``src`` alone holds; all ranks call this.

    The other ranks may pass anything, such as None. The tensor is cut as by `hyperslab.shard`, the
    batch by data. ``src`` needs memory for its own box and one other, the other ranks for their own
    box; only boxes travel. The blocks are on the grid's device, in the memory format of the tensor.

    It is differentiable, once: if the tensor of ``src`` requires a gradient, so does the result on
    every rank, and a backward pass of all ranks together brings the serial gradient there.

    Distribution scheme: 1. each rank states what it holds in one small message, 2. ``src`` sends
    every other rank its box.

    Args:
        tensor: the mini-batch; ignored on ranks other than ``src``.
        grid: the ranks.
        src: the rank that holds it, by its number on the grid, which is torch's if the grid has all
            ranks. With ``batch="replica"``: by its number within each replica.
        channels: whether dim 1 is one of channels.
        batch: ``"global"``: the tensor is the whole mini-batch. ``"replica"``: a rank of each
            replica holds that one's part, all of as many samples.

    Raises (on every rank):
        LayoutError: no such rank, ``src`` holds no ordinary tensor, an extent has fewer elements
            than its axis has ranks, or the ranks, or replicas, differ in what they ask for.
        CommError: another rank died or did not answer within the time limit.
    """
    refuse_workers("hyperslab.scatter", grid)
    sources = _source_ranks(src, grid, batch)
    is_source = grid.rank in sources.values()
    form = InputSpec.of(tensor if is_source else None, channels=channels, batch=batch)
    if grid.size > 1:
        asked = [src, channels, batch == "replica"]
        form, order, tracked = _announce_spec(tensor, form, asked, sources, grid)
    else:
        order = memory_order(tensor) if tensor is not None and form.can_be_cut else ()
        tracked = False  # it says so itself
    check_spec(form, f"what rank {', '.join(map(str, sources.values()))} hands in")
    deal = _ScatterPlan(form, sources, order, grid)
    held = tensor if is_source else torch.zeros((), requires_grad=tracked)
    return Sharded.from_local(_Scatter.apply(held, is_source, deal), deal.partition, grid)


def _source_ranks(src: int, grid: Grid, batch: Batch) -> dict[int, int]:
    """Return the sources by their replica's place; refuse a missing rank (`LayoutError`)."""
    ranks = grid.size // grid.data if batch == "replica" else grid.size
    if not 0 <= src < ranks:
        of = "of a replica" if batch == "replica" else "of the grid"
        raise LayoutError(f"src={src}: the ranks {of} are numbered 0 to {ranks - 1}")
    if batch == "replica":
        return {data: data * ranks + src for data in range(grid.data)}
    return {0: src}


def _announce_spec(
    tensor: torch.Tensor | None,
    own: InputSpec,
    asked: list[int],
    sources: dict[int, int],
    grid: Grid,
) -> tuple[InputSpec, tuple[int, ...], bool]:
    """Gather what the sources hold: its specification, its order in memory, if it is tracked."""
    order = 0
    tracked = False
    if tensor is not None and grid.rank in sources.values() and own.can_be_cut:
        order = sum(dim << 4 * i for i, dim in enumerate(memory_order(tensor)))
        tracked = tensor.requires_grad and torch.is_grad_enabled()
    stated = [*asked, *own.numbers(), order, tracked]
    rows = AllGatheredInts(grid, stated, None, "the announcement of what is scattered").read()
    if any(row[: len(asked)] != asked for row in rows):
        calls = {
            rank: f"src={row[0]}, channels={bool(row[1])}, of a replica: {bool(row[2])}"
            for rank, row in enumerate(rows)
        }
        words = "\n".join(f"    rank {rank}: {call}" for rank, call in calls.items())
        raise LayoutError(f"the ranks differ in what they ask scatter for\n{words}")
    held = {rank: rows[rank][len(asked) :] for rank in sources.values()}
    forms = {rank: InputSpec.read(row) for rank, row in held.items()}
    if len(set(forms.values())) > 1:
        raise LayoutError(
            "the replicas' parts of a mini-batch differ\n"
            + "".join(f"    {words}\n" for words in describe_specs(forms))
            + "    hand in as many samples of one shape and type in every replica (drop_last=True)"
        )
    first = min(held)
    form = forms[first]
    dims = tuple(held[first][SPEC_INTS] >> 4 * i & 15 for i in range(len(form.shape)))
    return form, dims, any(bool(row[SPEC_INTS + 1]) for row in held.values())
