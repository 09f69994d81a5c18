"""Halos, statistics and gradients have a communicator each (tier: a few gloo ranks).

What each one carries is read from gloo, which counts what every process group was asked for.
"""

from __future__ import annotations

import datetime
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hyperslab as hs
from hyperslab.comm import shared_channels, shared_memory
from hyperslab.comm.communicator import GroupCommunicator, communicators_of_world
from hyperslab.comm.shared_memory import SharedChannels
from tests.ranks import RankError, fresh_groups, run_ranks
from tests.selection import by_rotation
from tests.worlds import groups_of

HALOS = "halos"
STATISTICS = "statistics"
GRADIENTS = "gradients"
MEMORY = "shared memory"


class Record:
    """Which process groups the messages, the sums and the averages of a step went to; averages in
    shared memory to none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used: dict[str, set[Any]] = {HALOS: set(), STATISTICS: set()}
        self.used[GRADIENTS] = set()
        for name, purpose in (("exchange", HALOS), ("sum_in_place", STATISTICS)):
            monkeypatch.setattr(GroupCommunicator, name, self._watching(name, purpose))
        average = SharedChannels.average_shown

        def averaging(shared: SharedChannels, *args: Any, **kwargs: Any) -> None:
            self.used[GRADIENTS].add(MEMORY)
            average(shared, *args, **kwargs)

        monkeypatch.setattr(SharedChannels, "average_shown", averaging)

    def _watching(self, name: str, purpose: str) -> Any:
        plain = getattr(GroupCommunicator, name)

        def watched(communicator: GroupCommunicator, *args: Any) -> Any:
            self.used[purpose].add(communicator.group)
            return plain(communicator, *args)

        return watched


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm3d(4),
        nn.LeakyReLU(),
        nn.MaxPool3d(3, stride=2, padding=1),
        nn.Conv3d(4, 4, 3, padding=1),
        nn.BatchNorm3d(4),
        nn.ConvTranspose3d(4, 2, 2, stride=2),
    )


def step(model: nn.Module, x: hs.Sharded) -> None:
    model(x).square().mean().backward()


def asked(groups: list[dist.ProcessGroup]) -> list[int]:
    """How many messages and collectives gloo had to carry for each."""
    return [group._get_sequence_number_for_group() for group in groups]


def used_by_a_step(axes: dict[str, int], batch_norm: str, memory: bool) -> None:
    if not memory:
        shared_memory.MOST_OF_FREE_MEMORY = 0.0
    with pytest.MonkeyPatch.context() as monkeypatch:
        try:
            grid = hs.Grid(**axes)
        finally:
            shared_memory.MOST_OF_FREE_MEMORY = 0.5
        assert (shared_channels() is not None) == memory
        model = hs.parallelize(network(), grid, batch_norm=batch_norm)
        x = hs.shard(torch.randn(4, 2, 16, 16, 16), grid)
        step(model, x)  # plans are made, and groups
        world = dist.group.WORLD
        assert world is not None
        groups = groups_of(world)
        before = asked(groups)
        record = Record(monkeypatch)
        step(model, x)
        carried = {g: b - a for g, a, b in zip(groups, before, asked(groups), strict=True)}
    check(record.used, carried, memory)


def check(used: dict[str, set[Any]], carried: dict[Any, int], memory: bool) -> None:
    """No group serves two purposes, the default one none, and gloo saw the same."""
    if not memory:  # DistributedDataParallel averages by itself then: whatever else was carried
        idle = used[HALOS] | used[STATISTICS]
        used[GRADIENTS] = {g for g, n in carried.items() if n and g not in idle}
        assert all(carried[g] for purpose in used.values() for g in purpose)
    assert all(used.values()), "every purpose was served"
    assert dist.group.WORLD not in set().union(*used.values())
    assert not carried[dist.group.WORLD]
    halos, statistics, gradients = used.values()
    assert not halos & statistics
    assert not halos & gradients
    assert not statistics & gradients
    made = communicators_of_world()
    assert halos == {made.halos.group}
    assert gradients == {MEMORY if memory else made.gradients.group}


CASES = [
    ({"depth": 2}, "grid"),
    ({"depth": 2, "height": 2}, "grid"),
    ({"data": 2, "depth": 2}, "grid"),
    ({"data": 2, "depth": 2}, "replica"),
]


@pytest.mark.parametrize(("case", "way"), by_rotation(CASES, ("shared memory", "gloo")), ids=str)
def test_a_step_shares_no_communicator(case: tuple[dict[str, int], str], way: str) -> None:
    (axes, batch_norm), memory = case, way == "shared memory"
    fresh_groups()  # others share memory, or do not
    ranks = 1
    for extent in axes.values():
        ranks *= extent
    run_ranks(ranks, used_by_a_step, axes, batch_norm, memory)
    fresh_groups()


def shared_by_grids() -> None:
    first = hs.Grid(data=2, depth=2)
    second = hs.Grid(data=2, height=2)
    assert first.halos is second.halos
    assert first.gradients is second.gradients
    assert first.group(("depth",)) is second.group(("height",))
    assert first.group(("data", "depth")) is second.group(("data", "height"))
    assert first.group(("data",)) is not first.group(("depth",))


def test_grids_of_one_world_share_their_communicators() -> None:
    run_ranks(4, shared_by_grids)


def with_few_files() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/dev/fd")) + 12
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
    try:
        hs.Grid(depth=8).barrier()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_more_files_may_be_opened_than_at_first() -> None:
    fresh_groups()
    run_ranks(8, with_few_files)


def new_world(store: str, seconds: float) -> None:
    """End the default process group and start another."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    limit = datetime.timedelta(seconds=seconds)
    dist.destroy_process_group()
    meet = f"file://{store}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=size, timeout=limit)


