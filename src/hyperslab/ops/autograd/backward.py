"""What re-entrant activation checkpointing asks of cut tensors."""

from __future__ import annotations

from typing import Any

import torch

from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import refuse


@register(torch.autograd.backward, family="autograd")
def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    """Inside a backward pass, where re-entrant checkpointing calls it with blocks' gradients."""
    if torch._C._current_graph_task_id() == -1:
        raise refuse(torch.autograd.backward, (tensors, grad_tensors), {})
    sequence = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
    with torch.enable_grad():
        blocks = [t.local if isinstance(t, Sharded) else t for t in sequence]
    torch.autograd.backward(blocks, grad_tensors, *args, **kwargs)
