"""The communicators of all ranks, one for each purpose.

On a GPU what goes through one communicator waits in line, on one stream. So halos, which the next
operator needs, have one of their own, with priority; so have statistics and the gradients, which
travel behind the backward pass.
"""

from __future__ import annotations

import resource
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from hyperslab.comm.agreement import keeping_contact
from hyperslab.comm.bootstrap import device_of_rank, time_limit
from hyperslab.comm.communicator import GroupCommunicator

Parts = tuple[tuple[int, ...], ...]
"""All ranks, each in one part."""


@dataclass(frozen=True, slots=True)
class Communicators:
    """Over all ranks, one for each purpose; `torch.distributed`'s own is for everything else.

    ``parts``: for sums over a part of the ranks, this rank's; grids with the same parts share them.
    """

    halos: GroupCommunicator
    statistics: GroupCommunicator
    gradients: GroupCommunicator
    parts: dict[Parts, GroupCommunicator] = field(default_factory=dict)


_OF_WORLD: weakref.WeakKeyDictionary[dist.ProcessGroup, Communicators] = weakref.WeakKeyDictionary()
"""Belong to the default process group, which may have several grids, and end with it."""


def communicators_of_world() -> Communicators:
    """Those of the default process group; all ranks make them together at the first call.

    Raises:
        CommError: a rank died or did not come within the time limit.
    """
    world = dist.group.WORLD
    assert world is not None
    if world not in _OF_WORLD:
        _allow_files()
        _OF_WORLD[world] = Communicators(
            halos=_over_all("halos", urgent=True),
            statistics=_over_all("statistics"),
            gradients=_over_all("gradients"),
        )
    return _OF_WORLD[world]


def communicator_of_part(parts: Sequence[Sequence[int]]) -> GroupCommunicator:
    """The one of the part that this rank is in; all ranks call this with the same parts.

    Raises:
        CommError: a rank died or did not come within the time limit.
    """
    made = communicators_of_world().parts
    key = tuple(map(tuple, parts))
    if key not in made:
        with keeping_contact("the start of the communicator for statistics of a part of the ranks"):
            agree_on_group_names()
            enumeration = [list(part) for part in key]
            group, _ = dist.new_subgroups_by_enumeration(enumeration, timeout=time_limit())
            made[key] = _met(group)
    return made[key]


def agree_on_group_names() -> None:
    """Let the next process groups have the same names on all ranks, which all call this.

    torch numbers the groups that a process makes, and ranks find each other under that number. A
    rank that made one more, for itself alone or in vain, would look for the others where they are
    not, or meet them in another group. A rank that has died is missed here, at once.

    Raises:
        RuntimeError: it has, or a rank did not come within the time limit.
    """
    torchs = dist.distributed_c10d._world
    made = torch.full((), torchs.group_count, device=device_of_rank())
    dist.all_reduce(made, op=dist.ReduceOp.MAX)
    torchs.group_count = int(made.item())


def groups_of(world: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """A default process group and those of its communicators."""
    made = _OF_WORLD.get(world)
    if made is None:
        return [world]
    purposes = (made.halos, made.statistics, made.gradients)
    return [world, *(made.group for made in (*purposes, *made.parts.values()))]


def _over_all(purpose: str, *, urgent: bool = False) -> GroupCommunicator:
    """``urgent``: its kernels go before others that wait for the device."""
    options = None
    if urgent and "nccl" in dist.get_backend():
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = time_limit()  # torch warns where it differs from the group's
    with keeping_contact(f"the start of the communicator for {purpose}"):
        agree_on_group_names()
        return _met(dist.new_group(timeout=time_limit(), pg_options=options))


def _met(group: dist.ProcessGroup) -> GroupCommunicator:
    """Once all its ranks have met there.

    Nobody must leave it while others still connect to it, and NCCL connects at the first call, for
    which it needs all ranks: that must not be a message between two of them.
    """
    here = torch.zeros(1, device=device_of_rank(group))
    dist.all_reduce(here, group=group)
    here.item()  # on a GPU it has only been queued so far
    return GroupCommunicator(group)


def _allow_files() -> None:
    """Let this process open as many files as the system allows it.

    gloo connects every pair of ranks in every group: with 200 ranks they are more than the 1024
    that a process may open unless it asks for more.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # where "unlimited" is more than the kernel gives
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
