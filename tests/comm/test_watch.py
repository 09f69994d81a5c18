"""Waits of a GPU that never end are ended, in words (tiers: no process; gloo ranks)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import hyperslab as hs
from hyperslab.comm import agreement, watch
from hyperslab.comm.agreement import failure_broadcast
from hyperslab.comm.bootstrap import own_rank
from hyperslab.comm.watch import Watch, describe_wait, position
from hyperslab.errors import Stopped
from hyperslab.util import torch_internals
from hyperslab.util.signals import StopRequest
from tests.ranks import run_ranks

HALOS = {"3": "halos", "0": "everything else"}


def entry(
    group: str, number: int, state: str, when: int, name: str = "nccl:send"
) -> dict[str, Any]:
    """As torch's flight recorder writes it."""
    return {
        "pg_name": (group, "undefined"),
        "op_id": number,
        "state": state,
        "time_created_ns": when,
        "profiling_name": name,
    }


TRACE = {
    "entries": [
        entry("0", 9, "completed", 5, "nccl:all_reduce"),
        entry("3", 43, "completed", 10),
        entry("3", 44, "started", 20),
        entry("3", 45, "scheduled", 30),
    ]
}
BEGUN = [
    (8, "the halo exchange of conv3d (1)"),
    (19, "the halo exchange of conv3d (2)"),
    (29, "of (3)"),
]


def test_the_first_that_is_open_is_named_with_its_layer_and_who_is_behind() -> None:
    assert position(TRACE) == {"0": 9, "3": 45}
    said = describe_wait(
        "rank 0 waited 8 s for the vote on step 7",
        TRACE,
        HALOS,
        BEGUN,
        {0: {"3": 45}, 1: {"3": 43}, 3: {"3": 45}},
        5,
    )
    assert said.splitlines() == [
        "rank 0 waited 8 s for the vote on step 7",
        "    the communicator for halos is open: nccl:send number 44 is started, "
        "the halo exchange of conv3d (2)",
        "    rank 1 began 43 of its operations, others 45",
        "    nothing was heard from ranks 2 and 4",
        "    go on from the last checkpoint with --resume",
    ]


def test_where_all_are_as_far_the_network_hangs() -> None:
    said = describe_wait("w", TRACE, {}, [], {0: {"3": 45}, 1: {"3": 45}}, 2)
    assert "all ranks have begun the same" in said
    assert "flight recorder has nothing" in describe_wait("w", {}, {}, [], {0: {}, 1: {}}, 2)


@pytest.fixture
def quick() -> Iterator[pytest.MonkeyPatch]:
    """What takes seconds takes hundredths."""
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        yield patch


def hurry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(watch, "LOOK_EVERY", 0.02)
    patch.setattr(watch, "ABORT_GRACE", 0.1)
    patch.setattr(watch, "SIGNAL_GRACE", 0.05)


def test_a_wait_without_end_raises_once_all_groups_are_aborted(quick: pytest.MonkeyPatch) -> None:
    aborted = threading.Event()
    watched = Watch(0.1, abort=aborted.set)
    with watched.running():
        with watched.over("the vote on step 3"):
            pass
        words = "waited 0 s for the vote on step 4"
        with pytest.raises(hs.CommError, match=words), watched.over("the vote on step 4"):
            assert aborted.wait(20)


def test_an_error_of_the_aborted_group_is_ours(quick: pytest.MonkeyPatch) -> None:
    aborted = threading.Event()
    watched = Watch(0.1, abort=aborted.set)

    def hangs() -> None:
        with watched.over("the vote"):
            aborted.wait(20)
            raise RuntimeError("NCCL communicator was aborted")

    with watched.running(), pytest.raises(hs.CommError, match="the vote"):
        hangs()


def test_the_process_ends_where_that_does_not_help(quick: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    done = threading.Event()

    def leave(code: int) -> None:
        left.append(code)
        done.set()

    watched = Watch(0.1, abort=lambda: None, leave=leave)
    with watched.running(), pytest.raises(hs.CommError), watched.over("the vote"):
        assert done.wait(20)
    assert left == [1]


def test_a_signal_is_heeded_where_no_handler_runs(quick: pytest.MonkeyPatch) -> None:
    """The main thread stands in C: what Python's handler would note nobody notes."""
    quick.setattr(StopRequest, "_note", lambda *_: None)
    aborted = threading.Event()
    watched = Watch(1000, abort=aborted.set)

    def hangs() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        with watched.over("the vote on step 3"):
            assert aborted.wait(20)

    with StopRequest().listening(), watched.running(), pytest.raises(Stopped) as caught:
        hangs()
    assert caught.value.code == 128 + signal.SIGTERM
    assert "SIGTERM during the vote on step 3" in str(caught.value)


def waits(fails: bool) -> str:
    """Rank 0 waits; rank 1 fails, or is behind and computes."""
    done = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        patch.setattr(watch, "HEAR_LIMIT", 0.05)
        trace = {"entries": TRACE["entries"][: 4 if own_rank() == 0 else 2]}
        patch.setattr(torch_internals, "nccl_trace", lambda: trace)
        watched = Watch(1000 if fails else 0.3, abort=done.set)
        grid = hs.Grid(depth=2)
        try:
            with failure_broadcast(), watched.running():
                if own_rank() == 0:
                    with watched.over("the vote"):
                        assert done.wait(30)
                if fails:
                    raise ValueError("this rank gives up")
                grid.barrier()
        except ValueError:
            grid.barrier()
        except hs.CommError as error:
            grid.barrier()
            return str(error)
    return ""


def test_the_words_of_a_rank_that_failed() -> None:
    first, _ = run_ranks(2, waits, True)
    assert first == "rank 1 says: ValueError: this rank gives up"


def test_the_rank_that_is_behind_answers() -> None:
    first, _ = run_ranks(2, waits, False)
    assert "rank 1 began 43 of its operations, others 45" in first
    assert "nothing was heard" not in first


def fails_over(backend: str) -> int:
    ended: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "backend_of", lambda: backend)
        patch.setattr(agreement, "abort_groups", lambda: ended.append(1))
        with pytest.raises(ValueError, match="gives up"), failure_broadcast():
            raise ValueError("gives up")
    return len(ended)


@pytest.mark.parametrize(
    ("backend", "count"), [("nccl", 1), ("cpu:gloo,cuda:nccl", 1), ("gloo", 0)]
)
def test_after_an_error_all_groups_of_nccl_are_aborted(backend: str, count: int) -> None:
    assert run_ranks(2, fails_over, backend) == [count, count]
