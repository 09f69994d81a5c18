"""Sums tensors over ranks, differentiably, and gathers a few integers of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from hyperslab.comm.communicator import Communicator
from hyperslab.comm.grid import Grid
from hyperslab.comm.launchers import AXES
from hyperslab.kernels.memory_format import accumulator
from hyperslab.util.capture import refuse_capture
from hyperslab.util.derivatives import LinearMap


def all_reduce_sum(x: torch.Tensor, group: Communicator | None, what: str) -> torch.Tensor:
    """Sum ``x`` over the ranks of ``group``, differentiable; ``None`` is this rank alone.

    The sum is its own adjoint: every rank's output depends on every rank's input.
    """
    if group is None:
        return x
    there, back = (partial(_sum, group, words) for words in (what, f"the adjoint of {what}"))
    return LinearMap.apply(x, there, back)


def _sum(group: Communicator, what: str, x: torch.Tensor) -> torch.Tensor:
    return group.sum_in_place(x.clone(memory_format=torch.contiguous_format), what)


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
        if self._event is not None:
            self._event.synchronize()
        return self._table.tolist()
