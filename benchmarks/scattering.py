"""Step time against ranks, where each rank reads its box and where one reads for all of them.

From files that are in no cache, and from stores: of boxes, and of whole samples (figure 5 of Oyama
et al. 2020).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from clock import summary
from feeding import Training
from torch import nn
from volumes import drop

import hyperslab as hs
from hyperslab.data import StorePolicy


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
    """Epochs over a folder that is in no cache, all ways in turn; on every rank."""
    grid = hs.Grid(depth=dist.get_world_size())
    torch.manual_seed(0)
    training = Training(small(), grid)
    files = sorted(Path(folder).iterdir())
    policies = {
        "read": StorePolicy("direct"),
        "scattered": StorePolicy("sample", budget=0),  # nothing is kept
        "store": StorePolicy("store"),
        "sample": StorePolicy("sample"),
    }
    ways = {
        name: hs.open(folder, grid, batch_size=1, split="all", store=policy)
        for name, policy in policies.items()
    }
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
