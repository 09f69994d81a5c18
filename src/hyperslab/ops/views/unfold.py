"""Windows along one dim, which become a dim of their own."""

from __future__ import annotations

import functools

import torch

from hyperslab.comm import plan_exchange
from hyperslab.comm.exchange import fetch
from hyperslab.geometry import Cover, Partition, Window
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.signature import read_dim

_LAYOUTS = 4096
"""Layouts that are remembered, of windows over one partition each."""


@register(torch.Tensor.unfold, family="views")
def unfold(self: Sharded, dimension: int, size: int, step: int) -> Sharded:
    """Any dim; windows that lie within their rank's block are views of it.

    Distribution scheme: 1. every window lies on the rank that owns its centre; where that leaves a
    rank without any, that dim is cut in balanced shards, or not at all if there are fewer windows
    than ranks, 2. every rank fetches what its windows read, 3. they are views of that.
    """
    dim = read_dim(dimension, self.dim(), "unfold")
    if not 1 <= size <= self.shape[dim]:
        raise ValueError(
            f"unfold: windows of {size} elements along dim {dim}, which has {self.shape[dim]}: "
            f"{self.partition}"
        )
    if step < 1:
        raise ValueError(f"unfold: the step is {step} but must be greater than zero")
    stay, windows, cover = _lay_out(self.partition, dim, Window(size, step))
    target = Partition((*windows.shape, size), (*windows.cuts, None))
    if stay:
        lo, hi = cover.box(self.grid.coords).interval(dim)
        block = self.local.narrow(dim, lo - self.box.lo[dim], hi - lo)
    else:
        block = fetch(self.local, plan_exchange(self.partition, cover, self.grid), what="unfold")
    y = self.like(block.unfold(dim, size, step), target)
    if not stay:
        y.mark_as_copy(self)
    elif self.partition.cuts[dim] is not None:
        y.is_crop = True
    return y


@functools.lru_cache(_LAYOUTS)
def _lay_out(partition: Partition, dim: int, window: Window) -> tuple[bool, Partition, Cover]:
    """Whether every window lies in its rank's block, how windows are cut, and what they read."""
    count = window.outputs(partition.shape[dim])
    cut = partition.cuts[dim]
    new = cut and window.cut_outputs(cut, count)
    if new is not None and new.thin:
        new = None
    windows = partition.with_dim(dim, count, new)
    outs = windows.cover.intervals
    reads = [tuple(map(window.reads, own)) if d == dim else own for d, own in enumerate(outs)]
    cover = Cover(windows.cover.axes, tuple(reads))
    owned = partition.cover.intervals[dim]
    stay = len(owned) == len(reads[dim]) and all(
        lo <= a and b <= hi for (lo, hi), (a, b) in zip(owned, reads[dim], strict=True)
    )
    return stay, windows, cover
