"""Makes ranks agree: who decides, who has failed, who does not answer any more.

The functions up to `start_alike` are collective: every rank of the process group calls them in
the same order. One rank alone, with a process group or without, agrees with itself.
`lost_contact` and `keeping_contact` name a lost rank in an error. `failure_broadcast` publishes
the first failing rank's error, so that the others report the cause and not "connection lost".
"""

from __future__ import annotations

import json
import pickle
import re
import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from hyperslab.comm.bootstrap import (
    backend_of,
    device_of_rank,
    in_part,
    named,
    own_rank,
    rank_in_torch,
    ranks_in,
    start_ranks,
    world,
)
from hyperslab.comm.placement import Numbering
from hyperslab.comm.rendezvous import Deadline, Facts, compare_facts, in_time
from hyperslab.errors import CommError, DataError, HyperslabError, RecipeError, Stopped, reason
from hyperslab.util.optional_libraries import current_versions
from hyperslab.util.torch_internals import (
    abort_groups,
    default_store,
    tree_leaves,
    tree_map_only,
)

T = TypeVar("T")

AGREEMENT = "an agreement of ranks"

LOST_RANK_WORDS = re.compile(
    r"gloo|nccl|connection closed|connection reset|timed out|timeout", re.IGNORECASE
)
"""Matches what torch's errors say where another rank was lost."""

OUT_OF_STEP_WORDS = re.compile(
    r"no answer within|timed out|timeout|data size|rank mismatch|preamble", re.IGNORECASE
)
"""Matches what errors say where another rank may be at another place of the program."""

OUT_OF_STEP = (
    "run the same operations in the same order on every rank; where a branch depends on random "
    "numbers\n    (a layer that is dropped), Python's and NumPy's differ between replicas: draw "
    "from torch's generator,\n    or seed the others alike on all ranks after "
    "hyperslab.parallelize (random.seed(0), numpy.random.seed(0))"
)
"""Tells what ranks that are at different places of a program probably differ in."""

Group = dist.ProcessGroup | None
"""``None`` is all ranks."""

RankReport = tuple[int, Exception | None]
"""Holds a rank and what went wrong there."""


def broadcast_from_main(
    make: Callable[[], T],
    *,
    failing: str = "",
    error: type[HyperslabError] = DataError,
    group: Group = None,
) -> T:
    """Return or raise on every rank what ``make`` does on the main one.

    With ``failing`` an exception of another library becomes ``error``: those words and the reason.
    It mostly comes from a file. A ``group`` has the main rank and all others.
    """
    if ranks_in() == 1:
        return _call(make, failing, error)
    outcome: list[T | Exception | None] = [None, None]
    if own_rank() == 0:
        try:
            outcome[0] = _call(make, failing, error)
        except Exception as problem:
            outcome[1] = _picklable(problem)
    with keeping_contact(AGREEMENT):
        dist.broadcast_object_list(outcome, group=group or world(), group_src=0)
    if isinstance(outcome[1], Exception):
        raise outcome[1]
    return cast(T, outcome[0])


def tensors_from_main(make: Callable[[], T]) -> T:
    """Return or raise on every rank what ``make`` does on the main one, which alone runs it.

    As `broadcast_from_main`, for tensors of the host in lists, tuples and dictionaries: they travel
    as they are, one by one, and so each rank needs no more memory than they take.

    Distribution scheme: 1. the main rank makes it, and says what it is without the values of its
    tensors; 2. all others make room; 3. tensor by tensor is broadcast.
    """
    if ranks_in() == 1:
        return make()
    held: list[T] = []  # on the main rank

    def plain(tensor: torch.Tensor) -> torch.Tensor:
        # Lazily conjugated values are no bytes to send: resolved here, where all ranks hear errors.
        return tensor.detach().resolve_conj().resolve_neg().contiguous()

    def describe() -> Any:
        held.append(tree_map_only(torch.Tensor, plain, make()))
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), held[0])

    form = broadcast_from_main(describe)

    def make_room() -> T:
        empty = partial(torch.empty_like, device="cpu")
        return held[0] if held else tree_map_only(torch.Tensor, empty, form)

    found = collective_try(make_room)
    device = device_of_rank()
    with keeping_contact(AGREEMENT):
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                values = tensor.view(-1).view(torch.uint8)
                there = values.to(device)  # itself, where the ranks talk by gloo
                dist.broadcast(there, group=world(), group_src=0)
                if there is not values:
                    values.copy_(there)
    return found


