"""Tensors as the C code takes them: dense, numbers of channels in float32, by their address."""

from __future__ import annotations

import torch


def address(x: torch.Tensor | None) -> int:
    """Of its first element; 0 for none."""
    return 0 if x is None else x.data_ptr()


def ready(x: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """``x`` dense in this format: itself where it is."""
    if x.is_contiguous(memory_format=memory_format):
        return x
    return x.contiguous(memory_format=memory_format)


def ready_numbers(numbers: torch.Tensor | None) -> torch.Tensor | None:
    """In float32 and contiguous: themselves where they are."""
    return numbers if numbers is None else numbers.float().contiguous()
