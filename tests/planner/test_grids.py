"""All grids of a number of ranks, and those that cannot be (tier: no process)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyperslab.planner.search import grids, refusal, words_of
from hyperslab.recipe.schema import GridSection
from tests.planner.small import small_job


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
