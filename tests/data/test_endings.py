"""Data sets that are closed, dropped, left or shared in unusual ways (tier: a few gloo ranks)."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hyperslab as hs
from hyperslab.comm.host_p2p import HostP2P
from hyperslab.data import open
from hyperslab.geometry import Box
from tests.data.numbered import HOW, KEPT, Numbered
from tests.forked import forked_commands
from tests.formats.universes import Seat
from tests.ports import unused_port
from tests.ranks import run_ranks
from tests.selection import in_gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("stored", ["int16", "float32"])
def test_what_is_kept_is_the_stores_own(stored: str, dtype: torch.dtype) -> None:
    with open(Numbered(dtype=stored), Seat(), batch_size=1, dtype=dtype, **KEPT) as data:
        for epoch in range(3):
            for (x, y), number in zip(data.epoch(epoch), data.names(epoch), strict=True):
                expected = int(number.split()[1])
                assert (x.local == expected).all()
                assert (y.local == expected).all()
                x.local.fill_(-1)
                y.local.fill_(-1)


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("stored", ["int16", "float32"])
def test_what_a_source_gave_is_its_own(stored: str, order: Any, writable: bool) -> None:
    """A mini-batch of one sample is not copied, and nobody changes the source by it."""

    class Held(Numbered):
        def read(self, sample: int, box: Box) -> Any:
            return held[sample]

        def target(self, sample: int) -> Any:
            return targets[sample]

    counted = np.arange(60).reshape(1, 3, 4, 5)
    held = [np.array(counted + i, stored, order=order) for i in range(4)]
    targets = [np.array([i], np.float64) for i in range(4)]
    for array in held + targets:
        array.flags.writeable = writable
    with open(Held(dtype=stored), Seat(), batch_size=1, mode="direct", **HOW) as data:
        for epoch in range(2):
            for (x, y), number in zip(data.epoch(epoch), data.names(epoch), strict=True):
                i = int(number.split()[1])
                assert np.array_equal(x.local[0], counted + i)
                assert y.local.item() == i
                x.local.fill_(-1)
                y.local.fill_(-1)


@pytest.mark.parametrize("stored", ["int16", "float32"])
def test_a_source_may_give_a_wider_type(stored: str) -> None:
    wide = {"int16": "int64", "float32": "float64"}[stored]
    with open(Numbered(2, stored, wide), Seat(), batch_size=1, **KEPT) as data:
        for _ in range(2):
            assert [float(x.local.mean()) for x, _ in data.epoch(0)] == [0, 1]
        assert data.stored_bytes == 2 * (60 * np.dtype(stored).itemsize + 8)


def test_values_that_the_type_does_not_hold_are_refused() -> None:
    class Huge(Numbered):
        def read(self, sample: int, box: Box) -> Any:
            return np.full(box.shape, 40000)

    with pytest.raises(hs.DataError, match=r"'number 0'.* read as int64 .* no int16"):
        next(open(Huge(), Seat(), batch_size=1, **HOW).epoch(0))


def test_an_error_of_the_system_names_the_sample() -> None:
    source = Numbered()
    source.error = OSError(5, "Input/output error")
    with pytest.raises(hs.DataError, match=r"'number 0': cannot be read: .*Input/output"):
        next(open(source, Seat(), batch_size=1, **HOW).epoch(0))


def test_an_epoch_left_early_leaves_another_alone() -> None:
    data = open(Numbered(9), Seat(), batch_size=1, **HOW)
    first, second = data.epoch(0), data.epoch(1)
    next(first), next(second)
    second.close()
    assert len(list(first)) == 8


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_closed_data_set_says_so(prefetch: int) -> None:
    data = open(Numbered(), Seat(), batch_size=1, prefetch=prefetch, **KEPT)
    batches = data.epoch(0)
    next(batches)
    data.close()
    data.close()
    with pytest.raises(hs.DataError, match="closed"):
        next(batches)
    with pytest.raises(hs.DataError, match="closed"):
        data.epoch(1)
    assert data.stored_bytes == 0


def test_no_sample_left_is_an_error() -> None:
    source = Numbered()
    source.error = hs.DataError("it is damaged")
    with pytest.raises(hs.DataError, match="no sample"):
        list(open(source, Seat(), batch_size=3, on_error="skip", **KEPT).epoch(0))


def crossed() -> list[int]:
    """Two data sets in mid-epoch, closed in another order on each rank."""
    grid = hs.Grid(data=2)
    pair = [open(Numbered(9), grid, batch_size=1, prefetch=3, **KEPT) for _ in range(2)]
    running = [data.epoch(0) for data in pair]
    shown = [int(next(batches)[0].local.flatten()[0]) for batches in running for _ in range(3)]
    for data in reversed(pair) if grid.rank else pair:
        data.close()
    return shown


def test_data_sets_may_be_closed_in_any_order() -> None:
    assert run_ranks(2, crossed, timeout=60) == [[0, 1, 2, 0, 1, 2]] * 2


def hasty() -> None:
    grid = hs.Grid(data=4)
    for _ in range(40):
        with open(Numbered(), grid, batch_size=1, **KEPT):
            pass


def test_a_data_set_may_be_closed_at_once() -> None:
    run_ranks(4, hasty, timeout=60)


def left_alone(how: str) -> tuple[list[int], float]:
    """One rank leaves by an error; when the other knows [s]."""
    grid = hs.Grid(data=2)
    source = Numbered(8)
    source.pause = 0.01
    shown = []
    begin = time.monotonic()
    expected = hs.CommError if grid.rank == 0 else KeyboardInterrupt
    with (  # noqa: PT012 - the loop is what is interrupted
        pytest.raises(expected, match="rank 0 lost contact with" if grid.rank == 0 else None),
        open(source, grid, batch_size=1, **{**KEPT, "on_error": how}) as data,
    ):
        for x, _ in data.epoch(0):
            shown.append(int(x.local.flatten()[0]))
            if grid.rank == 1 and len(shown) == 2:
                raise KeyboardInterrupt
    return shown, time.monotonic() - begin


@pytest.mark.parametrize("how", ["stop", "skip"])
def test_who_leaves_by_an_error_does_not_keep_the_others_waiting(how: str) -> None:
    (shown, seconds), (other, _) = run_ranks(2, left_alone, how)
    assert other == [0, 1]
    assert shown == list(range(len(shown)))
    assert len(shown) < 8
    assert seconds < 60, "the time limit is 120 s"


class Stuck(Numbered):
    """Its samples from the second on come when this rank has left, as a sum that gloo forgets."""

    def __init__(self) -> None:
        super().__init__(8)
        self.left, self.found = threading.Event(), queue.Queue[bool]()

    def read(self, sample: int, box: Box) -> Any:
        if sample:
            self.found.put(self.left.wait(60))
        return super().read(sample, box)


def test_what_never_comes_keeps_no_rank_that_leaves_by_an_error() -> None:
    source, transport = Stuck(), Mock(spec=HostP2P, abandoned=True)
    with (  # noqa: PT012 - the loop is what is interrupted
        pytest.raises(KeyboardInterrupt),
        open(source, Seat(), batch_size=1, prefetch=1, shuffle=False, **KEPT) as data,
    ):
        batches = data.epoch(0)
        next(batches)
        data._transport = transport
        raise KeyboardInterrupt
    transport.abandon.assert_called_once()
    source.left.set()
    assert source.found.get(timeout=60)


def dropped() -> tuple[int, int]:
    """Open files before and after many data sets that nobody closes."""
    grid = hs.Grid(data=2)
    counts = []
    for _ in range(4):
        data = open(Numbered(6), grid, batch_size=1, **KEPT)
        for x, _ in data.epoch(0):
            assert x.shape[0] == 1
        time.sleep(0.05 * grid.rank)  # the other one is done long before
        assert len(list(data.epoch(1))) == 6
        del data, x
        dist.barrier()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts[0], counts[-1]


def test_a_dropped_data_set_frees_its_group() -> None:
    for first, last in run_ranks(2, dropped):
        assert last <= first


SCRIPT = """
import os, sys, time
import numpy as np
import hyperslab as hs
from hyperslab.data import Parameters, Source

