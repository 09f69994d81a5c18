"""Samplers by replica (tier: no process; a few gloo ranks)."""

from __future__ import annotations

import pytest
from torch.utils.data.distributed import DistributedSampler

import hyperslab as hs
from hyperslab.planner.trace import VirtualGrid
from tests.ranks import run_ranks


def sampler(replica: int, count: int = 12, drop_last: bool = False) -> DistributedSampler[int]:
    grid = VirtualGrid({"data": 3}, replica)
    return grid.sampler(range(count), shuffle=True, seed=5, drop_last=drop_last)


def test_every_sample_once_in_another_order_each_epoch() -> None:
    orders = []
    for epoch in range(2):
        parts = []
        for replica in range(3):
            part = sampler(replica)
            part.set_epoch(epoch)
            parts.append(list(part))
        together = [sample for step in zip(*parts, strict=True) for sample in step]
        assert sorted(together) == list(range(12))
        serial = DistributedSampler(range(12), 1, 0, seed=5)  # type: ignore[arg-type]
        serial.set_epoch(epoch)
        assert together == list(serial)
        orders.append(together)
    assert orders[0] != orders[1]


def test_what_is_left_over_is_refused_or_left_out() -> None:
    with pytest.raises(hs.LayoutError, match=r"13 samples cannot be dealt out evenly to 3 .* 1 w"):
        sampler(0, 13)
    parts = [list(sampler(replica, 13, drop_last=True)) for replica in range(3)]
    assert [len(part) for part in parts] == [4, 4, 4]
    assert len({sample for part in parts for sample in part}) == 12
    with pytest.raises(hs.LayoutError, match=r"2 samples are fewer than 3 replicas"):
        sampler(0, 2, drop_last=True)


def orders(different: bool) -> list[int]:
    grid = hs.Grid(data=2, depth=2)
    return list(grid.sampler(range(8), shuffle=True, seed=grid.rank if different else 0))


def test_the_ranks_of_a_replica_have_the_same_samples() -> None:
    first, second, third, fourth = run_ranks(4, orders, False)
    assert first == second != third == fourth
    assert sorted(first + third) == list(range(8))


def test_ranks_that_ask_for_different_samplers_are_told() -> None:
    with pytest.raises(hs.LayoutError, match=r"the ranks ask for different samplers"):
        run_ranks(4, orders, True)
