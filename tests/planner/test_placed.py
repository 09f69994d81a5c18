"""The rank that decides, of a grid on a machine (tier: no process)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hyperslab.comm.placement import places
from hyperslab.planner.cost import step_cost
from hyperslab.planner.search import places_of, slowest_rank, trace_grid
from hyperslab.planner.trace import Workload, busiest, trace_step
from hyperslab.recipe.schema import GridSection
from tests.planner.small import small_job, v100

EVEN = (4, 4, 64, 64, 64)


@pytest.mark.parametrize(
    "extents",
    [{"depth": 2}, {"depth": 3}, {"data": 2, "height": 2, "width": 2}, {"depth": 4, "width": 4}],
)
def test_on_one_node_it_is_the_busiest(extents: Mapping[str, int]) -> None:
    wide = v100().model_copy(update={"ranks_per_node": 64, "ranks_per_socket": 64})
    assert slowest_rank(extents, EVEN, wide) == busiest(extents)


def test_it_has_neighbours_on_another_node() -> None:
    machine = v100()
    assert machine.ranks_per_node == 4
    assert slowest_rank({"depth": 8}, EVEN, machine) == 3
    assert slowest_rank({"data": 2, "depth": 6}, EVEN, machine) == 3
    # Height leads to other nodes from everywhere, width from the middle of eight.
    assert slowest_rank({"height": 4, "width": 8}, EVEN, machine) == 11


def test_its_block_is_as_large_as_that_of_the_busiest() -> None:
    assert slowest_rank({"depth": 8}, (4, 4, 67, 64, 64), v100()) in (1, 2)
    assert slowest_rank({"data": 3, "depth": 3}, EVEN, v100()) == 1  # it alone has two samples


def test_it_is_traced(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    (trace,) = trace_grid(job, GridSection(depth=8), v100())
    assert trace.rank == 3


def test_an_axis_of_large_faces_lies_inside_a_node(tmp_path: Path) -> None:
    """Depth 64 in four, height 512 in two: a node has all four, and each rank a peer outside."""
    shape = (4, 4, 64, 512, 64)
    grid = GridSection(depth=4, height=2)
    assert slowest_rank(grid.model_dump(), shape, v100()) == 2
    job = small_job(tmp_path)
    job = replace(job, about=replace(job.about, shape=shape[1:]))
    place = places_of(grid, job, v100())
    assert place is not None
    assert place.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    work = Workload(lambda: torch.nn.Conv3d(4, 3, 3, padding=1), shape)
    trace = trace_step(work, grid.model_dump(), 2)
    chosen = step_cost(trace, v100(), 8, place)
    in_order = step_cost(trace, v100(), 8)
    # A plane of depth has 256 x 64 voxels of this rank, one of height with halos 18 x 64.
    assert chosen.halo_bytes["network"] == 4 * 4 * 4 * 18 * 64
    assert chosen.halo_bytes["network"] < in_order.halo_bytes["network"]
    assert sum(chosen.halo_bytes.values()) == sum(in_order.halo_bytes.values())
    assert places_of(GridSection(depth=8), job, v100()) is None


def test_all_ranks_of_a_node_leave_it_where_its_box_is_flat() -> None:
    narrow = v100().model_copy(update={"node_bandwidth": 1e6})
    place = places({"depth": 4, "height": 2}, 4, (64, 512, 64))
    alone = narrow.message_seconds(0, "network")
    assert narrow.exchange_seconds({3: 10**6}, 2, place) == pytest.approx(alone + 4)
    boxes = places({"depth": 8, "height": 4}, 4)  # 2 x 2 positions each
    assert narrow.exchange_seconds({8: 10**6}, 4, boxes) == pytest.approx(alone + 2)
    assert narrow.exchange_seconds({1: 10**6}, 0, boxes) < 1
