"""Boxes that several threads read (tier: no process, and two gloo ranks)."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import hyperslab as hs
from hyperslab.data import PrefetchPolicy, open
from hyperslab.data.assemble import Reader, ReadingThreads
from hyperslab.data.open_dataset import MOST_READING, reading_threads
from hyperslab.data.transforms import AsStored
from hyperslab.geometry import Box
from tests.data.numbered import Numbered, own_threads, wait_for_threads
from tests.formats.universes import Seat
from tests.ranks import run_ranks

HOW: Any = {"split": "all", "transform": None}


class SideBySide(Numbered):
    """Reads take different times; counts those under way at the same time."""

    concurrent = True

    def __init__(self, count: int = 12) -> None:
        super().__init__(count)
        self.broken: set[int] = set()
        self.asked: list[int] = []
        self.most = self.under_way = 0
        self.counting = threading.Lock()

    def read(self, sample: int, box: Box) -> Any:
        with self.counting:
            self.asked.append(sample)
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        time.sleep(random.Random(sample).uniform(0.002, 0.02))
        with self.counting:
            self.under_way -= 1
        if sample in self.broken:
            raise OSError(5, "Input/output error")
        places = np.arange(box.size, dtype="int16").reshape(box.shape)
        return places * 20 + sample


@contextmanager
def cores(count: int) -> Iterator[None]:
    with (
        patch.object(os, "cpu_count", lambda: count),
        patch.object(os, "sched_getaffinity", lambda _: set(range(count))),
    ):
        yield


def shown(source: Numbered, grid: hs.Grid, count: int, **how: Any) -> list[Any]:
    """What two epochs show, and the bytes read for them."""
    found: list[Any] = []
    with cores(count), open(source, grid, **HOW, **how) as data:
        for epoch in range(2):
            for x, y in data.epoch(epoch, onward=epoch == 0):
                found.append((data.shown, x.local.clone(), y.local.clone()))
        found.append(data.bytes_read)
    return found


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(ours, int):
            assert ours == theirs
        else:
            assert ours[0] == theirs[0]
            assert torch.equal(ours[1], theirs[1])
            assert torch.equal(ours[2], theirs[2])


WAYS: list[dict[str, Any]] = [
    {"mode": "direct", "batch_size": 1},
    {"mode": "direct", "batch_size": 5, "shuffle": True},
    {"mode": "direct", "batch_size": 5, "augment": True, "prefetch": 0},
    {"mode": "store", "batch_size": 4, "shuffle": True},
    {"mode": "store", "batch_size": 1, "shuffle": True, "repeat": 2, "prefetch": 6},
    {"mode": "store", "batch_size": 2, "budget": 400, "shuffle": True},
    {"mode": "preload", "batch_size": 3, "augment": True},
    {"mode": "sample", "batch_size": 3},
    {"mode": "store", "batch_size": 3, "on_error": "skip"},
]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_mini_batches_are_those_of_one_thread(how: dict[str, Any]) -> None:
    """They come in the same order, and files are read no more often."""
    source = SideBySide()
    assert_equal(shown(source, Seat(), 8, **how), shown(SideBySide(), Seat(), 1, **how))
    assert 1 < source.most <= MOST_READING + 1  # the one that waits for a box may read it, too


def over_ranks(how: dict[str, Any]) -> None:
    grid = hs.Grid(data=2)
    sources = SideBySide(), SideBySide()
    for source in sources:
        source.broken = {3} if "on_error" in how else set()
    several, one = (
        shown(source, grid, count, **how) for source, count in zip(sources, (16, 2), strict=True)
    )
    assert_equal(several, one)
    assert sources[0].most > 1
    assert sources[1].most == 1


def test_ranks_agree_whichever_threads_they_have() -> None:
    for how in (WAYS[3], WAYS[6], WAYS[8]):
        run_ranks(2, over_ranks, how)


def test_an_error_comes_at_its_step() -> None:
    source = SideBySide()
    source.broken = {4}
    for mode in ("direct", "store"):
        with cores(8), open(source, Seat(), batch_size=2, mode=mode, **HOW) as data:
            batches = data.epoch(0)
            steps = [y.local.flatten().tolist() for _, y in itertools.islice(batches, 2)]
            assert steps == [[0, 1], [2, 3]]
            with pytest.raises(hs.DataError, match=r"'number 4': cannot be read: .*Input/output"):
                next(batches)
    with cores(8), pytest.raises(hs.DataError, match="'number 4': cannot be read"):
        open(source, Seat(), batch_size=2, mode="preload", **HOW)
    wait_for_threads()


def test_a_sample_that_cannot_be_read_is_left_out() -> None:
    source = SideBySide(6)
    source.broken = {1, 4}
    how: Any = {"batch_size": 2, "mode": "store", "on_error": "skip", **HOW}
    with cores(8), open(source, Seat(), **how) as data:
        for _ in range(2):
            assert [y.local.flatten().tolist() for _, y in data.epoch(0)] == [[0], [2, 3], [5]]


@pytest.mark.parametrize("mode", ["direct", "store"])
def test_threads_end_however_an_epoch_is_left(mode: Any) -> None:
    with cores(8):
        data = open(SideBySide(), Seat(), batch_size=2, mode=mode, prefetch=3, **HOW)
    for _ in data.epoch(0):
        break
    wait_for_threads()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the loop is what is interrupted
        for _ in data.epoch(0):
            raise KeyboardInterrupt
    wait_for_threads()
    assert [x.shape[0] for x, _ in data.epoch(1)] == [2] * 6
    batches = data.epoch(2)
    next(batches)
    data.close()
    assert own_threads() == []


@pytest.mark.parametrize("where", ["read", "thread"])
def test_any_thread_may_end_an_epoch_at_any_time(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector of garbage does so: in what reads a box, or where a thread is made."""
    abandoned: list[Any] = []

    class Source(SideBySide):
        def read(self, sample: int, box: Box) -> Any:
            if where == "read" and abandoned:
                abandoned.pop().close()
            return super().read(sample, box)

    class Thread(threading.Thread):
        def __init__(self, *args: Any, **how: Any) -> None:
            if where == "thread" and abandoned:
                abandoned.pop().close()
            super().__init__(*args, **how)

    with cores(8):
        data = open(Source(), Seat(), batch_size=2, prefetch=3, **HOW)
    found: list[Any] = []

    def shown() -> None:
        found.extend(y.local.flatten().tolist() for _, y in data.epoch(1))

    for _ in range(3):
        epoch = data.epoch(0)
        next(epoch)
        wait_for_threads()  # with boxes that were read and not taken
        abandoned.append(epoch)
        consumer = threading.Thread(target=shown, daemon=True)
        with monkeypatch.context() as patched:
            patched.setattr(threading, "Thread", Thread)
            consumer.start()
            consumer.join(20)
        assert not consumer.is_alive()
        assert abandoned == []
    assert found == [[n, n + 1] for n in range(0, 12, 2)] * 3
    data.close()
    assert own_threads() == []


