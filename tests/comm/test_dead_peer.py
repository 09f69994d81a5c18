"""A rank that dies in the middle of a step: the others say whom they lost (tier: a few gloo
ranks).
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from tests.ranks import RankError, run_ranks
from tests.selection import by_rotation


def die_in(operation: str, victim: int) -> None:
    """One rank leaves without a word when the others begin the operation."""
    grid = hs.Grid(depth=3)
    x = hs.shard(torch.randn(2, 2, 9, 4, 4, requires_grad=True), grid)
    weight = torch.randn(2, 2, 3, 3, 3, requires_grad=True)
    mean, var = torch.zeros(2), torch.ones(2)
    y = F.conv3d(x, weight, padding=1).sum() if operation == "backward" else None
    grid.barrier()
    if grid.rank == victim:
        os._exit(7)
    if operation == "conv":
        F.conv3d(x, weight, padding=1)
    elif operation == "buffer conv":
        F.conv3d(x, torch.randn(2, 2, 4, 1, 1), stride=2)
    elif operation == "backward":
        assert y is not None
        y.backward()
    elif operation == "full":
        x.full()
    elif operation == "batch_norm":
        F.batch_norm(x, mean, var, training=True)
    elif operation == "sum":
        x.sum()


EXCHANGES = {
    "conv": r"the halo exchange of conv3d \(2, 2, 3, 3, 3\)",
    "buffer conv": r"the halo exchange of conv3d \(2, 2, 4, 1, 1\)",
    "full": r"full\(\)",
}


@pytest.mark.parametrize(("operation", "victim"), by_rotation(EXCHANGES, [0, 1]))
def test_an_exchange_names_the_dead_rank(operation: str, victim: int) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(3, die_in, operation, victim)
    assert f"rank {victim}: died with exit code 7" in str(caught.value)
    said = rf"CommError: rank {1 - victim} lost contact with rank [\d, ]*{victim}[\d, ]* during "
    caught.match(said + EXCHANGES[operation])


@pytest.mark.parametrize(
    ("operation", "what"),
    [
        ("backward", ""),
        ("batch_norm", "the statistics of"),
        ("sum", "sum"),
    ],
)
def test_a_sum_names_its_ranks(operation: str, what: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(3, die_in, operation, 2)
    assert "rank 2: died with exit code 7" in str(caught.value)
    for survivor in (0, 1):
        caught.match(rf"CommError: rank {survivor} lost contact with .* during .*{what}")


def fail_on_one() -> None:
    grid = hs.Grid(width=2)
    if grid.rank == 1:
        raise KeyError("an error of the user's")
    hs.shard(torch.randn(1, 1, 6), grid, check=False).full()


def test_an_error_on_one_rank_ends_the_others_too() -> None:
    with pytest.raises(KeyError, match="an error of the user's") as caught:
        run_ranks(2, fail_on_one)
    assert "CommError: rank 0 lost contact with rank 1 during full()" in caught.value.__notes__[0]
