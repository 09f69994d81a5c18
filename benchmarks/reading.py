"""Reading samples, and nothing else: bytes against boxes, and speed against one plain read."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import torch.distributed as dist
from clock import slowest, summary
from volumes import disk_bytes, drop, warm

import hyperslab as hs
from hyperslab.data import Source, os_bytes_read
from hyperslab.data.assemble import Reader
from hyperslab.data.transforms import Log1p
from hyperslab.formats.source import Array
from hyperslab.formats.storage import replica_boxes
from hyperslab.geometry import Box

SAMPLES = 2
"""As many as there are ranks, so that sample-parallel reading keeps all of them busy."""

CUTS = ({"depth": 2}, {"height": 2}, {"width": 2}, {"depth": 2, "height": 2, "width": 2})


def read_bytes(folder: str, axes: dict[str, int]) -> dict[str, int]:
    """What this rank reads of a sample [B]: as the data set counts, as the system does; its box."""
    grid = hs.Grid(**axes)
    with hs.open(folder, grid, batch_size=1, split="all", transform=None, prefetch=0) as data:
        next(data.epoch(0))  # what is imported and looked up once does not count
        data.source.close()  # but that a file is opened does
        program = data.bytes_read
        system = os_bytes_read()
        x, _ = next(data.epoch(0))
        return {
            "program": data.bytes_read - program,
            "system": os_bytes_read() - system,
            "box": x.box.size * data.source.dtype.itemsize,
        }


class Ways:
    """The ways to get `SAMPLES` samples from files into the memory of the ranks."""

    def __init__(self, source: Source, grid: hs.Grid) -> None:
        self.source = source
        self.grid = grid
        self.files = [Path(source.where(sample)) for sample in range(SAMPLES)]
        self.reader = Reader(source, Log1p())
        self.group = dist.new_group(backend="gloo")
        size = max(file.stat().st_size for file in self.files)
        self.room = np.zeros(size if grid.is_main else 0, np.uint8)

    def box(self, axis: str = "depth") -> Box:
        return replica_boxes(self.source.shape, {axis: self.grid.size})[self.grid.rank]

    def plain(self) -> None:
        """One process reads the files from their first byte to their last."""
        view = memoryview(self.room)
        for path in self.files if self.grid.is_main else ():
            with path.open("rb", buffering=0) as file:
                at = 0
                while read := file.readinto(view[at : at + 2**23]):
                    at += read

    def library(self) -> None:
        """One process asks h5py for the whole volumes."""
        for path in self.files if self.grid.is_main else ():
            with h5py.File(path, "r", locking=False) as file:
                volume = file["full"]
                room = self.room[: volume.nbytes].view(volume.dtype)
                volume.read_direct(room.reshape(volume.shape))

    def boxes(self, axis: str) -> None:
        """Each rank reads its box of every sample."""
        box = self.box(axis)
        for sample in range(SAMPLES):
            self.source.read(sample, box)

    def ready(self) -> None:
        """The same, cut in depth, checked and with its channels first: what the store keeps."""
        box = self.box()
        for sample in range(SAMPLES):
            np.ascontiguousarray(self.reader.values(sample, box))

    def scattered(self) -> None:
        """Each rank reads whole samples and sends the others their boxes, cut in depth.

        Distribution scheme: of every ``size`` samples, 1. each rank reads one; 2. it sends each
        other rank that one's box; 3. it receives its own boxes of the others' samples.
        """
        rank = self.grid.rank
        size = self.grid.size
        places = replica_boxes(self.source.shape, {"depth": size})
        for first in range(0, SAMPLES, size):
            whole = self.source.read(first + rank, Box.whole(self.source.shape))
            work = []
            for peer in (peer for peer in range(size) if peer != rank):
                part = _flat(whole[places[peer].slices()])
                mine = torch.empty(
                    places[rank].size * self.source.dtype.itemsize, dtype=torch.uint8
                )
                work += [
                    dist.isend(part, peer, group=self.group),
                    dist.irecv(mine, peer, group=self.group),
                ]
            for each in work:
                each.wait()


def _flat(part: Array) -> torch.Tensor:
    """The bytes of a box in the order of a file with channels last: no copy of whole planes."""
    stored = np.ascontiguousarray(np.moveaxis(part, 0, -1))
    return torch.from_numpy(stored.reshape(-1).view(np.uint8))


def speeds(folder: str, turns: int) -> dict[str, Any]:
    """Every way in turn, with an empty and with a full page cache; on every rank."""
    grid = hs.Grid(depth=dist.get_world_size())
    with hs.open(folder, grid, batch_size=1, split="all") as data:
        ways = Ways(data.source, grid)
        named: dict[str, Callable[[], None]] = {
            "plain": ways.plain,
            "library": ways.library,
            "depth": lambda: ways.boxes("depth"),
            "height": lambda: ways.boxes("height"),
            "width": lambda: ways.boxes("width"),
            "ready": ways.ready,
            "scattered": ways.scattered,
        }
        size = sum(path.stat().st_size for path in ways.files)
        results: dict[str, Any] = {"bytes": size}
        for cache, prepare in (("cold", drop), ("warm", warm)):
            rows = [_turn(named, prepare, ways.files, grid) for _ in range(1 + turns)]
            results[cache] = _report(rows[1:], size)  # the first one also gets its memory
        return results


def _turn(
    ways: dict[str, Callable[[], None]],
    prepare: Callable[[list[Path]], None],
    files: list[Path],
    grid: hs.Grid,
) -> dict[str, list[float]]:
    """Seconds of the slowest rank, and bytes from the disk over all ranks, of each way."""
    found = {}
    for name, way in ways.items():
        if grid.is_main:
            prepare(files)
        grid.barrier()
        disk = disk_bytes()
        begin = time.perf_counter()
        way()
        seconds = time.perf_counter() - begin
        fetched = torch.tensor(float(disk_bytes() - disk), device=grid.device)
        dist.all_reduce(fetched)
        found[name] = [*slowest([seconds], grid.device), fetched.item()]
    return found


def _report(turns: list[dict[str, list[float]]], size: int) -> dict[str, Any]:
    """Bytes per second of each way, its ratio to the plain read of its turn, share from disk."""
    return {
        name: {
            "speed": summary([size / turn[name][0] for turn in turns]),
            "ratio": summary([turn["plain"][0] / turn[name][0] for turn in turns]),
            "disk": summary([turn[name][1] / size for turn in turns]),
        }
        for name in turns[0]
    }
