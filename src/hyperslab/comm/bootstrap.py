"""Starts and ends the process group of the ranks under torchrun, srun, jsrun, mpirun or `--ranks`.

It knows of which ranks grids are made: all of torch's, or a part of them (`world`), which its
members alone enter (`enter_part`); ranks are numbered within it from 0 on. It takes the rank's CUDA
device, and keeps process groups from outliving torch's world (`GroupReference`).
"""

from __future__ import annotations

import atexit
import datetime
import importlib
import json
import logging
import os
import re
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from hyperslab.comm.launchers import RankVariables, adopt_launcher, read_variables
from hyperslab.comm.placement import Numbering
from hyperslab.comm.rendezvous import Deadline, Facts, answer_roll_call, in_time, meet, name_ranks
from hyperslab.errors import CommError, HyperslabError, LayoutError
from hyperslab.util.optional_libraries import current_versions
from hyperslab.util.torch_internals import (
    default_group,
    default_store,
    number_of_groups,
    set_number_of_groups,
    time_limit_of,
)

log = logging.getLogger(__name__)

GLOO_ON_CUDA = "cpu:gloo,cuda:gloo"
"""The backend by which several ranks share one CUDA device, which NCCL refuses."""

TIMEOUTS = {"gloo": 1800.0, "nccl": 600.0}
"""Limits how long [s] ranks wait for each other by default: torch's own limits."""

TELL_LIMIT = 10.0
"""Limits how long [s] a rank that cannot go on tries to tell the others."""

START_SLACK = 2.5
"""Adds to the limit of the start [s], until a rank that hangs is given up."""

MOST_SHOWN = 32
"""Limits how many ranks a log names one by one."""

NVIDIA_DEVICE_FILE = Path("/dev/nvidia0")


def start_ranks(
    device: str,
    timeout: float | None = None,
    facts: Facts | None = None,
    *,
    numbering: Numbering | None = None,
) -> bool:
    """Start ``torch.distributed`` as a recipe says; True if there was none before.

    ``device`` is "auto", "cpu", "cuda" or "cuda-shared", where several ranks may have one device
    and gloo carries what NCCL would; a rank that waits longer than ``timeout`` [s] for the others
    gives up, by default torch's own limit. One rank on the CPU of a machine with CUDA gets a
    process group of its own, so that the grid stays on the CPU too. Before anything is started the
    ranks compare their ``facts``, nested dictionaries of what JSON can say, and their versions.
    Their numbers are the launcher's, or follow from these by rank 0's ``numbering``.

    Raises:
        LayoutError: there is no CUDA device for this rank.
        HyperslabError: an environment variable of this rank is wrong or of another run.
        RecipeError: the ranks differ in their facts.
        CommError: a rank did not come in time.
        ValueError: ``device`` is another word.
    """
    if device not in ("auto", "cpu", "cuda", "cuda-shared"):
        raise ValueError(f"device {device!r}: use auto, cpu, cuda or cuda-shared")
    if dist.is_initialized():
        return False
    shared = device == "cuda-shared"
    cuda = shared or device == "cuda" or (device == "auto" and torch.cuda.is_available())
    place = adopt_launcher(os.environ)
    if device != "cpu" and not torch.cuda.is_available():
        _check_visible()
    if cuda:
        _take_device(place, shared=shared)
    if place is not None:
        backend = "nccl" if cuda else "gloo"
        limit = TIMEOUTS[backend] if timeout is None else timeout
        _start(place, GLOO_ON_CUDA if shared else backend, limit, facts or {}, numbering)
        return True
    if not cuda and torch.cuda.is_available():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return True
    return False


_SHARING_REMEDY = (
    "    let every rank see all devices of its machine\n"
    "    to test several ranks on one device: device=cuda-shared in a recipe, or before the grid\n"
    f'    torch.distributed.init_process_group("{GLOO_ON_CUDA}")'
)


def start_distributed(
    timeout: float | None = None,
    facts: Facts | None = None,
    *,
    numbering: Numbering | None = None,
) -> None:
    """Start ``torch.distributed`` if this process is a rank and nobody has; it ends at exit.

    A rank that waits longer than ``timeout`` [s] for the others gives up, by default torch's own.
    ``numbering`` is as in `start_ranks`.

    Raises:
        LayoutError: there is no CUDA device for this rank.
        HyperslabError, RecipeError, CommError: as `start_ranks`.
    """
    if dist.is_initialized() or adopt_launcher(os.environ) is None:
        return
    if start_ranks("auto", timeout, facts, numbering=numbering):
        atexit.register(stop_distributed)


