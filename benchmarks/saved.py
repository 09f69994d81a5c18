"""What the autograd graph of a step keeps on this rank, counted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from networks import make_case
from torch import nn

import hyperslab as hs

GRIDS = {
    1: {},
    2: {"depth": 2},
    4: {"depth": 2, "height": 2},
    8: {"depth": 2, "height": 2, "width": 2},
}


@contextmanager
def counting(excluded: Sequence[torch.Tensor]) -> Iterator[dict[int, int]]:
    """Yields a dict that fills with storage -> bytes of every tensor saved for backward.

    A storage counts once however many tensors show it; the ``excluded`` tensors' do not count.
    """
    storages: dict[int, int] = {}
    skip = {tensor.untyped_storage().data_ptr() for tensor in excluded}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skip:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield storages


def halo_elements(layer: nn.Module, x: hs.Sharded, y: hs.Sharded) -> int:
    """Elements of other ranks that this rank's outputs read: from the definition of a window.

    Output o reads o s - p .. o s - p + k - 1 along each dim. What lies in the volume and not in
    the own box is halo.
    """
    reads = [x.box.shape[0], x.box.shape[1]]
    kept = [x.box.shape[0], x.box.shape[1]]
    for i in range(3):
        k, s, p = (_per_dim(value, i) for value in (layer.kernel_size, layer.stride, layer.padding))
        lo = y.box.lo[i + 2]
        hi = y.box.hi[i + 2]
        first = max(0, lo * s - p)
        last = min(x.shape[i + 2], (hi - 1) * s - p + k)
        reads.append(last - first)
        kept.append(min(last, x.box.hi[i + 2]) - max(first, x.box.lo[i + 2]))
    return math.prod(reads) - math.prod(kept)


def _per_dim(value: Any, dim: int) -> int:
    return value if isinstance(value, int) else value[dim]


def saved_bytes(network: str, width: int, batch_norm: bool, axes: dict[str, int]) -> dict[str, int]:
    """Bytes that one step saves on this rank, and the halos' part of them.

    With no ``axes`` the plain module and a plain tensor: the serial run.
    """
    grid = hs.Grid(**axes)
    case = make_case(network, width, batch_norm, grid.device)
    halos = []

    def note(layer: nn.Module, args: Any, y: hs.Sharded) -> None:
        halos.append(halo_elements(layer, args[0], y) * y.element_size())

    if axes:
        case.cut(grid)
        for module in case.model.modules():
            if isinstance(module, nn.Conv3d | nn.AvgPool3d | nn.MaxPool3d):
                module.register_forward_hook(note)
    with counting([*case.model.parameters(), *case.model.buffers()]) as storages:
        loss = case.loss(case.model(case.x), case.y)
    del loss
    return {"saved": sum(storages.values()), "halos": sum(halos)}