def all_gather(mine: T, group: Group = None) -> list[T]:
    """Return what every rank has, by rank.

    Each rank then holds what all have: for small things, and for what only few have.
    """
    size = ranks_in(group)
    if size == 1:
        return [mine]
    found: list[T | None] = [None] * size
    with keeping_contact(AGREEMENT):
        dist.all_gather_object(found, mine, group=group or world())
    return cast(list[T], found)


def collective_try(
    make: Callable[[], T],
    *,
    failing: str = "",
    error: type[HyperslabError] = DataError,
    gather: Callable[[RankReport], Sequence[RankReport]] = all_gather,
) -> T:
    """Return what ``make`` returns once every rank has it, or raise on all ranks.

    A rank that just went on would wait for one that has given up. Where nobody has, that is one
    sum of a byte; reports are gathered after a failure alone. ``failing`` and ``error`` are
    as in `broadcast_from_main`; ``gather`` is how the ranks hear of each other, by default all of
    them.

    Raises:
        Exception: what ``make`` raised here; else what it raised on the first rank that failed,
            with the number of that rank in front.
        CommError: at once and without asking: this rank lost another one.
    """
    problem: Exception | None = None
    try:
        result = _call(make, failing, error)
    except CommError:
        raise
    except Exception as caught:
        problem = caught
    if gather is all_gather and not any_rank(problem is not None):
        return result
    found = gather((own_rank(), None if problem is None else _picklable(problem)))
    if problem is not None:
        raise problem
    for rank, other in found:
        if isinstance(other, HyperslabError):
            other.args = (f"{named([rank])} says: {other}", *other.args[1:])
            raise other
        if other is not None:
            raise HyperslabError(f"{named([rank])} says: {reason(other)}")
    return result


def any_rank(flag: bool, group: Group = None, *, what: str = AGREEMENT) -> bool:
    """Tell whether any rank has it set; ``what`` as in `agree_on`."""
    if ranks_in(group) == 1:
        return flag
    found = torch.full((1,), int(flag), dtype=torch.uint8, device=device_of_rank(group))
    with keeping_contact(what):
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group or world())
    return bool(found.item())


def same_on_all(number: int, what: str = AGREEMENT) -> bool:
    """Tell whether all ranks have the same number, such as the checksum of something larger."""
    if ranks_in() == 1:
        return True
    found = torch.full((2,), int(number), device=device_of_rank())
    found[1].neg_()
    with keeping_contact(what):
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=world())
    most, least = found.tolist()
    return bool(most == -least)


def agree_on(facts: Facts, what: str = AGREEMENT) -> None:
    """Make sure that all ranks want the same; ``facts`` as in `roll_call`.

    ``what`` this belongs to, for the error of a rank that loses another one.

    Raises:
        RecipeError: two ranks do not; names the first difference.
    """
    if difference := difference_of_ranks(facts, what):
        raise RecipeError(difference)


def difference_of_ranks(facts: Facts, what: str = AGREEMENT) -> str | None:
    """Say in what the ranks' facts differ; None if they are equal, "" if in their order alone."""
    words = json.dumps(facts)
    if same_on_all(zlib.crc32(words.encode()), what):
        return None
    found = all_gather((socket.gethostname(), words))
    return compare_facts([json.loads(theirs) for _, theirs in found], [host for host, _ in found])


def start_alike(device: str, timeout: float, facts: Facts, numbering: Numbering) -> bool:
    """`start_ranks`; where ``torch.distributed`` runs already, the ranks agree by it."""
    started = start_ranks(device, timeout, facts, numbering=numbering)
    if not started:
        agree_on({**facts, "versions": current_versions()})
    return started


def lost_contact(rank: int, peers: Sequence[int], what: str, why: object) -> CommError:
    """Return the error of ``rank``, to which one of ``peers`` does not answer during ``what``.

    Without ``peers`` nobody knows which one, unless there is only one other. Of ``why``, an
    exception or words, the first line is quoted.
    """
    if not peers and ranks_in() == 2:
        peers = [1 - rank]
    who = named({*peers} - {rank}) if peers else "another rank"
    words = str(why).strip()
    first = words.splitlines()[0] if words else type(why).__name__
    first = first.partition(" This is typically caused by")[0]  # gloo's guesses, and good wishes
    hint = f"\n    {OUT_OF_STEP}" if OUT_OF_STEP_WORDS.search(words) else ""
    return CommError(f"{named([rank])} lost contact with {who} during {what}: {first}{hint}")


