"""From contiguous memory to channels last and back."""

from __future__ import annotations

import torch

from hyperslab.memory_format import CHANNELS_LAST


def reference(x: torch.Tensor, channels_last: bool, dtype: torch.dtype) -> torch.Tensor:
    """A new tensor of the same values in that format and type."""
    memory_format = wanted_format(x, channels_last)
    return torch.empty_like(x, dtype=dtype, memory_format=memory_format).copy_(x)


def reorder_into(x: torch.Tensor, y: torch.Tensor) -> None:
    """The values of ``x`` in the format and type of ``y``."""
    y.copy_(x)


def wanted_format(x: torch.Tensor, channels_last: bool) -> torch.memory_format:
    """Torch's name for it.

    Raises:
        ValueError: torch has channels last for tensors of 4 or 5 dims only.
    """
    if not channels_last:
        return torch.contiguous_format
    if x.dim() not in CHANNELS_LAST:
        raise ValueError(
            f"channels last is for tensors of 4 or 5 dims, not {x.dim()}: keep it contiguous"
        )
    return CHANNELS_LAST[x.dim()]
