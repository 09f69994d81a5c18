"""What ranks agree on, and errors on one of them (tiers: one process; a few gloo ranks)."""

from __future__ import annotations

import os
from typing import Any

import pytest

import hyperslab as hs
from hyperslab.comm.agreement import (
    all_gather,
    any_rank,
    broadcast_from_main,
    collective_try,
    same_on_all,
)
from hyperslab.errors import CheckpointError, CommError, HyperslabError
from tests.ranks import RankError, run_ranks

Outcome = tuple[str, str]


class Stubborn(Exception):
    """An error that pickle can write and not read again."""

    def __init__(self, number: int, words: str) -> None:
        super().__init__(words)


ERRORS: dict[str, Exception] = {
    "ours": CheckpointError("the disk is full"),
    "system": FileNotFoundError(2, "No such file or directory", "a.hdf5"),
    "other": KeyError("Box"),
    "stubborn": Stubborn(3, "it is what it is"),
}


def attempt(how: str, failing: tuple[int, ...], kind: str, words: dict[str, Any]) -> Outcome:
    """The class and the words of the error on this rank, or what it got."""
    grid = hs.Grid(data=3)

    def make() -> str:
        if grid.rank in failing:
            raise ERRORS[kind]
        return f"of rank {grid.rank}"

    try:
        return "", {"main": broadcast_from_main, "all": collective_try}[how](make, **words)
    except Exception as error:
        assert all_gather(grid.rank) == [0, 1, 2], "all ranks go on together"
        return type(error).__name__, str(error)


def test_all_ranks_have_what_the_main_rank_decides() -> None:
    assert run_ranks(3, attempt, "main", (1, 2), "ours", {}) == [("", "of rank 0")] * 3


@pytest.mark.parametrize(
    ("kind", "words", "expected"),
    [
        ("ours", {}, ("CheckpointError", "the disk is full")),
        ("other", {}, ("KeyError", "'Box'")),
        ("ours", {"failing": "no use"}, ("CheckpointError", "the disk is full")),
        ("other", {"failing": "bad", "error": hs.DataError}, ("DataError", "bad: KeyError: 'Box'")),
        (
            "system",
            {"failing": "cannot read"},
            ("DataError", "cannot read: No such file or directory: a.hdf5"),
        ),
    ],
)
def test_all_ranks_have_the_main_ranks_error(
    kind: str, words: dict[str, Any], expected: Outcome
) -> None:
    assert run_ranks(3, attempt, "main", (0,), kind, words) == [expected] * 3


def test_an_error_that_cannot_travel_sends_its_words() -> None:
    words = ("HyperslabError", "Stubborn: it is what it is")
    assert run_ranks(3, attempt, "main", (0,), "stubborn", {}) == [words] * 3
    first, second, third = run_ranks(3, attempt, "all", (1,), "stubborn", {})
    assert second == ("Stubborn", "it is what it is")
    assert first == third == ("HyperslabError", "rank 1 says: " + words[1])


def test_each_rank_has_its_own_if_all_succeed() -> None:
    assert run_ranks(3, attempt, "all", (), "ours", {}) == [("", f"of rank {r}") for r in range(3)]


@pytest.mark.parametrize("failing", [(1,), (0, 2), (0, 1, 2)])
def test_an_error_on_one_rank_is_an_error_on_all(failing: tuple[int, ...]) -> None:
    for rank, found in enumerate(run_ranks(3, attempt, "all", failing, "ours", {})):
        says = "" if rank in failing else f"rank {failing[0]} says: "
        assert found == ("CheckpointError", f"{says}the disk is full")


def test_an_error_of_another_library_is_put_in_words() -> None:
    words = {"failing": "x.npy: cannot be read", "error": hs.DataError}
    first, second, third = run_ranks(3, attempt, "all", (1,), "other", words)
    assert second == ("DataError", "x.npy: cannot be read: KeyError: 'Box'")
    assert first == third == ("DataError", f"rank 1 says: {second[1]}")


def numbers() -> list[object]:
    grid = hs.Grid(depth=3)
    return [
        all_gather(10 * grid.rank),
        any_rank(False),
        any_rank(grid.rank == 2),
        any_rank(True),
        same_on_all(2**33),
        same_on_all(grid.rank == 1),
    ]


def test_flags_and_numbers() -> None:
    assert run_ranks(3, numbers) == [[[0, 10, 20], False, True, True, True, False]] * 3


def test_one_rank_agrees_with_itself() -> None:
    assert broadcast_from_main(lambda: 3) == collective_try(lambda: 3) == 3
    assert (all_gather(3), any_rank(True), any_rank(False), same_on_all(3)) == (
        [3],
        True,
        False,
        True,
    )
    with pytest.raises(HyperslabError, match="no file: KeyError"):
        collective_try(lambda: {}["x"], failing="no file")
    with pytest.raises(KeyError):
        broadcast_from_main(lambda: {}["x"])


def agree_with_the_dead(how: str) -> None:
    grid = hs.Grid(depth=3)
    grid.barrier()
    if grid.rank == 2:
        os._exit(7)
    if how == "from_main":
        broadcast_from_main(lambda: grid.barrier() if grid.is_main else None)
    elif how == "all_or_raise":
        collective_try(lambda: None)
    else:
        any_rank(True)


@pytest.mark.parametrize("how", ["from_main", "all_or_raise", "any_rank"])
def test_a_dead_rank_is_lost_contact(how: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(3, agree_with_the_dead, how)
    caught.match("CommError: rank [01] lost contact with another rank during an agreement of ranks")


def test_who_lost_contact_does_not_ask() -> None:
    def lost() -> None:
        raise CommError("rank 0 lost contact with rank 1")

    with pytest.raises(CommError, match=r"^rank 0 lost contact with rank 1$"):
        collective_try(lost, failing="not these words", gather=lambda _: pytest.fail("it asked"))
