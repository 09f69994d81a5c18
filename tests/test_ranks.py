"""The pool of ranks itself (tier: a few gloo ranks)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.forked import forked_commands
from tests.ranks import RankError, fresh_groups, rest_idle_ranks, run_ranks


def who(tag: str) -> tuple[str, int, int]:
    return tag, dist.get_rank(), dist.get_world_size()


def summed(x: torch.Tensor) -> torch.Tensor:
    y = x * (dist.get_rank() + 1)
    dist.all_reduce(y)
    return y


def pid() -> int:
    return os.getpid()


def threads() -> int:
    return torch.get_num_threads()


def random() -> float:
    return torch.rand(()).item()


class AwkwardError(Exception):
    """Its constructor cannot be called with its args, so it does not unpickle."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def fail_on(rank: int, awkward: bool = False) -> None:
    if dist.get_rank() == rank:
        raise AwkwardError(3, 4) if awkward else KeyError("the reason")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)


def world() -> tuple[str, int]:
    """The name of the default group, and how many groups there are."""
    groups = dist.distributed_c10d._world.pg_names
    dist.new_group(list(range(dist.get_world_size())))
    return dist.group.WORLD.group_name, len(groups)


def end_the_group() -> bool:
    dist.destroy_process_group()
    return dist.is_initialized()


def groups_and_sockets() -> int:
    for _ in range(3):
        dist.new_group(list(range(dist.get_world_size())))
    return len(os.listdir("/proc/self/fd"))


def wait_until(condition: Callable[[], bool], words: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, words
        time.sleep(0.05)


def test_results_come_by_rank() -> None:
    assert run_ranks(3, who, "a") == [("a", 0, 3), ("a", 1, 3), ("a", 2, 3)]


@pytest.mark.parametrize("n", [1, 4, 2, 8, 3])
def test_a_changed_number_of_ranks_is_a_fresh_group(n: int) -> None:
    x = torch.arange(3.0)
    for y in run_ranks(n, summed, x):
        assert torch.equal(y, x * (n * (n + 1) / 2))


def test_groups_are_kept_and_those_made_in_a_call_are_not() -> None:
    two, four = run_ranks(2, world), run_ranks(4, world)
    assert len({name for name, _ in two}) == len({name for name, _ in four}) == 1
    assert two[0][0] != four[0][0]
    assert run_ranks(4, world) == four
    again = run_ranks(2, world)
    assert [name for name, _ in again] == [name for name, _ in two]
    assert run_ranks(2, world) == again


def test_a_failure_costs_the_group() -> None:
    two, three = run_ranks(2, world), run_ranks(3, world)
    with pytest.raises(KeyError):
        run_ranks(3, fail_on, 0)
    assert run_ranks(3, world)[0][0] != three[0][0]
    assert run_ranks(2, world)[0][0] == two[0][0]


def test_fresh_groups() -> None:
    two, three = run_ranks(2, world), run_ranks(3, world)
    fresh_groups()
    assert run_ranks(3, world)[0][0] != three[0][0]
    assert run_ranks(2, world)[0][0] != two[0][0]


def test_a_call_may_end_its_group() -> None:
    run_ranks(4, who, "before")
    assert run_ranks(2, end_the_group) == [False] * 2
    assert run_ranks(4, who, "after") == [("after", r, 4) for r in range(4)]
    assert run_ranks(2, who, "after") == [("after", r, 2) for r in range(2)]


def test_ranks_that_nobody_calls_are_stopped_and_go_on() -> None:
    pids = run_ranks(3, pid)

    def states() -> str:
        return "".join(
            Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split()[0] for p in pids
        )

    rest_idle_ranks()
    assert "T" not in states(), "there was a call"
    rest_idle_ranks()
    wait_until(lambda: states() == "TTT", "nobody was stopped")
    assert run_ranks(2, pid) == pids[:2]
    assert states()[2] == "T"
    assert run_ranks(3, pid) == pids


def test_workers_are_kept_and_alike() -> None:
    assert run_ranks(2, pid) == run_ranks(4, pid)[:2]
    assert run_ranks(2, threads) == [1, 1]
    assert len({*run_ranks(2, random), *run_ranks(2, random)}) == 1


@pytest.mark.parametrize("rank", [0, 2])
def test_an_exception_comes_back_with_every_traceback(rank: int) -> None:
    with pytest.raises(KeyError, match="the reason") as caught:
        run_ranks(3, fail_on, rank)
    (note,) = caught.value.__notes__
    assert all(f"rank {r}: Traceback" in note for r in range(3))
    assert run_ranks(3, who, "after") == [("after", r, 3) for r in range(3)]


def test_an_exception_that_does_not_pickle_keeps_its_text() -> None:
    with pytest.raises(RuntimeError, match="AwkwardError: 3 and 4"):
        run_ranks(2, fail_on, 1, True)


def test_a_dead_rank_fails_the_call_and_only_that() -> None:
    with pytest.raises(RankError, match="rank 1: died with exit code 7"):
        run_ranks(3, die_on, 1)
    assert run_ranks(3, who, "after") == [("after", r, 3) for r in range(3)]


def test_a_hang_shows_its_stack_and_leaves_no_process() -> None:
    pids = run_ranks(2, pid)
    with pytest.raises(RankError, match=r"(?s)rank 0: returned.*rank 1: still running.*hang_on"):
        run_ranks(2, hang_on, 1, timeout=1)
    assert not any(Path(f"/proc/{p}").exists() for p in pids)
    assert run_ranks(2, who, "after") == [("after", r, 2) for r in range(2)]


def test_sockets_of_old_groups_are_closed() -> None:
    counts = [max(run_ranks(2, groups_and_sockets)) for _ in range(50)]
    most = max(counts[:34]) + 5  # 34 calls use up a whole group at least
    deadline = time.monotonic() + 20
    while max(run_ranks(2, groups_and_sockets)) > most:  # each call would add to a leak
        assert time.monotonic() < deadline, "old groups keep their sockets"


@pytest.mark.parametrize("n", [0, 65])
def test_the_number_of_ranks_is_bounded(n: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 64 ranks, not {n}"):
        run_ranks(n, pid)


@pytest.mark.parametrize("stop", ["", "ranks.rest_idle_ranks(); ranks.rest_idle_ranks();"])
def test_workers_end_with_a_killed_session(stop: str) -> None:
    """Also those that nobody has called for a while, which are stopped."""
    program = (
        "import os, signal; from tests import ranks; from tests.test_ranks import pid;"
        f"print(*ranks.run_ranks(2, pid), flush=True);{stop}"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", program]
    with forked_commands():
        done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, timeout=100)
    pids = [int(p) for p in done.stdout.split()]
    assert len(pids) == 2
    wait_until(
        lambda: not any(Path(f"/proc/{p}").exists() for p in pids), "a worker outlived its session"
    )
