"""The start of the transport of boxes (tier: a few gloo ranks)."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hyperslab as hs
from hyperslab.comm import AXES
from hyperslab.comm.host_p2p import HostP2P
from tests.ranks import RankError, fresh_groups, run_ranks


def sent_round(transport: HostP2P) -> float:
    """What the rank before this one says."""
    mine = np.full(3, transport.rank, np.float32)
    found = np.empty(3, np.float32)
    wait = transport.receive(found, (transport.rank - 1) % transport.size, tag=1)
    transport.send(mine, (transport.rank + 1) % transport.size, 1, "a test")
    wait()
    return float(found[0])


def with_a_group_of_its_own() -> list[float]:
    """Rank 1 has made process groups for itself, which torch numbers."""
    grid = hs.Grid(data=3)
    if grid.rank == 1:
        dist.new_group([1])
        dist.new_group([1])
    found = [sent_round(HostP2P(grid))]
    if grid.rank == 2:
        dist.new_group([2])
    parts = hs.Grid(data=1, depth=3).group(AXES)
    assert parts is not None
    return [*found, sent_round(HostP2P(grid))]


def test_a_group_of_one_rank_alone_holds_nobody_up() -> None:
    fresh_groups()
    assert run_ranks(3, with_a_group_of_its_own, timeout=60) == [[2, 2], [0, 0], [1, 1]]


def in_parts() -> float:
    """The communicators of parts of the ranks are groups, too."""
    grid = hs.Grid(data=2, depth=2)
    if grid.rank == 3:
        dist.new_group([3])
    group = grid.group(["depth"])
    assert group is not None
    return group.sum_in_place(torch.tensor(float(grid.rank)), "a test").item()


def test_nor_where_sums_are_over_a_part() -> None:
    fresh_groups()
    assert run_ranks(4, in_parts, timeout=60) == [1, 1, 5, 5]


def without_one() -> None:
    grid = hs.Grid(data=3)
    grid.barrier()
    if grid.rank == 2:
        os._exit(7)
    begin = time.monotonic()
    try:
        HostP2P(grid)
    finally:
        assert time.monotonic() - begin < 60, "it waited for the time limit, of 120 s"


def test_a_rank_that_has_died_is_missed_at_once() -> None:
    with pytest.raises(RankError, match=r"lost contact with .* during the exchange of samples"):
        run_ranks(3, without_one)


def many() -> list[float]:
    grid = hs.Grid(data=4)
    return [sent_round(HostP2P(grid)) for _ in range(20)]


def test_many_starts() -> None:
    assert run_ranks(4, many) == [[(rank - 1) % 4] * 20 for rank in range(4)]


def sockets() -> int:
    """Connections and listeners of this process."""
    folder = "/proc/self/fd"
    links = [os.path.join(folder, name) for name in os.listdir(folder)]
    return sum(os.path.lexists(link) and "socket" in os.readlink(link) for link in links)


def by_positions() -> tuple[int, int, float, list[int], list[int]]:
    """Sockets of both kinds, what the rank of the other replica says, who is asked."""
    grid = hs.Grid(data=2, depth=2, height=2)
    grid.barrier()
    before = sockets()
    apart = HostP2P(grid, same_position=True)
    between = sockets()
    everybody = HostP2P(grid)
    after = sockets()
    found = np.empty(3, np.float32)
    peer = (grid.rank + 4) % 8
    wait = apart.receive(found, peer, tag=1)
    apart.send(np.full(3, grid.rank, np.float32), peer, 1, "a test")
    wait()
    apart.settle()
    return (
        between - before,
        after - between,
        float(found[0]),
        apart.gather(grid.rank),
        everybody.gather(grid.rank),
    )


def test_boxes_take_a_connection_for_each_replica_and_not_for_each_rank() -> None:
    fresh_groups()
    for rank, (apart, everybody, heard, asked, all_asked) in enumerate(run_ranks(8, by_positions)):
        assert heard == (rank + 4) % 8
        assert asked == sorted({rank, (rank + 4) % 8})
        assert all_asked == list(range(8))
        assert everybody - apart == 7 - 1


def of_several_data_sets() -> tuple[int, list[float], float]:
    """Sockets of the second data set, what its peer sends in both, and after one was left."""
    grid = hs.Grid(data=2, depth=2)
    first = HostP2P(grid, same_position=True)
    before = sockets()
    second = HostP2P(grid, same_position=True)
    more = sockets() - before
    peer = (grid.rank + 2) % 4

    def swap(*pairs: tuple[HostP2P, float]) -> list[float]:
        found = [np.empty(3, np.float32) for _ in pairs]
        for transport, value in pairs:
            transport.send(np.full(3, value, np.float32), peer, 1, "a test")
        # In the other order than they were sent, under one tag.
        waits = [pairs[at][0].receive(found[at], peer, tag=1) for at in reversed(range(len(pairs)))]
        for wait in waits:
            wait()
        return [float(one[0]) for one in found]

    heard = swap((first, grid.rank), (second, grid.rank + 10))
    for transport in (first, second):
        transport.settle()
    grid.barrier()
    if grid.rank == 0:
        second.abandon()
    third = HostP2P(grid, same_position=True)
    return more, heard, swap((third, grid.rank + 20))[0]


def test_data_sets_share_their_connections_until_one_is_left_after_an_error() -> None:
    fresh_groups()
    for rank, found in enumerate(run_ranks(4, of_several_data_sets, timeout=60)):
        peer = (rank + 2) % 4
        more, *heard = found
        assert more <= 0, "some of groups that have ended may be closed meanwhile"
        assert heard == [[peer, peer + 10], peer + 20]
