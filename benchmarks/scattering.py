"""Step time against ranks, where each rank reads its box and where one reads for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from clock import summary
from feeding import Training
from torch import nn
from volumes import drop

import hyperslab as hs
from hyperslab.data import Source
from hyperslab.formats.source import Array
from hyperslab.formats.storage import replica_boxes
from hyperslab.geometry import Box


class Scattered(Source):
    """``source`` as frameworks without spatially parallel I/O read it.

    Distribution scheme, cut in depth: 1. rank 0 reads the whole sample; 2. it sends every other
    rank its box, in the background as all reading.
    """

    def __init__(self, source: Source, grid: hs.Grid) -> None:
        self.source = source
        self.grid = grid
        self.names = source.names
        self.shape = source.shape
        self.dtype = source.dtype
        self.parameters = source.parameters
        self.group = dist.new_group(backend="gloo") if grid.size > 1 else None

    def read(self, sample: int, box: Box) -> Array:
        if not self.grid.is_main:
            values = np.empty(box.shape, self.dtype)
            dist.recv(torch.from_numpy(values.reshape(-1).view(np.uint8)), 0, group=self.group)
            return values
        whole = self.source.read(sample, Box.whole(self.shape))
        sending = []
        for rank, place in enumerate(replica_boxes(self.shape, {"depth": self.grid.size})):
            if rank > 0:
                part = np.ascontiguousarray(whole[place.slices()]).reshape(-1).view(np.uint8)
                sending.append(dist.isend(torch.from_numpy(part), rank, group=self.group))
        for work in sending:
            work.wait()
        return whole[box.slices()]

    def target(self, sample: int) -> Array:
        return self.source.target(sample)

    def where(self, sample: int) -> str:
        return self.source.where(sample)

    def close(self) -> None:
        self.source.close()


def small() -> nn.Module:
    """A network of so little work that reading matters on a CPU as it does on a GPU."""
    return nn.Sequential(
        nn.Conv3d(4, 8, 4, stride=4),
        nn.LeakyReLU(),
        nn.Conv3d(8, 16, 4, stride=4),
        nn.LeakyReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def step_times(folder: str, turns: int) -> dict[str, Any]:
    """Epochs over a folder that is in no cache, both ways in turn; on every rank."""
    grid = hs.Grid(depth=dist.get_world_size())
    torch.manual_seed(0)
    training = Training(small(), grid)
    files = sorted(Path(folder).iterdir())
    read = hs.open(folder, grid, batch_size=1, split="all")
    scattered = hs.open(Scattered(read.source, grid), grid, batch_size=1, split="all")
    ways = {"read": read, "scattered": scattered}
    rows = []
    for _ in range(1 + turns):
        row = {}
        for name, data in ways.items():
            if grid.is_main:
                drop(files)
            row[name] = training.timed(data.epoch(0), data)
        rows.append(row)
    for data in ways.values():
        data.close()
    return {
        name: {count: summary([row[name][count] for row in rows[1:]]) for count in rows[0][name]}
        for name in ways
    }
