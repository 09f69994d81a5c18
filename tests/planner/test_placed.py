"""The rank that decides, of a grid on a machine (tier: no process)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from hyperslab.planner.search import slowest_rank, trace_grid
from hyperslab.planner.trace import busiest
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
