"""The order in which a tensor's dims lie in memory: contiguous or channels last."""

from __future__ import annotations

import functools

import torch

SHAPES_KEPT = 4096
"""Shapes whose strides are known: a network has a few for each of its layers."""

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dims."""


def memory_format_of(x: torch.Tensor) -> torch.memory_format:
    """Channels last if ``x`` is that and nothing else; contiguous for all other strides."""
    last = CHANNELS_LAST.get(x.dim())
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


@functools.lru_cache(SHAPES_KEPT)
def strides_in(shape: tuple[int, ...], memory_format: torch.memory_format) -> tuple[int, ...]:
    """The strides of a new tensor of this memory format.

    >>> strides_in((2, 3, 1, 4), torch.channels_last)
    (12, 1, 12, 3)
    """
    last = memory_format is not torch.contiguous_format
    inner = (1, *range(len(shape) - 1, 1, -1)) if last else range(len(shape) - 1, 0, -1)
    strides = [0] * len(shape)
    step = 1
    for dim in (*inner, 0) if shape else ():
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def dense(x: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """``x`` with the strides that a new tensor of this memory format has.

    A view may have others in a dim of extent one. Torch (2.13) then takes it for another format:
    its batch norm computes wrong gradients, silently.
    """
    strides = strides_in(x.shape, memory_format)
    if x.stride() == strides:
        return x
    if x.is_contiguous(memory_format=memory_format):
        return x.as_strided(x.shape, strides)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=memory_format).copy_(
        x
    )
