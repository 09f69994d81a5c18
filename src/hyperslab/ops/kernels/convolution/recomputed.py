"""What a convolution keeps of its input for the backward pass."""

from __future__ import annotations

from typing import Protocol

import torch

from hyperslab.ops.common.room import Room

Saved = tuple[torch.Tensor | None, ...]
"""As autograd takes and returns them."""


class Recomputed(Protocol):
    """An input that is computed again in the backward pass, so that it need not be kept.

    ``tensors`` are kept in its place, as autograd keeps tensors. ``value`` makes the input of them:
    bit by bit what it was, in any memory format. Where a graph is recorded
    (``torch.is_grad_enabled()``: with ``create_graph=True``) it does so out of operators that can
    be differentiated, for the tensors then have their history.
    """

    @property
    def tensors(self) -> Saved:
        """What the input is computed from."""

    def value(self, tensors: Saved, room: Room | None = None) -> torch.Tensor:
        """The input; where there is ``room``, without a graph alone, if it may be made there."""


class Kept:
    """What to save of an input, and the way back; ``source`` None: the input itself."""

    def __init__(self, x: torch.Tensor, source: Recomputed | None) -> None:
        self.tensors: Saved = (x,) if source is None else source.tensors
        self.value = _first if source is None else source.value


def _first(tensors: Saved, room: Room | None = None) -> torch.Tensor:
    (x,) = tensors
    assert x is not None
    return x