def again(store: str) -> bool:
    old = hs.Grid(depth=2)
    part = old.group(("depth",))
    new_world(store, 20)
    x = torch.randn(1, 2, 5, 3, 3)
    with pytest.raises(hs.CommError, match="samples: the process group of this grid has ended"):
        hs.shard(x, old)
    with pytest.raises(hs.CommError, match=r"full\(\): the process group of this grid has ended"):
        hs.shard(x, old, check=False).full()
    new = hs.Grid(depth=2)
    fresh = new.halos is not old.halos and new.group(("depth",)) is not part
    return fresh and torch.equal(hs.shard(x, new).full(), x)


def test_a_new_world_has_new_communicators(tmp_path: Path) -> None:
    assert all(run_ranks(2, again, str(tmp_path / "store")))


def limits() -> set[datetime.timedelta]:
    grid = hs.Grid(data=2, depth=2)
    grid.group(("depth",))
    world = dist.group.WORLD
    assert world is not None
    cpu = torch.device("cpu")
    return {group._get_backend(cpu).options._timeout for group in groups_of(world)}


def test_every_communicator_has_the_time_limit_of_the_world() -> None:
    assert len(set().union(*run_ranks(4, limits))) == 1


def never_comes(at: str, store: str) -> None:
    """Rank 1 is gone when the others connect."""
    new_world(store, 5)  # [s], in which all of them have to meet, on a busy machine, too
    grid = hs.Grid(data=2, depth=2) if at == "part" else None
    if dist.get_rank() == 1:
        time.sleep(0.3)
        os._exit(7)
    if grid is not None:
        grid.group(("depth",))
    elif at == "communicators":
        communicators_of_world()
    else:
        hs.Grid(data=2, depth=2)


@pytest.mark.parametrize(
    ("at", "what"),
    [
        ("grid", "the start of the grid"),
        ("communicators", "the start of the communicator for halos"),
        ("part", "the start of the communicator for statistics of a part of the ranks"),
    ],
)
def test_a_rank_that_does_not_come_is_said(at: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(4, never_comes, at, str(tmp_path / "store"))
    assert "rank 1: died with exit code 7" in str(caught.value)
    caught.match(f"CommError: rank 0 lost contact with another rank during {what}")
