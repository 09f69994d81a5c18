"""Starts of the ranks in a store that outlives them (tier: no process; ranks are threads)."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hyperslab.comm.launchers import RankVariables
from hyperslab.comm.rendezvous import Deadline, answer_roll_call, meet
from hyperslab.errors import CommError

SIZE = 3


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store of torchrun's agents, which stays while ranks die and are started again."""
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return store


def place_of(rank: int, store: Store) -> RankVariables:
    return RankVariables(rank, SIZE, rank, "127.0.0.1", store.port, None)  # type: ignore[attr-defined]


def start(ranks: list[int], agent: Store, limit: float = 20) -> list[str]:
    """What ranks that are started now find of what rank 0 writes, or their errors."""

    def rank(number: int) -> str:
        place = place_of(number, agent)
        deadline = Deadline(limit)
        try:
            store, _ = answer_roll_call(meet(place, deadline), place, {}, deadline)
        except CommError as error:
            return str(error).splitlines()[0]
        if number == 0:
            store.set("common", uuid.uuid4().hex)  # unlike addresses, never the same twice
        return bytes(store.get("common")).decode()

    with ThreadPoolExecutor(len(ranks)) as pool:
        found = list(pool.map(rank, ranks))
    for thread in threading.enumerate():
        if "answer_all" in thread.name:  # of a rank that has died it would answer nobody
            thread.join()
    return found


def test_ranks_meet_anew_at_every_start(agent: Store) -> None:
    """Whatever their nodes' agents count: the one that lost a rank counts a restart, the other
    one may have stopped its ranks before they noticed.
    """
    found = [start([0, 1, 2], agent) for _ in range(3)]
    assert [len({*words}) for words in found] == [1, 1, 1]
    assert len({words[0] for words in found}) == 3


def test_ranks_of_a_start_that_failed_are_not_waited_for(agent: Store) -> None:
    late = start([1, 2], agent, 0.3)
    assert late[0].startswith("rank 0 did not come to MASTER_ADDR=127.0.0.1")
    assert "ranks 1 and 2 did not come" in start([0], agent, 0.5)[0]
    assert len({*start([2, 1, 0], agent)}) == 1


def test_who_does_not_come_is_named(agent: Store) -> None:
    words = start([0, 1], agent, 1)
    assert words == [words[0]] * 2
    assert words[0].startswith("rank 2 did not come")
