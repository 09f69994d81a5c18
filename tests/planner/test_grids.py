"""All grids of a number of ranks, and those that cannot be (tier: no process)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyperslab.errors import LayoutError
from hyperslab.planner.search import MOST_PLANNED, grids, host_memory, refusal, words_of
from hyperslab.recipe.schema import GridSection
from tests.planner.small import bounds, small_job


@pytest.mark.parametrize("ranks", [1, 2, 6, 16, 30])
def test_every_grid_once(ranks: int) -> None:
    found = [tuple(grid.model_dump().values()) for grid in grids(ranks)]
    every = [
        (a, b, c, ranks // (a * b * c))
        for a in range(1, ranks + 1)
        for b in range(1, ranks + 1)
        for c in range(1, ranks + 1)
        if ranks % (a * b * c) == 0
    ]
    assert sorted(found) == sorted(every)


def test_2048_ranks_have_364_grids() -> None:
    assert len(list(grids(2048))) == 364


def test_refusals_are_in_the_words_of_training(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    assert refusal(GridSection(data=4, depth=16), job) == ""
    words = refusal(GridSection(depth=17), job)
    assert words.startswith("cannot cut dim 2 (extent 16)")
    assert "use depth<=16" in words
    assert "a mini-batch of 4 is not cut over 5 replicas" in refusal(GridSection(data=5), job)


def test_what_a_rank_has(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    grid = GridSection(data=3, depth=3, width=2)
    assert job.box_extents(grid) == (6, 16, 8)
    assert job.samples_each(grid) == 2
    assert job.box_bytes(job.box_extents(grid)) == 6 * 16 * 8 * 4 * 2 + 4 * 8
    assert words_of(GridSection()) == "data=1"


def test_a_plan_of_whole_samples(tmp_path: Path) -> None:
    """4 samples on 3 replicas of 6 ranks: one rank of a replica reads a sample, by turns."""
    boxes = small_job(tmp_path, "data.budget=1GiB")
    job = small_job(tmp_path, "data.mode=sample", "data.budget=1GiB")
    grid = GridSection(data=3, depth=3, width=2)
    whole = 16**3 * 4 * 2 + 4 * 8
    box = job.box_bytes(job.box_extents(grid))
    assert (boxes.read_bytes(grid), job.read_bytes(grid)) == (2 * box, whole)
    assert job.read_bytes(GridSection(data=2)) == 2 * whole
    assert boxes.travelling(grid) == pytest.approx(2 / 3)
    # To five other ranks of its replica, or to six of another one; half of what a rank takes in.
    assert job.travelling(grid) == pytest.approx((1 / 3 * 5 + 2 / 3 * 6) / 2)
    kept, kept_whole = (host_memory(one, grid, bounds()) for one in (boxes, job))
    assert kept.store == -(-job.shown // 3) * box
    assert kept_whole.store == -(-job.shown // 18) * whole
    assert kept.ahead == 2 * 2 * box  # two mini-batches; that of the step is the network's input
    assert kept_whole.ahead - kept.ahead == whole + 2 * 5 * box


def test_of_more_ranks_than_any_machine_has_no_grids_are_listed() -> None:
    assert next(grids(MOST_PLANNED)).data == MOST_PLANNED
    with pytest.raises(LayoutError, match="more than any machine has"):
        next(grids(10**18))
