"""Convolutions pass by pass, and a step by category (tier: one process)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from categories import by_category
from passes import BlockGrid, CutConvolution, LayerPasses, convolutions, flops_of_pass
from torch import nn

import hyperslab as hs
from hyperslab.train.profile import LayerTime, Profile, StepTimes

GFLOPS = [7.248, 7.248, 3.624, 0.2265, 0.1132, 0.0283, 0.0283]
"""Of a forward pass at width 128, as counted by hand from table I of Oyama et al. 2020."""


def test_the_convolutions_are_those_of_the_table() -> None:
    found = convolutions(128, 1)
    counted = [flops_of_pass(cut, BlockGrid(1)) / 1e9 for cut in found]
    assert counted == pytest.approx(GFLOPS, rel=2e-3)


def test_a_block_has_its_share_until_the_maps_are_thin() -> None:
    found = convolutions(128, 8)
    counted = [flops_of_pass(cut, BlockGrid(8)) / 1e9 for cut in found]
    cut = [any(axis is not None for axis in c.partition.cuts) for c in found]
    assert cut[:4] == [True] * 4
    assert not cut[-1]
    expected = [whole / (8 if part else 1) for whole, part in zip(GFLOPS, cut, strict=True)]
    assert counted == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("stride", [1, 2])
def test_messages_come_back(stride: int) -> None:
    layer = nn.Conv3d(3, 5, 3, padding=1, stride=stride, bias=False)
    grid = BlockGrid(4)
    assert grid.coords["depth"] == 1
    partition = grid.partition((1, 3, 16, 6, 6))
    # Where a volume is the same at every depth, a rank's own planes are those of its neighbours.
    plane = torch.randn(1, 3, 1, 6, 6)
    block = plane.expand(1, 3, 4, 6, 6).contiguous()
    cut = hs.Sharded.from_local(block, partition, grid)
    y = F.conv3d(cut, layer.weight, None, layer.stride, layer.padding)
    serial = layer(plane.expand(1, 3, 16, 6, 6))
    expected = serial.chunk(4, dim=2)[1]
    assert isinstance(y, hs.Sharded)
    assert torch.allclose(y.local, expected, atol=1e-5)


@pytest.mark.parametrize("plain", [True, False])
def test_a_layer_is_timed_by_pass(plain: bool) -> None:
    grid = BlockGrid(4)
    for channels in (4, 8):
        layer = nn.Conv3d(channels, 8, 3, padding=1, bias=False)
        cut = CutConvolution("conv", layer, grid.partition((1, channels, 8, 6, 6)))
        times = LayerPasses(cut, grid, torch.float32, plain=plain).run()
        assert [seconds > 0 for seconds in times] == [True, True, channels > 4]


def test_categories_add_up_to_the_step() -> None:
    model = nn.Sequential(nn.Conv3d(1, 1, 1), nn.AvgPool3d(2), nn.Linear(1, 1))
    layers = [
        LayerTime(layer="0", stage="forward", compute=1.0),
        LayerTime(layer="0", stage="backward", compute=2.0),
        LayerTime(layer="1", stage="forward", compute=0.5),
        LayerTime(layer="2", stage="optimizer", compute=0.25),
        LayerTime(layer="", stage="backward", compute=0.125),
    ]
    rows = {"halos": 0.5, "statistics": 0.0, "gradients": 0.25}
    steps = [StepTimes(step=1, seconds=5.0, rows=rows, spans={})]
    found = by_category(Profile(layers=layers, steps=steps), model)
    assert found == {
        "convolutions": 3.0,
        "pooling": 0.5,
        "optimiser": 0.25,
        "other operators": 0.125,
        **rows,
        "framework": 0.375,
        "step": 5.0,
    }
