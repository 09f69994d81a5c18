"""Shared memory when something goes wrong: signals, forks, clocks, ranks that hang or diverge
(tier: a few gloo ranks).
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hyperslab as hs
from hyperslab.comm import shared_channels, shared_memory
from hyperslab.errors import CommError
from tests.comm.test_shared_channels import connected, files, lasting
from tests.ranks import RankError, close_pool, fresh_groups, run_ranks

DRAWN = "Python's and NumPy's differ between replicas"
"""What a rank at another place of the program has probably met."""


def add_different_sizes() -> None:
    shared = connected()
    shared.all_reduce(torch.ones([3, 20_000][dist.get_rank()]), [0, 1], "a test")


def send_a_smaller_one() -> None:
    shared, other = connected(), 1 - dist.get_rank()
    shared.send(torch.ones(3), other, "a test")
    shared.receive(torch.empty(4), other, "a test")


@pytest.mark.parametrize(
    ("program", "sizes"), [(add_different_sizes, (12, 80_000)), (send_a_smaller_one, (16, 12))]
)
def test_ranks_that_run_different_programs(program, sizes) -> None:  # type: ignore[no-untyped-def]
    words = f"expected {sizes[0]} B from rank 1 .*got {sizes[1]} B\n"
    with pytest.raises(CommError, match=f"(?s){words}.*{DRAWN}"):
        run_ranks(2, program)


def wait_through_signals() -> int:
    """Handlers run while a rank waits, and no message is lost or taken twice."""
    shared, heard = connected(), []
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["rank 0 has heard three"])
        shared.send(torch.ones(5), 0, "a test")
        return 0

    def hear(*_: object) -> None:
        heard.append(1)
        if len(heard) == 3:
            store.set("rank 0 has heard three", "")

    before = signal.signal(signal.SIGALRM, hear)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    out = torch.zeros(5)
    shared.receive(out, 1, "a test")
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    assert out.sum() == 5
    return len(heard)


def test_signals_while_waiting() -> None:
    heard, _ = run_ranks(2, wait_through_signals)
    assert heard >= 3


def fork_a_child() -> None:
    """A child that ends says nothing about its parent."""
    shared = connected()
    child = os.fork()
    if child == 0:
        shared.segment.leave()
        os._exit(0)
    os.waitpid(child, 0)
    dist.barrier()
    assert shared.segment._alive(1 - dist.get_rank())


def test_a_forked_child_does_not_speak_for_its_parent() -> None:
    run_ranks(2, fork_a_child)


def wait_for_the_dead() -> None:
    """The clock of rank 0 is set back an hour after its wait began."""
    shared = connected()
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    shared_memory.time.time = lambda now=time.time: now() + 3600.0  # type: ignore[assignment]
    shared.receive(torch.empty(1), 1, "a test")


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "sem_clockwait"), reason="only the clock that can be set"
)
def test_a_killed_rank_is_noticed_whatever_the_clock_does() -> None:
    with pytest.raises(RankError, match="lost contact with rank 1 during a test: it has ended"):
        run_ranks(2, wait_for_the_dead)
    close_pool()


def wait_for_the_slow() -> None:
    shared = connected()
    if dist.get_rank() == 1:
        time.sleep(2)
        return
    shared.segment.limit = 0.5
    shared.receive(torch.empty(1), 1, "a test")


def test_a_rank_that_hangs_is_named_after_the_time_limit() -> None:
    words = r"rank 0 lost contact with rank 1 .* no answer within"
    with pytest.raises(CommError, match=f"(?s){words}.*{DRAWN}"):
        run_ranks(2, wait_for_the_slow)


def die_in_the_average() -> None:
    """Rank 1 is killed between the loss and its gradients' average, which others wait in."""
    grid = hs.Grid(data=2)
    model = hs.parallelize(nn.Linear(4, 4), grid, ordinary_inputs="trust")
    loss = model(torch.ones(2, 4)).sum()
    grid.barrier()
    if grid.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()


def test_the_average_of_gradients_names_the_dead_rank() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, die_in_the_average)
    caught.match("rank 0 lost contact with rank 1 during the average of the gradients: it has")


def die_at(moment: str) -> None:
    """Rank 0 is killed while it makes the memory, or before the others have opened it."""
    if dist.get_rank() == 0:
        dies = mock.Mock(side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        setattr(shared_memory.os, moment, dies)
    connected()


@pytest.mark.parametrize("moment", ["posix_fallocate", "close"])
def test_a_rank_killed_at_the_start_leaves_no_memory(moment: str) -> None:
    before = files()
    with pytest.raises(RankError, match="rank 0: died"):
        run_ranks(2, die_at, moment)
    assert not lasting(before)


def nameless() -> bool:
    connected()
    mapped = Path("/proc/self/maps").read_text()
    return "/memfd:hyperslab-" in mapped and "/dev/shm/hyperslab" not in mapped


def test_the_memory_has_no_name() -> None:
    assert run_ranks(2, nameless) == [True, True]


def a_strangers_file() -> bool:
    """Rank 0 seems to be on another machine, where its numbers are those of something else."""
    if dist.get_rank() == 0:
        shared_memory.os.getpid = lambda: 1
    return shared_channels() is None and shared_memory.share_file(4096, lambda path: path) is None


def test_the_numbers_of_another_machine_are_not_trusted() -> None:
    fresh_groups()
    try:
        assert run_ranks(2, a_strangers_file) == [True, True]
    finally:
        close_pool()


def conjugate(count: int) -> None:
    """What the group sends are the numbers, not what lies in memory."""
    grid = hs.Grid(depth=2)
    x = torch.full((count,), 1 + 2j, dtype=torch.complex64).conj()
    out = torch.empty(count, dtype=torch.complex64)
    other = 1 - grid.rank
    grid.halos.exchange([(other, x)], [(other, out)], "a test").wait()
    assert torch.equal(out, x)


@pytest.mark.parametrize("count", [10, 1_000_000])  # of the slot, and too large for it
def test_conjugate_views(count: int) -> None:
    run_ranks(2, conjugate, count)