def _start(
    place: RankVariables,
    backend: str,
    timeout: float,
    facts: Facts,
    numbering: Numbering | None,
) -> None:
    """Meet, agree, and start the process group, all within the limit."""
    device = torch.cuda.current_device() if backend != "gloo" else None
    bound = torch.device("cuda", device) if device is not None and backend == "nccl" else None

    def start() -> None:
        if device is not None:  # every thread has its own
            torch.cuda.set_device(device)
        deadline = Deadline(timeout)
        try:
            store = meet(place, deadline)
            wants = {**facts, "versions": current_versions()}
            own = ""
            if backend == "nccl":  # which refuses two ranks on one device, in words of its own
                own = str(torch.cuda.get_device_properties(device).uuid)
            store, numbers = answer_roll_call(
                store, place, wants, deadline, device=own, numbering=numbering
            )
            dist.init_process_group(
                backend,
                store=PrefixStore("process group", store),
                rank=numbers[place.rank],
                world_size=place.size,
                timeout=datetime.timedelta(seconds=timeout),
                device_id=bound,
            )
            _note_numbers(numbers)
        except CommError:
            raise
        except RuntimeError as error:
            raise _no_answer(place, str(error).splitlines()[0]) from error

    # Its functions have the process group of the moment of its import as a default, for good.
    importlib.import_module("torch.distributed.nn")
    in_time(timeout + START_SLACK, start, lambda: _no_answer(place, f"nothing for {timeout:g} s"))


_LAUNCHED: weakref.WeakKeyDictionary[dist.ProcessGroup, Sequence[int]]
_LAUNCHED = weakref.WeakKeyDictionary()
"""Has the launcher's number of each rank of a default process group that has others."""


def _note_numbers(numbers: Sequence[int]) -> None:
    """Keep which rank of the launcher each one is, and let the main rank log it."""
    launched = sorted(range(len(numbers)), key=numbers.__getitem__)
    if launched == [*range(len(numbers))]:
        return
    _LAUNCHED[default_group()] = launched
    if dist.get_rank() == 0:
        shown = ", ".join(map(str, launched[:MOST_SHOWN]))
        more = ", ..." if len(launched) > MOST_SHOWN else ""
        log.info("ranks are numbered by node: 0, 1, ... are their launcher's %s%s", shown, more)


def launched_as(rank: int) -> int:
    """Return the number that the launcher of this run has for a rank of `world`."""
    whole = dist.group.WORLD
    numbers = None if whole is None else _LAUNCHED.get(whole)
    rank = rank_in_torch(rank)
    return rank if numbers is None else numbers[rank]


def named(ranks: Iterable[int]) -> str:
    """Name ranks of `world`; by their launcher's numbers as well if these are others."""
    words = name_ranks(ranks := [*ranks])
    if dist.group.WORLD not in _LAUNCHED:
        return words
    return f"{words} (the launcher's {name_ranks(map(launched_as, ranks))})"


def _no_answer(place: RankVariables, why: str) -> CommError:
    return CommError(
        f"rank {place.rank} of {place.size} lost contact at {place.where} during the start: {why}\n"
        "    rank 0 has ended or does not answer, or another program has that port"
    )


def tell_ranks(problem: HyperslabError) -> None:
    """Let the others, who wait for this rank, end with its words; called before the start."""

    def tell() -> None:
        place = read_variables(os.environ)
        if place is not None and not dist.is_initialized():
            deadline = Deadline(TELL_LIMIT)
            answer_roll_call(meet(place, deadline), place, {}, deadline, problem=str(problem))

    with suppress(HyperslabError, RuntimeError):
        in_time(TELL_LIMIT, tell, lambda: CommError("no other rank answers"))


def backend_of(group: dist.ProcessGroup | None = None) -> str:
    """Return a group's backend (default: all ranks'), such as "gloo" or "cpu:gloo,cuda:nccl".

    A group that was started without a name has one for each kind of device that is there.
    """
    name = dist.get_backend(group)
    if name != "undefined":
        return name
    each = dist.get_backend_config(group)
    return "gloo" if each == "cpu:gloo" else each


