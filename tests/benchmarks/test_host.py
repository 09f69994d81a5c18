"""The step whose host time is taken: it computes what plain torch does (tier: one process)."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from host import EXTENTS, CornerGrid, step_of
from torch import nn

import hyperslab as hs

OPTIONS = argparse.Namespace(layers=2, channels=3, side=4)


def test_each_step_runs() -> None:
    for grid in (None, hs.Grid()):
        step_of(OPTIONS, grid)()


def test_a_corner_sends_what_its_neighbours_want() -> None:
    """Three faces, three edges and a corner travel to seven ranks, which answer nothing."""
    grid = CornerGrid()
    try:
        assert (grid.size, grid.rank, len(grid.halos.ranks)) == (8, 0, 8)
        statistics = grid.group(tuple(EXTENTS))
        assert statistics is not None
        assert statistics.ranks == tuple(range(8))
        step_of(OPTIONS, grid)()
        # What does not read the halo, which the fake group leaves as it is.
        conv = nn.Conv3d(3, 3, 3, padding=1)
        volume = torch.randn(1, 3, 8, 8, 8)
        block = volume[..., :4, :4, :4].contiguous()
        y = conv(hs.Sharded.from_local(block, grid.partition(volume.shape), grid))
        torch.testing.assert_close(y.local[..., :3, :3, :3], conv(volume)[..., :3, :3, :3])
    finally:
        dist.destroy_process_group()
