"""What data sets draw on the ranks of a replica (tier: a few gloo ranks)."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hyperslab as hs
from tests.ranks import run_ranks

Draws = tuple[float, float, float]


def draw() -> Draws:
    return np.random.rand(), random.random(), torch.rand(()).item()  # noqa: NPY002


def drawn(alike: bool, states: str) -> Draws:
    """What each rank draws after `parallelize`, of ranks seeded alike or not."""
    grid = hs.Grid(data=2, depth=2)
    seed = 5 if alike else grid.rank
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
    hs.parallelize(nn.Linear(1, 1), grid, random_states=states)  # type: ignore[arg-type]
    return draw()


@pytest.mark.parametrize("alike", [True, False])
def test_equal_in_a_replica_and_different_between_them(alike: bool) -> None:
    first, second, third, fourth = run_ranks(4, drawn, alike, "replica")
    assert first == second
    assert third == fourth
    assert first[0] != third[0]
    assert first[1] != third[1]
    assert first[2] == third[2]  # dropout's does not depend on the grid
    assert third == run_ranks(4, drawn, alike, "replica")[2]


def test_the_first_replica_goes_on_as_rank_0() -> None:
    np_state, py_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        np.random.seed(5)  # noqa: NPY002
        random.seed(5)
        expected = np.random.rand(), random.random()  # noqa: NPY002
    finally:
        np.random.set_state(np_state)  # noqa: NPY002
        random.setstate(py_state)
    assert run_ranks(4, drawn, True, "replica")[0][:2] == expected


def test_states_of_their_own() -> None:
    found = run_ranks(4, drawn, False, "own")
    assert len({numbers[0] for numbers in found}) == 4
    assert len({numbers[1] for numbers in found}) == 4
    assert len({numbers[2] for numbers in found}) == 1


class Augmented(Dataset[torch.Tensor]):
    """Draws from all three, as many do."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([sum(draw())] * 8).view(1, 8) + index


def loaded(workers: int) -> list[float]:
    grid = hs.Grid(depth=2)
    np.random.seed(grid.rank)  # noqa: NPY002
    random.seed(grid.rank)
    torch.manual_seed(grid.rank)
    hs.parallelize(nn.Linear(1, 1), grid)
    found = []
    for x in DataLoader(Augmented(), 2, shuffle=True, num_workers=workers):
        found += hs.shard(x, grid).full()[:, 0, 0].tolist()  # which compares them
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_the_ranks_of_a_replica_the_same(workers: int) -> None:
    first, second = run_ranks(2, loaded, workers)
    assert first == second
    assert len(set(first)) == 4
