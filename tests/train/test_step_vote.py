"""What all ranks know about a step (tiers: no process; a few gloo ranks)."""

from __future__ import annotations

import math
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hyperslab as hs
from hyperslab.comm import Grid
from hyperslab.train.objective import Objective
from hyperslab.train.step import Verdict, Vote
from hyperslab.train.trainer import Trainer
from hyperslab.util.signals import STOP_SIGNALS, StopRequest
from tests.ranks import run_ranks


def vote(stops: dict[int, int], bad: dict[int, float], loss: float) -> Verdict:
    grid = Grid(depth=3)
    prediction = torch.tensor([[0.5, bad.get(grid.rank, 0.0)]])
    stop, wait = stops.get(grid.rank, 0), 0.25 * (grid.rank + 1)
    return Vote(grid, torch.tensor(loss), prediction, stop=stop, wait=wait).result()


def test_a_good_step() -> None:
    first, *others = run_ranks(3, vote, {}, {}, -0.5)
    assert (first.loss, first.finite, first.signal) == (-0.5, True, 0)
    assert first.wait_seconds == 0.75
    assert first.memory_bytes > 2**20
    assert others == [first, first]


def test_one_signal_reaches_all() -> None:
    for verdict in run_ranks(3, vote, {1: signal.SIGTERM}, {}, 0.5):
        assert verdict.signal == signal.SIGTERM


@pytest.mark.parametrize(
    ("bad", "culprit"), [({2: math.nan}, 2), ({1: math.inf, 2: math.nan}, 1), ({0: -math.inf}, 0)]
)
def test_the_first_rank_without_a_number_is_named(bad: dict[int, float], culprit: int) -> None:
    for verdict in run_ranks(3, vote, {}, bad, math.nan):
        assert not verdict.finite
        assert verdict.culprit == culprit


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number(loss: float) -> None:
    verdict = Vote(Grid(), torch.tensor(loss), torch.zeros(2, 3), stop=0, wait=0.0).result()
    assert not verdict.finite
    assert verdict.culprit is None
    assert math.isnan(verdict.loss)


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopRequest()
    try:
        with stop.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_signals_are_noted_and_then_handled_as_before(number: signal.Signals) -> None:
    found = signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored
    try:
        before = {n: signal.getsignal(n) for n in STOP_SIGNALS}
        stop = StopRequest()
        with stop.listening():
            assert stop.signal == 0
            os.kill(os.getpid(), number)
            assert stop.signal == number
        assert {n: signal.getsignal(n) for n in STOP_SIGNALS} == before
    finally:
        signal.signal(number, found)


@pytest.mark.parametrize(
    ("stops", "read"), [(None, [0, 1, 2, 3]), (1, [0, 1, 2]), (3, [0, 1, 2, 3])]
)
def test_a_vote_of_a_validation_is_read_a_batch_late(stops: int | None, read: list[int]) -> None:
    """When the next one is under way; a signal still ends it, and all votes are read."""
    events: list[tuple[str, int]] = []
    left: list[int] = []

    class Noted:
        def __init__(self, number: int) -> None:
            self.number = number
            events.append(("starts", number))

        def result(self) -> Any:
            events.append(("read", self.number))
            return SimpleNamespace(signal=15 if self.number == stops else 0)

    def vote(_loss: object, _prediction: object) -> Noted:
        return Noted(sum(kind == "starts" for kind, _ in events))

    grid = Grid()
    batches = [[hs.shard(torch.randn(2, 3), grid) for _ in range(2)] for _ in range(4)]
    given: Any = SimpleNamespace(
        model=torch.nn.Identity(),
        objective=Objective("mse"),
        grid=grid,
        average=None,
        autocast=lambda: torch.autocast("cpu", enabled=False),
        progress=SimpleNamespace(
            vote=vote, leave_if=left.append, read=lambda vote, _: vote.result()
        ),
    )
    data: Any = SimpleNamespace(epoch=lambda _: batches)
    Trainer.measure(given, data)
    assert [number for kind, number in events if kind == "read"] == read
    assert left == [0 if stops is None else 15]
    for number in read[:-1]:
        assert events.index(("starts", number + 1)) < events.index(("read", number))
