"""Which comparison is waited for, where a device may owe its outcome (tier: no process)."""

from __future__ import annotations

from typing import Any

import pytest

from hyperslab.tensor.inputs import MOST_UNREAD, Comparisons


class OnDevice:
    """Rows that have not come to the host until somebody waits, or says that they have."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.arrived = False
        self.waited = False

    def here(self) -> bool:
        return self.arrived

    def read(self) -> list[list[int]]:
        self.waited = not self.arrived
        return [[self.number]]


@pytest.fixture
def judged() -> list[int]:
    return []


def add(comparisons: Comparisons, rows: OnDevice, judged: list[int], kind: str = "x") -> None:
    stated: Any = rows
    comparisons.add(stated, kind, lambda found: judged.append(found[0][0]))


def test_the_first_of_a_kind_is_waited_for(judged: list[int]) -> None:
    comparisons = Comparisons()
    first = OnDevice(0)
    add(comparisons, first, judged)
    assert first.waited
    second = OnDevice(1)
    add(comparisons, second, judged)
    assert judged == [0]
    add(comparisons, OnDevice(2), judged, kind="another")  # and all before it
    assert judged == [0, 1, 2]
    assert second.waited


def test_later_ones_are_judged_when_they_are_here(judged: list[int]) -> None:
    comparisons = Comparisons()
    add(comparisons, OnDevice(0), judged)
    later = OnDevice(1)
    add(comparisons, later, judged)
    later.arrived = True
    add(comparisons, OnDevice(2), judged)
    assert judged == [0, 1]
    assert not later.waited


def test_no_more_are_owed_than_that(judged: list[int]) -> None:
    comparisons = Comparisons()
    for number in range(MOST_UNREAD + 2):
        add(comparisons, OnDevice(number), judged)
    assert judged == [0, 1]


def test_a_judge_that_raises_is_asked_once(judged: list[int]) -> None:
    def refuse(_found: Any) -> None:
        raise ValueError("another sample")

    comparisons = Comparisons()
    stated: Any = OnDevice(0)
    with pytest.raises(ValueError, match="another sample"):
        comparisons.add(stated, "x", refuse)
    add(comparisons, OnDevice(1), judged, kind="y")
    assert judged == [1]
