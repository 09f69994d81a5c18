"""What comes in: tensors that are cut or scattered, one of them wrong on one rank or none; and data
sets' transports that start after ranks have made process groups of their own.
"""

from __future__ import annotations

import itertools
import pickle
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import hyperslab as hs
from hyperslab.comm.host_p2p import HostP2P
from tests.ranks import _Pool
from tests.soak.campaign import Campaign, Settings, must

FAULTS = ("voxels", "bit", "shape", "type", "nothing")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.uint8)
LIMIT = 60.0  # [s] of a case, on a machine that does other things, too


@dataclass(frozen=True)
class Case:
    """All that happens in it; ``fault``: on which rank, and what."""

    seed: int
    axes: dict[str, int]
    shape: tuple[int, ...]
    dtype: torch.dtype
    last: bool  # channels last
    replica: bool
    src: int
    fault: tuple[int, str] | None
    groups: tuple[int, ...]  # process groups that each rank makes for itself

    @classmethod
    def draw(cls, rng: random.Random, ranks: int) -> Case:
        names = ("data", "depth", "height", "width")
        grids = [
            dict(zip(names, extents, strict=True))
            for extents in itertools.product(*[range(1, ranks + 1)] * 4)
            if np.prod(extents) == ranks
        ]
        axes = rng.choice(grids)
        replica = rng.random() < 0.3
        inside = ranks // axes["data"]
        batch = rng.randint(1, 3) if replica else rng.randint(axes["data"], axes["data"] + 3)
        space = [axes[name] + rng.randint(0, 6) for name in names[1:]]
        fault = None
        if rng.random() < 0.6:
            fault = (rng.randrange(ranks), rng.choice(FAULTS))
        return cls(
            seed=rng.randrange(1 << 30),
            axes=axes,
            shape=(batch, rng.randint(1, 3), *space),
            dtype=rng.choice(DTYPES),
            last=rng.random() < 0.3,
            replica=replica,
            src=rng.randrange(inside if replica else ranks),
            fault=fault,
            groups=tuple(rng.choice((0, 0, 1, 2)) for _ in range(ranks)),
        )

    def __str__(self) -> str:
        grid = "x".join(map(str, self.axes.values()))
        part = " of a replica" if self.replica else ""
        return f"{grid} {self.shape} {self.dtype}{part}, {self.fault or 'right'}, {self.groups}"


class Inputs(Campaign):
    """Refused on every rank where ranks that share a sample differ, and exact where they do not."""

    weight = 0.3

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.pool = _Pool()
        self.faults: Counter[str] = Counter()

    def play(self, number: int) -> str:
        case = Case.draw(self.rng(number), self.settings.ranks)
        begin = time.monotonic()
        outcomes = self.pool.run(self.settings.ranks, pickle.dumps((take, (case,))), LIMIT)
        reports = "\n".join(f"{o.kind} {o.report}" for o in outcomes if o.kind != "returned")
        must(not reports, f"{case}\n{reports}")
        told = [pickle.loads(o.value) for o in outcomes]
        shared = told[0][1]
        must(all(refused == shared for refused, _ in told), f"{case}: refused by {told}")
        self.faults[case.fault[1] if case.fault else "none"] += 1
        end = "refused" if shared else "taken"
        return f"{case}: {end}; {time.monotonic() - begin:.1f} s"

    def summary(self) -> dict[str, Any]:
        return {"faults": dict(self.faults)}

    def close(self) -> None:
        self.pool.close()


def take(case: Case) -> tuple[bool, bool]:
    """Whether this rank refused the case's tensor, and whether it had to."""
    grid = hs.Grid(**case.axes)
    for _ in range(case.groups[grid.rank]):
        dist.new_group([grid.rank])
    transport = HostP2P(grid)
    if transport.gather(grid.rank) != list(range(grid.size)):
        raise AssertionError("the transport connects other ranks")
    batch: Any = "replica" if case.replica else "global"
    whole = tensor(case, grid.coords["data"] if case.replica else 0)
    scattered(case, grid, whole, batch)
    wrong = case.fault is not None and seen(case, grid)
    mine = spoilt(case, whole) if case.fault and case.fault[0] == grid.rank else whole
    try:
        x = hs.shard(mine, grid, batch=batch)
    except hs.LayoutError:
        return True, wrong
    if case.fault is None and not torch.equal(x.local, block(case, grid, whole, x)):
        raise AssertionError("another block")
    return False, wrong


def scattered(case: Case, grid: hs.Grid, whole: torch.Tensor, batch: Any) -> None:
    inside = grid.size // grid.data
    number = grid.rank % inside if case.replica else grid.rank
    x = hs.scatter(whole if number == case.src else None, grid, src=case.src, batch=batch)
    if not torch.equal(x.local, block(case, grid, whole, x)):
        raise AssertionError("another block was scattered")


def block(case: Case, grid: hs.Grid, whole: torch.Tensor, x: hs.Sharded) -> torch.Tensor:
    lo, hi = x.box.lo, x.box.hi
    first = grid.coords["data"] * case.shape[0] if case.replica else 0
    slices = [slice(lo[0] - first, hi[0] - first), *map(slice, lo[1:], hi[1:])]
    return whole[tuple(slices)]


def tensor(case: Case, replica: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.seed + replica)
    x = torch.randint(0, 100, case.shape, generator=generator).to(case.dtype)
    return x.contiguous(memory_format=torch.channels_last_3d) if case.last else x


def spoilt(case: Case, x: torch.Tensor) -> Any:
    """In the first sample that the rank computes, which is where `seen` looks."""
    assert case.fault is not None
    rank, fault = case.fault
    if fault == "nothing":
        return None
    if fault == "shape":
        return x[..., :-1] if x.shape[-1] > 1 else torch.cat([x, x], -1)
    if fault == "type":
        return x.to(torch.int32)
    x = x.clone(memory_format=torch.preserve_format)
    rng = random.Random(case.seed + rank)
    sample = first_sample(case, rank)
    at = (sample, *(rng.randrange(extent) for extent in case.shape[1:]))
    bits = x.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    )
    if fault == "bit":
        bits[at] ^= 1 << rng.randrange(7)
    else:
        other = (sample, *(rng.randrange(extent) for extent in case.shape[1:]))
        bits[at], bits[other] = bits[other].clone(), bits[at].clone()
        if torch.equal(bits[at], bits[other]):
            bits[at] ^= 1  # they held the same
    return x


def first_sample(case: Case, rank: int) -> int:
    """Of the tensor that the rank hands in."""
    data = case.axes["data"]
    count = case.shape[0]
    if case.replica or count < data:
        return 0
    place = rank // (int(np.prod(list(case.axes.values()))) // data)
    small, larger = divmod(count, data)
    return place * small + min(place, larger)


def seen(case: Case, grid: hs.Grid) -> bool:
    """Forms are compared among all ranks, values among those of a replica."""
    assert case.fault is not None
    return case.fault[1] in ("shape", "type", "nothing") or grid.size > grid.data
