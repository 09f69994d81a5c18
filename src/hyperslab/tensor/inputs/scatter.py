"""`scatter`: one rank holds a mini-batch, and every rank gets its box of it."""

from __future__ import annotations

from typing import Any

import torch

from hyperslab.comm import Grid, all_reduce_sum
from hyperslab.comm.rows import Rows
from hyperslab.errors import LayoutError
from hyperslab.geometry import Box, Partition, plan_transfers
from hyperslab.tensor.inputs.digest import memory_order
from hyperslab.tensor.inputs.handed_in import (
    FORM,
    Batch,
    Form,
    check_form,
    forms_in_words,
    part_held,
    partition_of,
)
from hyperslab.tensor.main_rank import first_copies, run_transfers
from hyperslab.tensor.sharded import Sharded


class _Deal:
    """Who holds which box of a mini-batch, and in which order of the dims it lies in memory."""

    def __init__(
        self, form: Form, sources: dict[int, int], order: tuple[int, ...], grid: Grid
    ) -> None:
        """``sources``: the ranks that hold something, by their replica's place."""
        self.grid = grid
        self.order = order
        self.dtype = form.torch_dtype
        self.partition: Partition = partition_of(form, grid)
        self.held = {rank: part_held(form, data) for data, rank in sources.items()}

    def box(self, rank: int) -> Box:
        """What a rank gets."""
        return self.partition.box(self.grid.coords_of(rank))

    def hand_out(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """This rank's box of what the sources hold, laid out in memory as it is there."""
        owned = {rank: self._in_memory(box) for rank, box in self.held.items()}
        wanted = {rank: self._in_memory(self.box(rank)) for rank in range(self.grid.size)}
        plan = plan_transfers(self.grid.rank, owned, wanted)
        held = None if tensor is None else tensor.detach().permute(self.order)
        like = torch.empty(0, dtype=self.dtype, device=self.grid.device)
        block = run_transfers(plan, held, like, self.grid, "the scatter of a tensor")
        assert block is not None
        return block.permute([self.order.index(dim) for dim in range(len(self.order))])

    def bring_back(self, block: torch.Tensor) -> torch.Tensor | None:
        """What sources hold, of all ranks' boxes; None on the others."""
        plan = plan_transfers(self.grid.rank, first_copies(self.partition, self.grid), self.held)
        return run_transfers(plan, block, block, self.grid, "the adjoint of the scatter")

    def _in_memory(self, box: Box) -> Box:
        return Box.of([box.interval(dim) for dim in self.order])


class _Scatter(torch.autograd.Function):
    """`_Deal.hand_out`; backward: the serial gradient, at the sources."""

    @staticmethod
    def forward(ctx: Any, held: torch.Tensor, is_source: bool, deal: _Deal) -> torch.Tensor:
        ctx.deal = deal
        return deal.hand_out(held if is_source else None)

    @staticmethod
    @torch.autograd.function.once_differentiable
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

    What the others hand in is not looked at: None, say. It is cut as by `hyperslab.shard`, the
    batch by data. Of ``src`` it takes no more memory than its own box and one other, of the others
    their own box; nothing but boxes travels. The blocks are on the grid's device, in the memory
    format of the tensor.

    Differentiable, once: where the tensor of ``src`` requires a gradient the result does on every
    rank, and a backward pass, which all ranks make together, brings the serial gradient there.

    Distribution scheme: 1. each rank states what it holds in one small message, 2. ``src`` sends
    every other rank its box.

    Args:
        tensor: the mini-batch; on other ranks than ``src`` anything.
        grid: the ranks.
        src: who holds it: its number among all ranks, as in `torch.distributed`. With
            ``batch="replica"`` its number within each replica, whose ranks follow each other.
        channels: whether dim 1 is one of channels.
        batch: ``"global"``: the tensor is the whole mini-batch. ``"replica"``: a rank of each
            replica holds that one's part, all of as many samples.

    Raises (on every rank):
        LayoutError: no such rank, ``src`` holds no ordinary tensor, an extent has fewer elements
            than its axis has ranks, or the ranks, or replicas, differ in what they ask for.
        CommError: another rank died or did not answer within the time limit.
    """
    sources = _sources(src, grid, batch)
    is_source = grid.rank in sources.values()
    form = Form.of(tensor if is_source else None, channels=channels, batch=batch)
    if grid.size > 1:
        asked = [src, channels, batch == "replica"]
        form, order, tracked = _announce(tensor, form, asked, sources, grid)
    else:
        order = memory_order(tensor) if tensor is not None and form.can_be_cut else ()
        tracked = False  # it says so itself
    check_form(form, f"what rank {', '.join(map(str, sources.values()))} hands in")
    deal = _Deal(form, sources, order, grid)
    held = tensor if is_source else torch.zeros((), requires_grad=tracked)
    return Sharded.from_local(_Scatter.apply(held, is_source, deal), deal.partition, grid)


def _sources(src: int, grid: Grid, batch: Batch) -> dict[int, int]:
    """Raises:
    LayoutError: there is no such rank.
    """
    ranks = grid.size // grid.data if batch == "replica" else grid.size
    if not 0 <= src < ranks:
        of = "of a replica" if batch == "replica" else "of the grid"
        raise LayoutError(f"src={src}: the ranks {of} are numbered 0 to {ranks - 1}")
    if batch == "replica":
        return {data: data * ranks + src for data in range(grid.data)}
    return {0: src}


def _announce(
    tensor: torch.Tensor | None, own: Form, asked: list[int], sources: dict[int, int], grid: Grid
) -> tuple[Form, tuple[int, ...], bool]:
    """What the sources hold: its form, the order of its dims in memory, whether it is tracked.

    Raises:
        LayoutError: they differ, or the ranks ask for different things.
    """
    order = 0
    tracked = False
    if tensor is not None and grid.rank in sources.values() and own.can_be_cut:
        order = sum(dim << 4 * i for i, dim in enumerate(memory_order(tensor)))
        tracked = tensor.requires_grad and torch.is_grad_enabled()
    stated = [*asked, *own.numbers(), order, tracked]
    rows = Rows(grid, stated, None, "the announcement of what is scattered").read()
    if any(row[: len(asked)] != asked for row in rows):
        calls = {
            rank: f"src={row[0]}, channels={bool(row[1])}, of a replica: {bool(row[2])}"
            for rank, row in enumerate(rows)
        }
        words = "\n".join(f"    rank {rank}: {call}" for rank, call in calls.items())
        raise LayoutError(f"the ranks differ in what they ask scatter for\n{words}")
    held = {rank: rows[rank][len(asked) :] for rank in sources.values()}
    forms = {rank: Form.read(row) for rank, row in held.items()}
    if len(set(forms.values())) > 1:
        raise LayoutError(
            "the replicas' parts of a mini-batch differ\n"
            + "".join(f"    {words}\n" for words in forms_in_words(forms))
            + "    hand in as many samples of one shape and type in every replica (drop_last=True)"
        )
    first = min(held)
    form = forms[first]
    dims = tuple(held[first][FORM] >> 4 * i & 15 for i in range(len(form.shape)))
    return form, dims, any(bool(row[FORM + 1]) for row in held.values())
