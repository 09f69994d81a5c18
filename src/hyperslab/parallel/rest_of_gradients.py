"""Backward passes that bring no gradient to some parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn

from hyperslab.comm import Grid, log_once
from hyperslab.parallel.shared_gradients import SharedGradients

NAMES_SAID = 3


class RestOfGradients:
    """Of a module: the average of those gradients that a backward pass brought.

    Parameters that no loss uses keep the ``.grad`` that they have, None mostly, as in serial torch.
    Those that the losses of some replicas use have no gradient, zero, from the others.

    ``owed``: parameters, by id, whose gradients accumulated without an average (``no_sync``).
    """

    def __init__(self, module: nn.Module, grid: Grid) -> None:
        self.module = module
        self.grid = grid
        self.owed: set[int] = set()
        self.filling = False
        self._said = False

    def average(
        self, seen: Collection[int], averaged: Collection[int], gradients: SharedGradients
    ) -> None:
        """Those of ``seen`` that have been collected, and what earlier passes left."""
        self._say(seen, averaged)
        for parameter in self._missing(seen, averaged):
            if id(parameter) in self.owed and parameter.grad is not None:
                gradients.collect(parameter)
        self.owed.clear()
        gradients.average()

    def complete(self, seen: set[int], averaged: Collection[int]) -> None:
        """Bring zeros to the others, for DistributedDataParallel waits for all of them.

        These are -0.0, which any other number turns into +0.0: what is still -0.0 after the average
        nobody has used, and no message has to tell. From then on they count as ``seen``:
        it averages once for each forward pass.
        """
        self._say(seen, averaged)
        missing = self._missing(seen, averaged)
        without = [p for p in missing if p.grad is None]
        frozen = [p for p in missing if not p.requires_grad]
        self.filling = True
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            zeros = [
                p.new_full((), complex(-0.0, -0.0) if p.is_complex() else -0.0).expand_as(p)
                for p in missing
            ]
            torch.autograd.backward(missing, zeros)
        finally:
            self.filling = False
            for parameter in frozen:
                parameter.requires_grad_(False)
        for parameter in self._unused(without):
            parameter.grad = None
        seen.update(averaged)
        self.owed.clear()

    def _unused(self, without: Sequence[nn.Parameter]) -> Iterable[nn.Parameter]:
        """Of those that had no gradient before: the ones to which no rank brought any."""
        if self.grid.data == 1 or not without:  # the ranks of a replica run the same program
            return without
        found = torch.stack([_brought(p.grad) for p in without if p.grad is not None])
        return [p for p, other in zip(without, found.tolist(), strict=True) if not other]

    def _missing(self, seen: Collection[int], averaged: Collection[int]) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if id(p) in averaged and id(p) not in seen]

    def _say(self, seen: Collection[int], averaged: Collection[int]) -> None:
        if self._said:
            return
        self._said = True
        names = [
            name
            for name, p in self.module.named_parameters()
            if id(p) in averaged and id(p) not in seen
        ]
        some = ", ".join(names[:NAMES_SAID]) + (", ..." if len(names) > NAMES_SAID else "")
        log_once(
            self.grid,
            f"{len(names)} of {len(averaged)} parameters of {type(self.module).__name__} got no "
            f"gradient in a backward pass ({some}): their .grad stays as it is, as in serial torch",
        )


def _brought(average: torch.Tensor) -> torch.Tensor:
    """Whether anything but -0.0 has entered it."""
    numbers = torch.view_as_real(average) if average.is_complex() else average
    return numbers.signbit().logical_not().any()