@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupt_where_a_thread_starts_does_no_harm(
    begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Thread(threading.Thread):
        def start(self) -> None:
            if begun:
                super().start()
            raise KeyboardInterrupt

    expected = [[n, n + 1] for n in range(0, 12, 2)]
    for count in (1, 8):  # with and without threads for single boxes
        with cores(count), open(SideBySide(), Seat(), batch_size=2, **HOW) as data:
            for _ in range(2):
                wait_for_threads()
                with monkeypatch.context() as patched:
                    patched.setattr(threading, "Thread", Thread)
                    with pytest.raises(KeyboardInterrupt):
                        next(data.epoch(0))
                found: list[Any] = []

                def shown(data: Any = data, found: list[Any] = found) -> None:
                    found.extend(y.local.flatten().tolist() for _, y in data.epoch(1))

                consumer = threading.Thread(target=shown, daemon=True)
                consumer.start()
                consumer.join(20)
                assert found == expected


def test_boxes_that_nobody_takes_are_as_many_as_threads() -> None:
    source = SideBySide(20)
    threads = ReadingThreads(Reader(source, AsStored()), 3)
    box = Box.whole(source.shape)
    asked = [threads.ask(sample, box) for sample in range(12)]
    wait_for_threads()
    assert sorted(source.asked) == [0, 1, 2]
    threads.drop(asked[3])  # is never read
    threads.drop(asked[1])
    assert own_threads() == []  # none is started where an epoch may be left
    assert threads.take(asked[0], 0, box).values.flatten()[0] == 0
    wait_for_threads()
    assert sorted(source.asked) == [0, 1, 2, 4, 5]
    assert threads.take(asked[11], 11, box).values.flatten()[0] == 11  # here, before its turn
    threads.end()
    for sample in (2, 4, 5, 6):
        assert threads.take(asked[sample], sample, box).values.flatten()[0] == sample
    assert sorted(source.asked) == [0, 1, 2, 4, 5, 6, 11]
    assert own_threads() == []


def test_their_number_follows_format_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SideBySide()
    with cores(8):
        assert reading_threads(source, Seat(), 100, 10**6) == MOST_READING
        assert [reading_threads(source, Seat(), 100, n) for n in (0, 199, 250)] == [0, 0, 2]
        assert reading_threads(Numbered(), Seat(), 100, 10**6) == 0  # says nothing of threads
    with cores(1):
        assert reading_threads(source, Seat(), 100, 10**6) == 0
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert reading_threads(source, Seat(), 100, 10**6) == 3


def test_memory_for_mini_batches_comes_first() -> None:
    """What is read beside them has only what they leave of the prefetched bytes."""
    size = 60 * 2 + 8
    for room, most in ((3 * size, 1), (4 * size, 3), (100 * size, MOST_READING + 1)):
        source = SideBySide(8)
        with cores(8):
            data = open(source, Seat(), batch_size=1, prefetch=PrefetchPolicy(2, room), **HOW)
        with data:
            assert len(list(data.epoch(0))) == 8
        assert source.most <= most
