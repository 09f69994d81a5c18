"""Files of hyperslab that one has to open to follow a thing (tier: two gloo ranks).

A profiler hook notes the file of every function that is called, on two ranks, after a first run
that plans and imports. The budgets hold back what no limit on a file's length does: one idea that
is spread over many files.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.geometry import Box
from tests.ranks import run_ranks

SOURCE = Path(hs.__file__).parent

BUDGETS = {
    "convolution": 28,
    "max pooling": 18,
    "step": 45,
    "mini-batch": 14,
    "box": 9,
    "open": 20,
}


def files_entered(run: Callable[[], object]) -> list[str]:
    """Names the modules of hyperslab whose functions run, in this thread and in those it starts."""
    names: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            names.add(frame.f_code.co_filename)

    gc.collect()  # what ends with grids of before is not of this run
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return sorted(Path(name).relative_to(SOURCE).as_posix() for name in names)


def network() -> nn.Module:
    """Six layers as in every CNN: convolution, norm, activation, pooling, and dense at the end."""
    return nn.Sequential(
        nn.Conv3d(2, 8, 3, padding=1),
        nn.BatchNorm3d(8),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Flatten(),
        nn.Linear(8 * 6**3, 3),
    )


def compute(what: str) -> list[str]:
    grid = hs.Grid(depth=2)
    x = hs.shard(torch.randn(1, 2, 12, 12, 12), grid).requires_grad_()
    weight = nn.Parameter(torch.randn(8, 2, 3, 3, 3))
    step = hs.parallelize(network(), grid) if what == "step" else None

    def run() -> None:
        if step is not None:
            step(x).sum().backward()
        elif what == "convolution":
            F.conv3d(x, weight, padding=1).local.sum().backward()
        else:
            F.max_pool3d(x, 2).local.sum().backward()

    for _ in range(2):
        run()
    return files_entered(run)


@pytest.mark.parametrize("what", ["convolution", "max pooling", "step"])
def test_computing(what: str) -> None:
    for files in run_ranks(2, compute, what):
        assert len(files) <= BUDGETS[what], "\n".join(files)


def write(folder: Path) -> None:
    generator = np.random.default_rng(0)
    for number in range(4):
        with h5py.File(folder / f"univ_ics_2019-03_a{number}.hdf5", "w") as file:
            file["full"] = generator.poisson(1.0, (12, 12, 12, 4)).astype(np.int16)
            file["unitPar"] = generator.uniform(-1, 1, 4).astype(np.float32)


def read(what: str, folder: Path) -> list[str]:
    grid = hs.Grid(depth=2)
    with hs.open(folder, grid, batch_size=1, mode="direct", prefetch=0) as data:
        for _ in data.epoch(0):
            pass
        if what == "open":
            return files_entered(lambda: hs.open(folder, grid, batch_size=1).close())
        if what == "box":
            return files_entered(lambda: data.source.read(0, Box((0, 0, 0, 0), (4, 6, 12, 12))))
        batches = iter(data.epoch(1))
        next(batches)
        return files_entered(lambda: next(batches))


@pytest.mark.parametrize("what", ["mini-batch", "box", "open"])
def test_reading(what: str, tmp_path: Path) -> None:
    write(tmp_path)
    for files in run_ranks(2, read, what, tmp_path):
        assert len(files) <= BUDGETS[what], "\n".join(files)
