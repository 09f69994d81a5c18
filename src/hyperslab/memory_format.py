"""The order in which a tensor's dims lie in memory: contiguous or channels last."""

from __future__ import annotations

import torch

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dims."""


def memory_format_of(x: torch.Tensor) -> torch.memory_format:
    """Channels last if ``x`` is that and nothing else; contiguous for all other strides."""
    last = CHANNELS_LAST.get(x.dim())
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def dense(x: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """``x`` with the strides that a new tensor of this memory format has.

    A view may have others in a dim of extent one. Torch (2.13) then takes it for another format:
    its batch norm computes wrong gradients, silently.
    """
    like = torch.empty(x.shape, dtype=x.dtype, device="meta", memory_format=memory_format)
    if x.stride() == like.stride():
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=memory_format).copy_(
        x
    )
