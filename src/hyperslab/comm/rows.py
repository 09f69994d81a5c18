"""Rows: whole numbers that every rank states, on all of them, in one small message."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.comm.grid import AXES, Grid


class Rows:
    """A row of whole numbers of every rank, on its way to this one; all ranks make one.

    On a CUDA device nothing is waited for: the message is queued, and so is its copy to the host.
    """

    def __init__(
        self, grid: Grid, numbers: Sequence[int], last: torch.Tensor | None, what: str
    ) -> None:
        """``last``: a further number of this rank's row that only its device knows, if any.

        Raises:
            CommError: another rank died, did not answer, or is at another place of the program.
        """
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

    def here(self) -> bool:
        """Whether `read` would not wait."""
        return self._event is None or self._event.query()

    def read(self) -> list[list[int]]:
        """The rows, by rank."""
        if self._event is not None:
            self._event.synchronize()
        return self._table.tolist()
