"""Training that is fed from files, from the store, or from the memory of the device, in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from clock import now, slowest, summary
from torch import nn
from volumes import disk_bytes, drop, warm

import hyperslab as hs
from hyperslab.data import Dataset, os_bytes_read
from hyperslab.geometry import Box

Batch = tuple[hs.Sharded, hs.Sharded]
COUNTS = ("seconds", "wait", "program", "system", "disk")

ASKING = 4096
"""More than the system counts when it is asked for its counts in an epoch [B]."""


class Training:
    """A network, cut over the grid, that is trained on whatever comes."""

    def __init__(self, model: nn.Module, grid: hs.Grid) -> None:
        self.grid = grid
        self.model = hs.parallelize(model.to(grid.device), grid)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def run(self, batches: Iterable[Batch]) -> int:
        """A step of each mini-batch; their number."""
        steps = 0
        for steps, (x, y) in enumerate(batches, 1):  # noqa: B007
            F.mse_loss(self.model(x), y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return steps

    def timed(self, batches: Iterable[Batch], data: Dataset) -> dict[str, float]:
        """Per step: seconds and waiting of the slowest rank [s], bytes of all ranks [B]."""
        self.grid.barrier()
        before = _counts(data, self.grid)
        steps = self.run(batches)
        seconds, wait, *read = (
            (b - a) / steps for a, b in zip(before, _counts(data, self.grid), strict=True)
        )
        total = torch.tensor(read, dtype=torch.float64, device=self.grid.device)
        if self.grid.size > 1:
            dist.all_reduce(total)
        values = [*slowest([seconds, wait], self.grid.device), *total.tolist()]
        return dict(zip(COUNTS, values, strict=True))


def _counts(data: Dataset, grid: hs.Grid) -> tuple[float, ...]:
    """The time, the time waited; bytes that the data set, the system and the disk have read."""
    return now(grid.device), data.wait_seconds, data.bytes_read, os_bytes_read(), disk_bytes()


class Fed:
    """The same samples from files (``direct``), from the store, and from the device's memory."""

    def __init__(self, folder: str, width: int, grid: hs.Grid) -> None:
        self.folder = folder
        self.width = width
        self.grid = grid
        self.files = sorted(Path(folder).iterdir())
        self.direct = self.opened("direct")
        self.store = self.opened("store")
        self.kept = list(self.store.epoch(0))  # decoded; and the store is filled
        shown = zip(self.store.names(), self.kept, strict=True)
        self.blocks = [self._stored(name, batch) for name, batch in shown]

    def opened(self, mode: str) -> Dataset:
        return hs.open(
            self.folder, self.grid, batch_size=1, split="all", subvolume=self.width, mode=mode
        )

    def _stored(self, name: str, batch: Batch) -> tuple[torch.Tensor, Batch]:
        """This rank's box as it is stored, on the device; what it becomes."""
        source = self.store.source
        whole = batch[0].box
        box = Box(whole.lo[1:], whole.hi[1:])
        values = np.ascontiguousarray(source.read(list(source.names).index(name), box))[None]
        return torch.from_numpy(values).to(self.grid.device), batch

    def ways(self) -> dict[str, Callable[[], tuple[Dataset, Iterable[Batch]]]]:
        """What is asked for data, and the mini-batches."""
        return {
            "device": lambda: (self.store, self.kept),
            "store": lambda: self._epoch(self.store),
            "device, int16": lambda: (self.store, self._decoded()),
            "store, epoch 0": lambda: self._epoch(self.opened("store"), drop),
            "direct, cold": lambda: self._epoch(self.direct, drop),
            "direct, warm": lambda: self._epoch(self.direct, warm),
        }

    def _decoded(self) -> Iterator[Batch]:
        """From the stored type, which is on the device."""
        data = self.store
        for values, (x, y) in self.blocks:
            local = data.decode(values)
            yield hs.Sharded.from_local(local, x.partition, self.grid), y

    def _epoch(
        self, data: Dataset, prepare: Callable[[list[Path]], None] | None = None
    ) -> tuple[Dataset, Iterable[Batch]]:
        if prepare is not None and self.grid.is_main:
            prepare(self.files)
        self.grid.barrier()
        return data, data.epoch(1)


def feed(folder: str, width: int, turns: int) -> dict[str, Any]:
    """Epochs of CosmoFlow fed in each way, in turn; on every rank.

    A turn is the device, the store and another way, for each of the others.

    Raises:
        AssertionError: the store, which holds every sample, has read from a file after epoch 0.
    """
    grid = hs.Grid(depth=dist.get_world_size())
    torch.manual_seed(0)
    training = Training(hs.models.CosmoFlow(width), grid)
    fed = Fed(folder, width, grid)
    ways = fed.ways()
    turn = [name for other in list(ways)[2:] for name in ("device", "store", other)]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for name in [*ways, *turn * turns]:  # the first ones also get their memory
        data, batches = ways[name]()
        row = training.timed(batches, data)
        if data not in (fed.store, fed.direct):
            data.close()
        if name == "store":
            assert row["program"] == 0, row
            assert row["system"] * len(fed.kept) < ASKING * grid.size, row
        found[name].append(row)
        row["ratio"] = row["seconds"] / found["device"][-1]["seconds"]
    fed.direct.close()
    fed.store.close()
    counts = (*COUNTS, "ratio")
    rows = {
        name: {count: summary([row[count] for row in of[1:]]) for count in counts}
        for name, of in found.items()
    }
    return {"box": fed.blocks[0][0].nbytes, "steps": len(fed.kept), "ways": rows}