class Big(Source):
    shape, dtype = (4, 64, 64, 64), np.dtype("int16")
    names = [str(i) for i in range(8)]
    parameters = Parameters.normalised(["a"])
    concurrent = True
    def read(self, sample, box):
        time.sleep(0.01)
        return np.full(box.shape, sample, self.dtype)
    def target(self, sample):
        return np.array([sample])

if sys.argv[2] == "several":  # threads of each rank that read
    os.sched_getaffinity, os.cpu_count = lambda _: range(16), lambda: 16
grid = hs.Grid(data=2)
budget = {"one": 1 << 30, "several": 3 << 21}[sys.argv[2]]  # of which not all are kept
data = hs.open(Big(), grid, batch_size=1, split="all", mode="store", budget=budget)
for epoch in range(2):
    for step, batch in enumerate(data.epoch(epoch, onward=True)):
        time.sleep(0.05 * grid.rank)
        if epoch and step == 2 and sys.argv[1] == "break":
            break
        if epoch and step == 2 and sys.argv[1] == "raise":
            raise ValueError("mine")
print("done", flush=True)
"""


@pytest.mark.parametrize("threads", ["one", "several"])
@pytest.mark.parametrize("how", in_gate(["break", "raise", "plain"], kept=["raise"]))
def test_a_script_may_end_without_close(how: str, threads: str) -> None:
    """With work in the background, and boxes that the other rank has not fetched yet."""
    port = str(unused_port())
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with forked_commands():
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, how, threads],
                env={**os.environ, **environment, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
    for rank in ranks:
        out, errors = rank.communicate(timeout=60)
        assert "terminate called" not in errors
        assert (rank.returncode, out) == ((1, "") if how == "raise" else (0, "done\n")), errors
