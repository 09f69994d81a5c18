"""Which comparison is waited for, where a device may owe its outcome (tier: no process)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hyperslab as hs
from hyperslab.tensor import inputs
from hyperslab.tensor.inputs import (
    LAG,
    Comparisons,
    InputSpec,
    check_same_sample,
    compare_statements,
)


class OnDevice:
    """Rows that have not come to the host until somebody waits, or says that they have."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.arrived = False
        self.waited = False

    @property
    def at_once(self) -> bool:
        return False

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


@pytest.mark.parametrize("arrives", [False, True])
def test_ranks_judge_at_the_same_place(judged: list[int], arrives: bool) -> None:
    """However early the message is there on one of them."""
    comparisons = Comparisons()
    found = []
    for number in range(6):
        rows = OnDevice(number)
        rows.arrived = arrives
        add(comparisons, rows, judged)
        found.append([*judged])
    late = [[*range(max(1, number + 1 - LAG))] for number in range(6)]
    assert found == late


def test_values_of_fewer_and_fewer_are_compared() -> None:
    steps = Comparisons()
    assert [n for n in range(1, 40) if steps.of_values("x")] == [1, 2, 4, 8, 16, 32]
    assert steps.of_values("another")


def test_a_judge_that_raises_is_asked_once(judged: list[int]) -> None:
    def refuse(_found: Any) -> None:
        raise ValueError("another sample")

    comparisons = Comparisons()
    stated: Any = OnDevice(0)
    with pytest.raises(ValueError, match="another sample"):
        comparisons.add(stated, "x", refuse)
    add(comparisons, OnDevice(1), judged, kind="y")
    assert judged == [1]


class PretendedGrid(SimpleNamespace):
    """Two ranks on CUDA devices that share their samples."""

    has_values = True
    size = 2
    data = 1
    device = torch.device("cuda")

    def __init__(self) -> None:
        super().__init__(coords={"data": 0})

    def coords_of(self, _rank: int) -> dict[str, int]:
        return {"data": 0}


def test_a_gpu_looks_at_the_values_of_few_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    sent: list[list[int]] = []

    def digest(x: torch.Tensor, _order: object) -> int:
        looked.append(x.numel())
        return 7

    def gathered(_grid: object, numbers: list[int], *_: object) -> OnDevice:
        sent.append(numbers)
        rows = OnDevice(0)
        rows.read = lambda: [numbers, numbers]  # type: ignore[method-assign]
        return rows

    monkeypatch.setattr(inputs, "digest_in_memory", digest)
    monkeypatch.setattr(inputs, "AllGatheredInts", gathered)
    grid: Any = PretendedGrid()
    x = torch.randn(1, 2, 3, 4, 5)
    form = InputSpec.of(x, channels=True, batch="global")
    for _ in range(9):
        check_same_sample(x, form, grid)
    assert [at for at, size in enumerate(looked, start=1) if size > 1] == [1, 2, 4, 8]
    assert len(sent) == 9  # shapes and types are compared each time
    assert {len(numbers) for numbers in sent} == {len(sent[0])}


def test_what_is_not_compared_differs_from_nothing() -> None:
    form = InputSpec.of(torch.zeros(1, 1, 2, 2, 2), channels=True, batch="global")
    looked, other, not_looked = (
        [*form.numbers(), order, d] for order, d in ((0, 5), (0, 6), (-1, 9))
    )
    compare_statements([looked, not_looked], [(0, 1)])
    compare_statements([not_looked, [*not_looked[:-1], 3]], [(0, 1)])
    with pytest.raises(hs.LayoutError, match="hand in other values"):
        compare_statements([looked, other], [(0, 1)])
