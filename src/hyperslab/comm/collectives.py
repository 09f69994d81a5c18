"""Sums tensors over ranks, differentiably, and gathers a few integers of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hyperslab.comm.bootstrap import ranks_of
from hyperslab.comm.communicator import Communicator
from hyperslab.comm.grid import Grid
from hyperslab.comm.launchers import AXES
from hyperslab.comm.shared_memory import shared_channels
from hyperslab.kernels.memory_format import accumulator
from hyperslab.util.capture import refuse_capture
from hyperslab.util.torch_internals import BlockFunction


def average_gradients(gradients: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Return the mean over the ranks of one machine, in place; only where there is `shared_memory`.

    It takes a quarter of gloo's time. Nothing is lost by waiting: a rank of the CPU has no other
    core that could send meanwhile.
    """
    shared = shared_channels()
    ranks = ranks_of(group)
    assert shared is not None
    shared.all_reduce(gradients, ranks, "the average of the gradients", scale=1 / len(ranks))


class _AllReduceSum(BlockFunction):
    """The sum over ranks is its own adjoint: every rank's output depends on every rank's input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Communicator, what: str) -> torch.Tensor:
        ctx.group = group
        ctx.what = what
        return group.sum_in_place(x.clone(memory_format=torch.contiguous_format), what)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _AllReduceSum.apply(gradient, ctx.group, f"the adjoint of {ctx.what}"), None, None


def all_reduce_sum(x: torch.Tensor, group: Communicator | None, what: str) -> torch.Tensor:
    """Sum ``x`` over the ranks of ``group``, differentiable; ``None`` is this rank alone."""
    return x if group is None else _AllReduceSum.apply(x, group, what)


def stack_ranks(x: torch.Tensor, group: Communicator | None, what: str) -> torch.Tensor:
    """Stack what the ranks of ``group`` have in front, in the order of ranks; differentiable.

    For small tensors: it is the sum of blocks that are zero but for one rank's, whose adjoint is
    known. Whatever combines the stack in a differentiable way then has the right gradient, in half
    precision of sums in float32.
    """
    if group is None:
        return x.unsqueeze(0)
    wide = x.to(accumulator(x.dtype))
    nothing = torch.zeros_like(wide)
    parts = [wide if rank == group.rank() else nothing for rank in range(group.size())]
    return all_reduce_sum(torch.stack(parts), group, what).to(x.dtype)


class AllGatheredInts:
    """All-gathers a few integers per rank without blocking the device; all ranks make one.

    On a CUDA device nothing is waited for: the message is queued, and so is its copy to the host.
    """

    def __init__(
        self, grid: Grid, numbers: Sequence[int], last: torch.Tensor | None, what: str
    ) -> None:
        """``last``: a further number of this rank's row that only its device knows, if any.

        Raises:
            CommError: another rank died, did not answer, or is at another place of the program.
            UnsupportedOp: a CUDA graph is being captured.
        """
        refuse_capture(what, "run this step eagerly: the ranks compare values on the host in it")
        row = torch.tensor(numbers, dtype=torch.int64)
        on_device = grid.device.type == "cuda"
        if on_device:
            row = row.pin_memory().to(grid.device, non_blocking=True)
        if last is not None:
            row = torch.cat([row, last.view(1).to(row.device, non_blocking=True)])
        table = row.new_zeros(grid.size, len(row))
        table[grid.rank] = row
        everybody = grid.group(AXES)
        if everybody is not None:
            everybody.sum_in_place(table, what)
        self._event: torch.cuda.Event | None = None
        self._table = table
        if on_device:
            self._table = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            self._table.copy_(table, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def at_once(self) -> bool:
        """Tell whether `read` waits for no device, on any rank."""
        return self._event is None

    def read(self) -> list[list[int]]:
        """Return the rows, by rank."""
        if self._event is not None:
            self._event.synchronize()
        return self._table.tolist()
