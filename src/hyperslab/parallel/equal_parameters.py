"""Parameters are equal on all ranks, or they are not those of one network."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from hyperslab.comm import Grid, log_once
from hyperslab.comm.agreement import from_all, keeping_contact
from hyperslab.comm.rows import Rows
from hyperslab.errors import LayoutError
from hyperslab.tensor import Sharded
from hyperslab.tensor.inputs.digest import digest_of_all
from hyperslab.tensor.inputs.handed_in import ranks_in_words

ROUNDING = 64  # machine epsilons that processors of different kinds may be apart


class EqualParameters:
    """Looks at a module's parameters on all ranks, at its training forwards 1, 2, 4, 8, ...

    At the first there is what was done since `hyperslab.parallelize` made them equal (weights
    loaded on one rank alone), at the second a step of the optimiser (another learning rate on one
    rank). After that nothing new is expected, and the cost fades away.
    """

    def __init__(self, module: nn.Module, grid: Grid) -> None:
        self.module = module
        self.grid = grid
        self.forwards = 0
        self._owed: Rows | None = None  # of the last look, by a CUDA device

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """At a forward that all ranks make together, which those of cut tensors are.

        Raises:
            LayoutError: parameters differ by more than rounding.
        """
        cut = any(type(value) is Sharded for value in args)
        if not cut and not any(isinstance(value, Sharded) for value in tree_leaves((args, kwargs))):
            return
        self._read()
        self.forwards += 1
        if self.forwards & (self.forwards - 1):
            return
        on_host, on_device = digest_of_all(self.module.parameters(), self.grid.device)
        self._owed = Rows(self.grid, [on_host], on_device, "the comparison of parameters")
        if self.grid.device.type == "cpu":
            self._read()

    def _read(self) -> None:
        """On a CUDA device at the forward after the look, on every rank: it waits for nothing."""
        owed, self._owed = self._owed, None
        if owed is not None:
            rows = owed.read()
            if any(row != rows[0] for row in rows):
                self._compare()

    def _compare(self) -> None:
        """All ranks know that there is a difference; which one, and how large?"""
        found: str | None = None
        for name, parameter in self.module.named_parameters():
            first = parameter.detach().contiguous().clone()
            with keeping_contact("the comparison of parameters"):
                dist.broadcast(first, src=0)
            if found is None and not _close(parameter.detach(), first):
                found = name
        names = from_all(found)
        strangers = [rank for rank, name in enumerate(names) if name is not None]
        if not strangers:
            log_once(
                self.grid,
                f"the parameters of {type(self.module).__name__} differ between ranks by rounding: "
                "are their processors of different kinds?",
            )
            return
        raise LayoutError(
            f"the parameters of {type(self.module).__name__} are not equal on all ranks any more: "
            f"{ranks_in_words(strangers)} has another {names[strangers[0]]!r} than rank 0, at "
            f"forward {self.forwards} of its training\n    load and change parameters on every "
            "rank alike, or before hyperslab.parallelize, which gives all ranks those of rank 0;\n"
            "    use the same optimiser, learning rate and clipping on every rank"
        )


def _close(x: torch.Tensor, first: torch.Tensor) -> bool:
    if torch.equal(x, first):
        return True
    if not x.is_floating_point():
        return False
    tolerance = ROUNDING * torch.finfo(x.dtype).eps
    return bool((x - first).abs().max() <= tolerance * first.abs().max())
