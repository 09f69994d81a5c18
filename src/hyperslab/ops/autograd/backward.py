"""``torch.autograd.backward`` of cut tensors, which re-entrant activation checkpointing calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.tensor import Sharded, register
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
    torch.autograd.backward(blocks, grad_tensors, *args, **kwargs)  # type: ignore[arg-type]