def device_of_rank(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device of this rank's tensors, by a group's backend (default: all ranks').

    On a CUDA device with NCCL, or where the backend names it (`GLOO_ON_CUDA`); gloo alone is for
    the CPU. It is the device that the process group was started with, or else the current one.
    """
    if dist.is_initialized():
        backend = backend_of(group)
        if "nccl" not in backend and "cuda:" not in backend:
            return torch.device("cpu")
        bound = (group or default_group()).bound_device_id
        if bound is not None and bound.type == "cuda":
            return bound
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def take_own_device() -> torch.device:
    """Return `device_of_rank` and make it the current one, if torch was started by a program.

    Raises:
        LayoutError: every rank of this machine would take the first CUDA device.
    """
    device = device_of_rank()
    if device.type != "cuda":
        if dist.is_initialized() and torch.cuda.is_available():
            log.info(
                "the grid is on the CPU, as its process group is (%s); for CUDA devices start it "
                "with torch.distributed.init_process_group(device_id=...)",
                backend_of(),
            )
        return device
    local_rank = os.environ.get("LOCAL_RANK", "0")
    if (
        dist.is_initialized()
        and "nccl" in backend_of()
        and device.index == 0
        and default_group().bound_device_id is None
        and local_rank not in ("", "0")
        and torch.cuda.device_count() > 1
    ):
        raise LayoutError(
            f"rank {dist.get_rank()} is number {local_rank} on its machine, but it uses the first "
            f"of {torch.cuda.device_count()} CUDA devices, as the others do\n"
            f"    call torch.cuda.set_device({local_rank}) before the grid is made, or start torch "
            f'with init_process_group("nccl", device_id=torch.device("cuda", {local_rank}))'
        )
    torch.cuda.set_device(device)
    return device


def time_limit() -> datetime.timedelta:
    """Return how long a rank of the default process group waits for the others."""
    return time_limit_of(default_group(), device_of_rank())


def _check_visible() -> None:
    """Refuse a word that hides the devices of a machine that has some; "" and -1 may hide them."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if wanted not in ("", "-1") and NVIDIA_DEVICE_FILE.exists() and torch.version.cuda is not None:
        raise LayoutError(
            f"CUDA_VISIBLE_DEVICES={wanted!r} names no device of this machine\n"
            "    unset it, or ask for no device: device=cpu, or CUDA_VISIBLE_DEVICES=-1"
        )


def _take_device(place: RankVariables | None, *, shared: bool = False) -> None:
    index = 0 if place is None else place.local_rank
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # As by ``srun --gpus-per-task=1``. That no other rank was given the same device is found out
    # at the roll call.
    if count == 1 and re.fullmatch(r"\s*[^,\s]+\s*", visible):
        index = 0
    if count == 0 or (index >= count and not shared):
        raise LayoutError(
            f"local rank {index} has no CUDA device: this machine has {count}\n"
            "    start at most one rank per device, or use device=cpu"
            + (f"\n{_SHARING_REMEDY}" if count else "")
        )
    torch.cuda.set_device(index % count)


@dataclass(slots=True)
class _Part:
    """Keeps the part that this process is in, of one default process group; no ranks: in none.

    ``names``: how many groups it has made in parts, so that no name in torch's store comes twice.
    """

    ranks: tuple[int, ...] = ()
    group: weakref.ref[dist.ProcessGroup] | None = None
    names: int = 0


_PARTS: weakref.WeakKeyDictionary[dist.ProcessGroup, _Part] = weakref.WeakKeyDictionary()
"""Belongs to the default process group, as torch's own groups do, and ends with it."""

NAMES_OF_A_PART = 1_000_000
"""Spaces the names of the groups of parts, by first rank; torch counts its own from 0 on."""


def world() -> dist.ProcessGroup | None:
    """Return the process group of all ranks of which grids are made; None without one.

    Raises:
        CommError: the group of a part has ended.
    """
    whole = dist.group.WORLD
    if whole is None or not _PARTS:
        return whole
    part = _PARTS.get(whole)
    if part is None or part.group is None:
        return whole
    group = part.group()
    if group is None:
        raise CommError(f"the process group of ranks {list(part.ranks)} has ended")
    return group


def ranks_in(group: dist.ProcessGroup | None = None) -> int:
    """Count the ranks of a group, or of `world`; 1 without a process group."""
    return dist.get_world_size(group or world()) if dist.is_initialized() else 1


def own_rank() -> int:
    """Return the number of this one in `world`; 0 without a process group."""
    return dist.get_rank(world()) if dist.is_initialized() else 0


def rank_in_torch(rank: int) -> int:
    """Return the number that `torch.distributed` has for a rank of `world`."""
    part = _own_part()
    return rank if part is None else part.ranks[rank]


def _own_part() -> _Part | None:
    """Return the part that this process is in; None where grids are of all ranks."""
    whole = dist.group.WORLD
    part = _PARTS.get(whole) if _PARTS and whole is not None else None
    return part if part is not None and part.ranks else None


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the numbers in `world` of a group's ranks."""
    part = _own_part()
    ranks = dist.get_process_group_ranks(group)
    return tuple(ranks if part is None else map(part.ranks.index, ranks))


def in_part() -> bool:
    """Tell whether grids are of a part of the ranks."""
    return _own_part() is not None


def leave_part() -> None:
    """Let the next grids be of all ranks."""
    if (part := _own_part()) is not None:
        part.ranks = ()
        part.group = None


def enter_part(ranks: Sequence[int], seconds: float) -> None:
    """Let the next grids be of these ranks, ascending, which all call this; no other one need.

    Raises:
        LayoutError: one of them asks for other ranks.
        CommError: one of them did not come within so many seconds.
    """
    whole = dist.group.WORLD
    assert whole is not None
    part = _PARTS.setdefault(whole, _Part())
    if part.ranks == tuple(ranks) and part.group is not None and part.group() is not None:
        return
    leave_part()
    part.names = _meet(ranks, part.names, seconds)
    group = make_group(ranks)
    part.ranks, part.group = tuple(ranks), weakref.ref(group)


def _meet(ranks: Sequence[int], names: int, seconds: float) -> int:
    """Wait until all of these ranks want the same; return how many names any of them has taken."""
    store = default_store()
    me = dist.get_rank()
    turns = store.add(f"hyperslab turn of {me} in {list(ranks)}", 1)
    said = {"ranks": [*ranks], "turn": turns, "names": names}
    store.set(_wish(me), json.dumps(said))
    deadline = Deadline(seconds)
    most = names
    for rank in ranks:
        heard: dict[str, Any] = {}

        def wants_the_same(rank: int = rank, heard: dict[str, Any] = heard) -> bool:
            if store.check([_wish(rank)]):
                heard.update(json.loads(store.get(_wish(rank))))
            # A rank that has gone on to the next turn was here.
            return heard.get("ranks") == [*ranks] and heard["turn"] >= turns

        if not deadline.poll(wants_the_same):
            if heard.get("ranks", [*ranks]) != [*ranks]:
                raise LayoutError(
                    f"rank {me} makes a grid of the ranks {[*ranks]}, but rank {rank} last made "
                    f"one of {heard['ranks']}\n    name the same ranks on each of them"
                )
            raise CommError(
                f"rank {me} waited {seconds:g} s for rank {rank} to make a grid of the ranks "
                f"{[*ranks]}\n    each of them has to make it"
            )
        most = max(most, heard["names"])
    return most


def _wish(rank: int) -> str:
    return f"hyperslab grid of rank {rank}"


def make_group(ranks: Sequence[int] | None = None, **options: Any) -> dist.ProcessGroup:
    """Make a process group of ranks of `world`, or of all of them, who all call this.

    In a part no other rank of torch takes part, so the name comes from the part's own numbers,
    which `agree_on_group_names` has made equal, and torch's stay as they are.
    """
    whole = dist.group.WORLD
    assert whole is not None
    part = _PARTS.get(whole)
    if part is None or (not part.ranks and ranks is None):
        return dist.new_group(ranks, **options)
    of_torch = [rank_in_torch(rank) for rank in ranks or range(len(part.ranks))]
    before = number_of_groups()
    part.names += 1
    set_number_of_groups(NAMES_OF_A_PART * (1 + of_torch[0]) + part.names)
    # Torch splits communicators off that of a world which is bound to a device. That would wait for
    # all ranks of the world, so the world looks unbound while ranks of a part make theirs.
    device, whole.bound_device_id = whole.bound_device_id, None
    try:
        return dist.new_group(of_torch, device_id=device, **options)
    finally:
        whole.bound_device_id = device
        set_number_of_groups(before)


def make_own_group(parts: Sequence[Sequence[int]], **options: Any) -> dist.ProcessGroup:
    """Divide the ranks of `world` into groups and return this rank's; all of them call this."""
    if in_part():
        mine = next(part for part in parts if own_rank() in part)
        return make_group(mine, **options)
    group, _ = dist.new_subgroups_by_enumeration([list(part) for part in parts], **options)
    return group


def agree_on_group_names() -> None:
    """Let the next process groups have the same names on all ranks, which all call this.

    torch numbers the groups that a process makes, and ranks find each other under that number. A
    rank that made one more, for itself alone or in vain, would look for the others where they are
    not, or meet them in another group. A rank that has died is missed here, at once.

    Raises:
        RuntimeError: it has, or a rank did not come within the time limit.
    """
    part = _own_part()
    made = number_of_groups() if part is None else part.names
    most = torch.full((), made, device=device_of_rank())
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=world())
    if part is None:
        set_number_of_groups(int(most.item()))
    else:
        part.names = int(most.item())


class GroupReference:
    """A process group that ends with torch's world, even if something still refers to it.

    gloo's threads let go of tensors that they have sent, for which they need the interpreter; a
    process that ends with such threads aborts now and then. They end with the group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)

    def __call__(self, what: str) -> dist.ProcessGroup:
        """For ``what``, which an error names.

        Raises:
            CommError: it has ended.
        """
        group = self._group()
        if group is None:
            raise group_has_ended(what)
        return group


def group_has_ended(what: str) -> CommError:
    return CommError(
        f"{what}: the process group of this grid has ended\n"
        "    make a new hyperslab.Grid after torch.distributed.init_process_group"
    )


def stop_distributed() -> None:
    """End what was started here: gloo's threads abort a process that just exits."""
    if dist.is_initialized():
        dist.destroy_process_group()
