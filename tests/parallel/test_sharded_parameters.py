"""FSDP2 is refused, and ZeroRedundancyOptimizer is exact (tier: four gloo ranks)."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import hyperslab as hs
from tests.ranks import run_ranks


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(1)),
        *(nn.Flatten(), nn.Linear(4, 1)),
    ).double()


def mini_batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    x = torch.randn(4, 1, 8, 8, 8, generator=random, dtype=torch.float64)
    return x, torch.randn(4, 1, generator=random, dtype=torch.float64)


def over_data(grid: hs.Grid) -> DeviceMesh:
    """The replicas that have the same box."""
    ranks = torch.arange(4).view(grid.data, grid.depth)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("data", "depth"))["data"]


def shard_first() -> str:
    grid = hs.Grid(data=2, depth=2)
    model = fully_shard(network(), mesh=over_data(grid))
    with pytest.raises(hs.LayoutError) as caught:
        hs.parallelize(model, grid)
    return str(caught.value)


def shard_afterwards() -> str:
    grid = hs.Grid(data=2, depth=2)
    model = fully_shard(hs.parallelize(network(), grid), mesh=over_data(grid))
    with pytest.raises(hs.LayoutError) as caught:
        model(hs.shard(mini_batch(0)[0], grid))
    return str(caught.value)


@pytest.mark.parametrize("order", [shard_first, shard_afterwards])
def test_sharded_parameters_are_one_clear_error(order: Callable[[], str]) -> None:
    for words in run_ranks(4, order):
        assert words.startswith("the parameters of FSDPSequential are sharded (fully_shard, or ")
        assert "use torch.distributed.optim.ZeroRedundancyOptimizer" in words


def train_with_sharded_optimizer() -> tuple[dict[str, Tensor], list[int]]:
    """The weights after three steps, and how many parameters the state of each kept."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch.jit.script

    grid = hs.Grid(data=2, depth=2)
    model = hs.parallelize(network(), grid)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    for step in range(3):
        x, y = mini_batch(step)
        loss = nn.functional.mse_loss(model(hs.shard(x, grid)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    kept = [len(optimizer.optim.state)]
    return copy.deepcopy(model.state_dict()), kept


@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")
def test_the_optimizers_state_is_sharded_and_its_steps_are_the_serial_ones() -> None:
    serial = network()
    optimizer = torch.optim.Adam(serial.parameters(), lr=0.1)
    for step in range(3):
        x, y = mini_batch(step)
        loss = nn.functional.mse_loss(serial(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = run_ranks(4, train_with_sharded_optimizer)
    for weights, _ in found:
        torch.testing.assert_close(weights, serial.state_dict(), rtol=1e-10, atol=1e-12)
    assert sorted(kept for _, (kept,) in found) == [1, 1, 1, 1]  # of four parameters
