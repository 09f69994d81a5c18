"""A rank's error is what all report, and not that they lost it (tier: a few gloo ranks)."""

from __future__ import annotations

import os

import pytest

import hyperslab as hs
from hyperslab.comm.agreement import failure_broadcast
from tests.ranks import RankError, run_ranks


def failing(victim: int, kind: str) -> str:
    grid = hs.Grid(depth=3)
    error: Exception = hs.CommError(f"rank {grid.rank} lost contact with another rank")
    if grid.rank == victim:
        error = hs.DataError("a.hdf5: NaN") if kind == "ours" else KeyError("Box")
    with pytest.raises(type(error)) as caught, failure_broadcast():
        raise error
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(("kind", "words"), [("ours", "a.hdf5: NaN"), ("other", "KeyError: 'Box'")])
def test_the_others_say_what_it_said(victim: int, kind: str, words: str) -> None:
    found = run_ranks(3, failing, victim, kind)
    own = {"ours": "DataError: a.hdf5: NaN", "other": "KeyError: 'Box'"}[kind]
    for rank, said in enumerate(found):
        assert said == (own if rank == victim else f"CommError: rank {victim} says: {words}")


def nobody_speaks() -> str:
    """After words of an earlier failure in the same process group."""
    grid = hs.Grid(depth=2)
    with pytest.raises(hs.DataError), failure_broadcast():
        raise hs.DataError("of before")
    grid.barrier()
    with pytest.raises(hs.CommError) as caught, failure_broadcast():
        raise hs.CommError("lost contact")
    return str(caught.value)


def test_words_are_of_this_failure() -> None:
    assert run_ranks(2, nobody_speaks) == ["lost contact"] * 2


def test_without_ranks_nothing_happens() -> None:
    with pytest.raises(hs.CommError, match=r"^alone$"), failure_broadcast():
        raise hs.CommError("alone")


def some_are_lost() -> str:
    grid = hs.Grid(depth=4)
    words = f"rank {grid.rank} lost contact with another rank during a sum"
    with pytest.MonkeyPatch.context() as patch:
        if grid.rank in (1, 3):  # their cable was cut: they reach no store
            patch.setattr("hyperslab.comm.agreement.ask_store", lambda _: None)
        with pytest.raises(hs.CommError) as caught, failure_broadcast():
            raise hs.CommError(words)
    return str(caught.value).removeprefix(words)


def test_who_says_nothing_is_named() -> None:
    nothing = "\n    nothing was heard from ranks 1 and 3"
    assert run_ranks(4, some_are_lost) == [nothing, "", nothing, ""]


def dies() -> None:
    grid = hs.Grid(depth=2)
    with failure_broadcast():
        if grid.rank == 1:
            os._exit(7)
        raise hs.CommError("rank 0 lost contact with rank 1")


def test_a_rank_that_says_nothing_is_lost() -> None:
    with pytest.raises(RankError, match="CommError: rank 0 lost contact with rank 1"):
        run_ranks(2, dies)
