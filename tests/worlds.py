"""The default process groups of one rank of the pool: one for each number of ranks, and kept.

gloo sleeps ten milliseconds to end a group. The calls of a session change the number of ranks all
the time, so what they find is one of several groups, which was made before. torch knows one default
group at a time; which one that is has no public name, nor have the groups that there are.
"""

from __future__ import annotations

import datetime
import gc
import threading
from dataclasses import dataclass

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from hyperslab.comm import communicator
from tests.gpus import BACKEND

TIMEOUT = datetime.timedelta(seconds=120)
COLLECT = 16  # calls after which models in reference cycles give up their groups
BEHIND = 8  # calls whose groups may still be ending, and hold sockets
NAMES = 100_000  # torch numbers groups: so many numbers for those that are made in one world


@dataclass
class World:
    number: int
    group: dist.ProcessGroup
    names: int  # the number of the next group that is made in it


class Worlds:
    """Enter the world of a call, park it when the call has returned, leave it when it failed."""

    def __init__(self, rank: int, store: dist.Store) -> None:
        self.rank = rank
        self.store = store
        self.calls = 0
        self.kept: dict[int, World] = {}  # by the number of ranks
        self.ending: list[threading.Thread] = []

    def enter(self, number: int, size: int) -> None:
        """All ranks of a world enter it; one with a new number is made, the old one left."""
        self.calls += 1
        if self.calls % COLLECT == 0:
            collect()
        self._drop_strangers()
        if size in self.kept and self.kept[size].number != number:
            self.leave(size)
        if size not in self.kept:
            self.kept[size] = self._make(number, size)
        c10d._update_default_pg(self.kept[size].group)
        c10d._world.group_count = self.kept[size].names

    def park(self, size: int) -> bool:
        """Whether the world is still there: a call may have ended its group and all others."""
        if dist.group.WORLD is not self.kept[size].group:
            self.kept.clear()
            if dist.is_initialized():
                dist.destroy_process_group()
            return False
        self.kept[size].names = c10d._world.group_count
        c10d._update_default_pg(None)
        return True

    def leave(self, size: int) -> None:
        """End this world's group; ranks that wait for this one then fail."""
        collect()
        del self.kept[size]
        self._drop_strangers()

    def _make(self, number: int, size: int) -> World:
        c10d._world.group_count = number * NAMES
        dist.init_process_group(
            BACKEND,
            store=dist.PrefixStore(f"group {number}", self.store),
            rank=self.rank,
            world_size=size,
            timeout=TIMEOUT,
        )
        dist.barrier()  # a rank that fails at once must not leave while others still connect to it
        world = dist.group.WORLD
        assert world is not None
        return World(number, world, c10d._world.group_count)

    def _drop_strangers(self) -> None:
        """End the groups that are not kept; the last reference goes where nobody waits for gloo."""
        kept = {group for world in self.kept.values() for group in groups_of(world.group)}
        dropped = [group for group in c10d._world.pg_map if group not in kept]
        if not dropped:
            return
        for group in dropped:
            dist.destroy_process_group(group)
        del group
        self.ending.append(threading.Thread(target=dropped.clear, daemon=True))
        self.ending[-1].start()
        if len(self.ending) > BEHIND:
            self.ending.pop(0).join()


def share_device(interface: str) -> None:
    """Let all groups that this process makes from now on be on one device of gloo.

    Each has one of its own otherwise, with a thread that wakes a hundred times a second, and a
    rank has four groups for each number of ranks.
    """
    device = dist.ProcessGroupGloo.create_device(interface=interface)
    begin = dist.ProcessGroupGloo.__init__

    def begin_there(
        self: dist.ProcessGroupGloo,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
        **_: object,  # what later releases of torch add, such as `enable_reconfigure` in 2.14
    ) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = [device], timeout
        begin(self, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = begin_there  # type: ignore[method-assign, assignment]


def collect() -> None:
    """End what a call left in reference cycles."""
    gc.collect()
    # What is still there are modules and their caches. Unless they are left out next time, every
    # collection of every rank looks at all that the session has imported: half a second of eight.
    gc.freeze()


def groups_of(world: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """List a default process group and those of its communicators."""
    made = communicator._OF_WORLD.get(world)
    if made is None:
        return [world]
    purposes = (made.halos, made.statistics, made.gradients)
    return [world, *(made.group for made in (*purposes, *made.parts.values()))]
