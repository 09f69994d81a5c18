"""``torch.autograd.backward`` of cut tensors, which re-entrant activation checkpointing calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.ops.autograd.functions import block_gradient
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.autograd_functions import (
    seeing_serial_gradients,
    sees_serial_gradients,
)
from hyperslab.tensor.dispatch import refuse


@register(torch.autograd.backward, family="autograd")
def backward(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    *args: object,
    **kwargs: object,
) -> None:
    """Inside a backward pass, where re-entrant checkpointing calls it with blocks' gradients."""
    if torch._C._current_graph_task_id() == -1:
        raise refuse(torch.autograd.backward, (tensors, grad_tensors), {})
    sequence = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
    with torch.enable_grad():
        blocks = [t.local if isinstance(t, Sharded) else t for t in sequence]
    given = grad_tensors
    if sees_serial_gradients():  # in a user's function that recomputes, as reversible networks do
        weights = (given,) if given is None or isinstance(given, torch.Tensor) else tuple(given)
        given = [_of_block(g, t) for g, t in zip(weights, sequence, strict=True)]
    with seeing_serial_gradients(False):
        torch.autograd.backward(blocks, given, *args, **kwargs)  # type: ignore[arg-type]


def _of_block(gradient: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    if gradient is None or not isinstance(x, Sharded):
        return gradient
    return block_gradient(gradient, x)
