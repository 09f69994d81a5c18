"""Whether a failed run is started again, and on how many ranks (tier: no process)."""

from __future__ import annotations

import pytest

from hyperslab.errors import CommError, DataError, HyperslabError, RecipeError
from hyperslab.launch.failures import RankFailed, RankLost
from hyperslab.launch.restarts import RestartPolicy


class Run:
    """``newest`` is its newest checkpoint."""

    def __init__(self, left: int = 9, ranks: int = 4, *, shrinks: bool = True) -> None:
        self.newest: str | None = None
        self.restarts = RestartPolicy(left, ranks, shrinks, lambda: self.newest)

    def lose(self, rank: int) -> int:
        return self.restarts.after(RankLost(rank, "killed"))


@pytest.mark.parametrize("error", [DataError("bad"), RecipeError("bad"), HyperslabError("full")])
def test_what_would_come_again_ends_the_run(error: HyperslabError) -> None:
    with pytest.raises(type(error)) as caught:
        Run().restarts.after(error)
    assert caught.value is error


def test_only_so_often() -> None:
    run = Run(left=2)
    assert run.lose(1) == 4
    assert run.restarts.after(CommError("lost contact with another rank")) == 4
    with pytest.raises(RankLost):
        run.lose(2)


def test_a_rank_that_is_lost_twice_without_a_checkpoint_is_left_out() -> None:
    run = Run()
    assert run.lose(1) == 4
    assert run.lose(2) == 4  # another one
    assert run.lose(2) == 3
    assert run.lose(2) == 3  # that is another place now
    assert run.lose(2) == 2


def test_not_if_the_run_got_further() -> None:
    run = Run()
    for step in range(3):
        run.newest = f"step-{step}"
        assert run.lose(2) == 4


def test_not_on_a_grid_that_is_fixed_nor_the_last_one() -> None:
    fixed = Run(shrinks=False)
    assert [fixed.lose(1) for _ in range(3)] == [4, 4, 4]
    last = Run(ranks=1)
    assert [last.lose(0) for _ in range(3)] == [1, 1, 1]


def test_an_unknown_error_is_tried_once_more() -> None:
    run = Run()
    assert run.restarts.after(RankFailed(1, "KeyError")) == 4
    run.newest = "step-1"
    assert run.restarts.after(RankFailed(1, "KeyError")) == 4
    with pytest.raises(RankFailed):
        run.restarts.after(RankFailed(1, "KeyError"))