@contextmanager
def naming_lost_ranks(what: str, remedy: str) -> Iterator[None]:
    """Turn an error that torch raises where another rank was lost into a `CommError`; no other."""
    try:
        yield
    except HyperslabError:
        raise
    except RuntimeError as error:
        if ranks_in() == 1 or not LOST_RANK_WORDS.search(str(error)):
            raise
        lost = lost_contact(own_rank(), (), what, error)
        raise CommError(f"{lost}\n    {remedy}") from error


@contextmanager
def keeping_contact(what: str) -> Iterator[None]:
    """Turn what `torch.distributed` raises during ``what`` into a `CommError` that names it."""
    try:
        yield
    except CommError:
        raise
    except RuntimeError as problem:
        raise lost_contact(own_rank(), (), what, problem) from problem


def _call(make: Callable[[], T], failing: str, error: type[HyperslabError]) -> T:
    try:
        return make()
    except HyperslabError:
        raise
    except Exception as problem:
        if not failing:
            raise
        raise error(f"{failing}: {reason(problem)}") from problem


def _picklable(problem: Exception) -> Exception:
    """Return the same error, or one in its words if other ranks could not read it."""
    try:
        pickle.loads(pickle.dumps(problem))
    except Exception:
        return HyperslabError(reason(problem))
    return problem


HEAR_LIMIT = 1.0
"""Limits how long [s] a rank that lost another one looks for its words, which may come late."""

FAILURE_KEY = "last words"


@contextmanager
def failure_broadcast() -> Iterator[None]:
    """Publish what a rank raises inside, so that others which lose contact with it say why.

    Of several that fail, the first. Where none says anything, the error names those of whom nothing
    is heard. Without a process group it does nothing.
    """
    turn = ask_store(lambda store: store.add(f"{FAILURE_KEY} {own_rank()}", 1))
    key = f"{FAILURE_KEY} of turn {turn}"  # the words of an earlier failure are not of this one
    try:
        yield
    except CommError as error:
        heard = ask_store(lambda store: _read_failure(store, key))
        if heard is None:
            raise
        raise CommError(heard if heard.startswith("rank") else f"{error}\n    {heard}") from error
    except Stopped:
        raise
    except Exception as error:
        words = str(error) if isinstance(error, HyperslabError) else reason(error)
        ask_store(lambda store: _publish_failure(store, key, words))
        if ranks_in() > 1 and "nccl" in backend_of():
            # What is queued would keep the device, and the others, until torch's own limit.
            abort_groups()
        raise


def failure_of_others() -> str | None:
    """Return what another rank has said that failed inside `failure_broadcast`; None so far."""

    def read(store: Store) -> str | None:
        turn = store.add(f"{FAILURE_KEY} {own_rank()}", 0)
        key = f"{FAILURE_KEY} of turn {turn}"
        return _words_of_other(store, key) if store.check([key]) else None

    return ask_store(read)


def _words_of_other(store: Store, key: str) -> str | None:
    rank, words = json.loads(store.get(key))
    return None if rank == own_rank() else f"{named([rank])} says: {words}"


def ask_store(speak: Callable[[Store], T]) -> T | None:
    """Return what a call does; None where the store has ended or does not answer."""
    if ranks_in() == 1:
        return None
    with suppress(CommError, RuntimeError, ValueError):
        store = default_store()
        if in_part():  # other parts speak there, too
            store = PrefixStore(f"part of rank {rank_in_torch(0)}", store)
        return in_time(2 * HEAR_LIMIT, lambda: speak(store), lambda: CommError("no store"))
    return None


def _publish_failure(store: Store, key: str, words: str) -> None:
    said = json.dumps([own_rank(), words])
    store.compare_set(key, "", said)
    if own_rank() == 0:  # the store may end with this process
        others = ranks_in() - 1
        Deadline(HEAR_LIMIT).poll(lambda: store.add(f"{key} heard", 0) >= others)


def _read_failure(store: Store, key: str) -> str | None:
    """Return the words of the first rank that failed; if there are none, name the silent ranks.

    That is who was lost, or has not noticed yet that somebody was.
    """
    me, size = own_rank(), ranks_in()
    store.set(f"{key} lost {me}", "")
    if Deadline(HEAR_LIMIT).poll(lambda: store.check([key])):
        store.add(f"{key} heard", 1)
        return _words_of_other(store, key)
    silent = [rank for rank in range(size) if not store.check([f"{key} lost {rank}"])]
    return f"nothing was heard from {named(silent)}" if silent and size > 2 else None
