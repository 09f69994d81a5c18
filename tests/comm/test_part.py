"""Grids of a part of torch's ranks (tier: a few gloo ranks)."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hyperslab as hs
from hyperslab.comm.bootstrap import enter_part, make_group
from tests.ranks import close_pool, run_ranks
from tests.train.universes import write_universes


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1),
        nn.BatchNorm3d(4),
        nn.ReLU(),
        nn.Conv3d(4, 4, 3, stride=2, padding=1),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(4, 1),
    ).double()


def volume(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 1, 9, 7, 8, generator=generator, dtype=torch.float64)


def gradients(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    net(x).square().mean().backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def check_step(grid: hs.Grid, seed: int) -> None:
    """Two steps of gradients on the grid are the serial ones of that volume."""
    expected = gradients(network(), volume(seed))
    net = hs.parallelize(network(), grid)
    found = gradients(net, hs.shard(volume(seed), grid))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def halves(folder: str) -> None:
    """Each half of four ranks trains on volumes of its own, and one of them twice."""
    rank = dist.get_rank()
    mine = [0, 1] if rank < 2 else [2, 3]
    grid = hs.Grid(depth=2, ranks=mine)
    assert (grid.size, grid.rank, grid.is_main) == (2, rank % 2, rank % 2 == 0)
    check_step(grid, seed=rank // 2)
    if rank < 2:  # the others neither wait nor know
        check_step(hs.Grid(data=2, ranks=mine), seed=7)
    net = hs.parallelize(network(), grid)
    optim = torch.optim.Adam(net.parameters())
    hs.save(Path(folder) / str(rank // 2), net, optim)
    weights = [p.detach().clone() for p in net.parameters()]
    for parameter in net.parameters():
        parameter.data.zero_()
    hs.load(Path(folder) / str(rank // 2), net, optim)
    for parameter, before in zip(net.parameters(), weights, strict=True):
        assert torch.equal(parameter, before)


def test_two_parts_of_a_world_train_side_by_side(tmp_path: Path) -> None:
    run_ranks(4, halves, str(tmp_path))


def one_part() -> None:
    """Ranks 1 and 3 have a grid; 0 and 2 do something else, and then all have one."""
    if dist.get_rank() % 2:
        check_step(hs.Grid(width=2, ranks=[1, 3]), seed=1)
    elif dist.get_rank() == 0:
        check_step(hs.Grid(ranks=[0]), seed=2)
    check_step(hs.Grid(depth=2, height=2), seed=3)
    check_step(hs.Grid(data=2, depth=2), seed=4)


def test_ranks_without_a_grid_do_not_wait() -> None:
    run_ranks(4, one_part)


def part_of_a_bound_world() -> None:
    """Groups of a part are not split off a world that is bound to a device.

    NCCL splits a communicator only if all of its ranks take part, gloo never splits one: so this
    looks at what torch decides from, the world's device.
    """
    world, seen = dist.group.WORLD, []
    assert world is not None
    new_group = dist.new_group

    def spy(*args: Any, **kwargs: Any) -> dist.ProcessGroup:
        seen.append((world.bound_device_id, kwargs.pop("device_id")))
        return new_group(*args, **kwargs)

    if dist.get_rank() < 2:
        bound = torch.device("cuda:0")
        world.bound_device_id, dist.new_group = bound, spy
        try:
            enter_part([0, 1], 60)
            assert make_group([1, 0]).size() == 2
            assert world.bound_device_id == bound
        finally:
            world.bound_device_id, dist.new_group = None, new_group
        assert seen == [(None, bound)] * 2


def test_a_part_of_a_bound_world_does_not_wait_for_the_others() -> None:
    run_ranks(3, part_of_a_bound_world)


def parts_of_a_part() -> None:
    """A grid of four of six ranks makes groups for sums over its replicas."""
    if 1 <= dist.get_rank() <= 4:
        grid = hs.Grid(data=2, height=2, ranks=range(1, 5))
        check_step(grid, seed=5)
        group = grid.group(("height",))
        assert group is not None
        assert group.ranks == ((0, 1) if dist.get_rank() < 3 else (2, 3))
        total = group.sum_in_place(torch.tensor([float(grid.rank)]), "a test")
        assert total.item() == sum(group.ranks)
        net = hs.parallelize(network(), grid, batch_norm="replica")
        net(hs.shard(volume(0), grid)).sum().backward()


def test_a_part_has_groups_of_its_own() -> None:
    run_ranks(6, parts_of_a_part)


def meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("job", "depth"))
    grid = hs.Grid(mesh=mesh["depth"])
    assert grid.extents == {"data": 1, "depth": 2, "height": 1, "width": 1}
    check_step(grid, seed=dist.get_rank() // 2)
    grid = hs.Grid(mesh=mesh["depth"], width=2)
    assert grid.width == 2
    with pytest.raises(hs.LayoutError, match="does not say how volumes are cut"):
        hs.Grid(mesh=mesh)
    with pytest.raises(hs.LayoutError, match="not from both"):
        hs.Grid(mesh=mesh["depth"], ranks=[0, 1])
    del grid
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "height"))
    check_step(hs.Grid(mesh=whole), seed=6)
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("height", "data"))
    with pytest.raises(hs.LayoutError, match="another order than a grid"):
        hs.Grid(mesh=turned)
    flat = init_device_mesh("cpu", (4, 1), mesh_dim_names=("height", "data"))
    assert hs.Grid(mesh=flat).extents["height"] == 4
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    check_step(hs.Grid(mesh=other["data"]), seed=dist.get_rank() % 2)


def test_meshes_say_which_ranks_a_grid_has() -> None:
    run_ranks(4, meshes)


def refusals() -> None:
    rank = dist.get_rank()
    with pytest.raises(hs.LayoutError, match="has 3 places but there are 2 ranks") as caught:
        hs.Grid(depth=3, ranks=[0, 1])
    assert "ranks=range" not in str(caught.value), "there are no more than three"
    with pytest.raises(hs.LayoutError, match="ascending"):
        hs.Grid(depth=2, ranks=[1, 0])
    with pytest.raises(hs.LayoutError, match="ascending"):
        hs.Grid(depth=2, ranks=[1, 9])
    for wrong in (2, ["0", "1"], [0.0, 1.0]):
        with pytest.raises(hs.LayoutError, match=r"ranks=.*numbers of its ranks.*ranks=range\(2\)"):
            hs.Grid(depth=2, ranks=wrong)  # type: ignore[arg-type]
    with pytest.raises(hs.LayoutError, match=r"mesh=\(2, 2\) is no DeviceMesh"):
        hs.Grid(mesh=(2, 2))  # type: ignore[arg-type]
    with pytest.raises(hs.LayoutError, match="is not one of them"):
        hs.Grid(ranks=[(rank + 1) % 3])
    if rank < 2:
        grid = hs.Grid(depth=2, ranks=[0, 1])
        with pytest.raises(hs.LayoutError, match=r"has Grid.* of the ranks \[0, 1\]"):
            hs.Grid(ranks=[rank])
        assert grid.size == 2


def test_what_cannot_be_a_part_is_refused() -> None:
    run_ranks(3, refusals)


def alone_with_too_few_places(limit: float) -> str:
    sys.modules["hyperslab.comm.grid"].ASK_LIMIT = limit
    message = ""
    if dist.get_rank() == 0:
        try:
            hs.Grid(depth=1)
        except hs.LayoutError as error:
            message = str(error)
    else:
        time.sleep(3 * limit)
    return message


def test_a_grid_with_too_few_places_does_not_wait_for_ever() -> None:
    said = run_ranks(2, alone_with_too_few_places, 0.5)
    close_pool()  # its first rank still asks
    assert "has 1 places but there are 2 ranks" in said[0]
    assert "Grid(depth=2) cuts" in said[0]
    assert "ranks=range(1)" in said[0]


def read_by_halves(folder: str) -> list[float]:
    mine = [0, 1] if dist.get_rank() < 2 else [2, 3]
    grid = hs.Grid(data=2, ranks=mine)
    with hs.open(folder, grid, batch_size=2, split="all") as data:
        for epoch in range(2):  # the second comes from the stores of the two ranks
            sums = [float(x.full().double().sum()) for x, _ in data.epoch(epoch)]
    return sorted(sums)


def test_each_part_reads_all_of_its_data(tmp_path: Path) -> None:
    folder = write_universes(tmp_path / "universes", 4, width=8)
    of_ranks = run_ranks(4, read_by_halves, str(folder))
    assert all(sums == of_ranks[0] for sums in of_ranks)
    with hs.open(folder, hs.Grid(), batch_size=4, split="all") as data:
        whole = sum(float(x.full().double().sum()) for x, _ in data.epoch(0))
    assert sum(of_ranks[0]) == pytest.approx(whole)
