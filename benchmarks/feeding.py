"""Training that is fed from files, from the store, or from the memory of the device, in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
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
from hyperslab.data.decode import decode
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
        def opened(mode: str) -> Dataset:
            return hs.open(
                folder, grid, batch_size=1, split="all", subvolume=width, mode=mode, shuffle=True
            )

        self.grid, self.direct, self.store = grid, opened("direct"), opened("store")
        self.files = sorted(Path(folder).iterdir())
        self.epochs = 0
        self.kept = list(self.store.epoch(0))  # decoded; and the store is filled
        self.blocks = [self._stored(sample) for sample in self.store.schedule.order(0)]

    def _stored(self, sample: int) -> tuple[torch.Tensor, Batch]:
        """This rank's box as it is stored, on the device; what it becomes."""
        x, y = self.kept[self.store.schedule.order(0).index(sample)]
        box = Box(x.box.lo[1:], x.box.hi[1:])
        values = np.ascontiguousarray(self.store.source.read(sample, box))[None]
        return torch.from_numpy(values).to(self.grid.device), (x, y)

    def ways(self) -> dict[str, Callable[[], Iterable[Batch]]]:
        return {
            "device": lambda: self.kept,
            "decoded": self._decoded,
            "store": partial(self._epoch, self.store),
            "direct, warm": partial(self._epoch, self.direct, warm),
            "direct, cold": partial(self._epoch, self.direct, drop),
        }

    def _decoded(self) -> Iterator[Batch]:
        """From the stored type, which is on the device."""
        data = self.store
        for values, (x, y) in self.blocks:
            local = decode(values, data.shape, self.grid, data.transform, data.dtype)
            yield hs.Sharded.from_local(local, x.partition, self.grid), y

    def _epoch(
        self, data: Dataset, prepare: Callable[[list[Path]], None] | None = None
    ) -> Iterable[Batch]:
        self.epochs += 1
        if prepare is not None and self.grid.is_main:
            prepare(self.files)
        self.grid.barrier()
        return data.epoch(self.epochs)


def feed(folder: str, width: int, turns: int) -> dict[str, Any]:
    """Epochs of CosmoFlow fed in each way, in turn; on every rank.

    Raises:
        AssertionError: the store, which holds every sample, has read from a file after epoch 0.
    """
    grid = hs.Grid(depth=dist.get_world_size())
    torch.manual_seed(0)
    training, fed = Training(hs.models.CosmoFlow(width), grid), Fed(folder, width, grid)
    rows = []
    for _ in range(1 + turns):
        row = {}
        for name, way in fed.ways().items():
            data = fed.direct if name.startswith("direct") else fed.store
            row[name] = training.timed(way(), data)
        assert row["store"]["program"] == 0, row["store"]
        assert row["store"]["system"] * len(fed.kept) < ASKING * grid.size, row["store"]
        rows.append(row)
    fed.direct.close()
    fed.store.close()
    return {"box": fed.blocks[0][0].nbytes, "steps": len(fed.kept), "ways": _report(rows[1:])}


def _report(turns: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """What is counted of each way, and its ratio to data on the device in the same turn."""
    result = {}
    for name in turns[0]:
        counts = {count: summary([turn[name][count] for turn in turns]) for count in COUNTS}
        ratios = [turn[name]["seconds"] / turn["device"]["seconds"] for turn in turns]
        result[name] = {**counts, "ratio": summary(ratios)}
    return result
