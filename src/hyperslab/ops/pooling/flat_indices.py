"""Indices of maxima: flat positions in a sample's whole volume, as torch's poolings give."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def move_indices(
    index: torch.Tensor,
    extents: Sequence[int],
    move: Callable[[int, torch.Tensor], torch.Tensor],
    target: Sequence[int],
) -> torch.Tensor:
    """Flat positions in a block of ``extents`` as flat positions in one of ``target`` extents.

    ``move(dim, coordinate)`` says where a coordinate of a spatial dim lies in the other block.
    """
    moved = torch.zeros_like(index)
    rest = index
    stride = 1
    for dim in reversed(range(len(extents))):
        moved = moved + stride * move(dim, rest % extents[dim])
        rest = rest // extents[dim]
        stride *= target[dim]
    return moved
