"""What a convolution keeps of its input for the backward pass."""

from __future__ import annotations

from typing import Protocol

import torch


class Recomputed(Protocol):
    """An input that is computed again in the backward pass, so that it need not be kept.

    ``tensors`` are kept in its place, as autograd keeps tensors. ``value`` makes the input of them:
    bit by bit what it was, in any memory format. Where a graph is recorded
    (``torch.is_grad_enabled()``: with ``create_graph=True``) it does so out of operators that can
    be differentiated, for the tensors then have their history.
    """

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What the input is computed from."""

    def value(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The input."""


class Kept:
    """What to save of an input, and the way back; ``source`` None: the input itself."""

    def __init__(self, x: torch.Tensor, source: Recomputed | None) -> None:
        self.tensors = (x,) if source is None else source.tensors
        self.value = _first if source is None else source.value


def _first(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return tensors[0]
