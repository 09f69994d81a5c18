"""Lets the ranks of one run meet at a store and compares what they want before anything starts.

In reading order: a `Deadline` for calls that know none (a store waits for ever where nobody
answers); the restart epoch, which tells one start of the ranks from earlier ones in a store that
outlives them, that of torchrun's agents; `meet`, which opens or finds the store, or says why
there is none; the roll call, which finds ranks that are missing, of another run, or want another
thing.

Legend: what a rank wants are its *facts*, nested dictionaries of JSON's values. The store
carries text only, nothing that is run.
"""

from __future__ import annotations

import datetime
import errno
import itertools
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from hyperslab.comm.launchers import RUN_VARIABLE, TORCHRUN_VARIABLE, RankVariables
from hyperslab.comm.placement import Numbering, listed
from hyperslab.errors import CommError, HyperslabError, LayoutError, RecipeError, reason

log = logging.getLogger("hyperslab")

T = TypeVar("T")

POLL_PAUSES = (0.002, 0.25)  # [s] between two looks, the first and the longest


class Deadline:
    """Counts seconds from now on until a limit."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Return the time left [s], 0 at the least."""
        return max(0.0, self._end - time.monotonic())

    def poll(self, found: Callable[[], bool]) -> bool:
        """Look until it is found, in ever longer pauses; whether it was in time."""
        pause, longest = POLL_PAUSES
        while not found():
            if not self.left:
                return False
            time.sleep(min(pause, self.left))
            pause = min(2 * pause, longest)
        return True


def beside(make: Callable[[], T]) -> Future[T]:
    """Run ``make`` on a thread of its own, which no end of the process waits for.

    Not for a thread that has used tensors and ends with the process: what it leaves asks for the
    interpreter once more, and where that is gone it aborts the process. Such a thread is joined.
    """
    outcome: Future[T] = Future()
    name = getattr(make, "__name__", None)
    threading.Thread(target=settle, args=(outcome, make), name=name, daemon=True).start()
    return outcome


def settle(outcome: Future[T], make: Callable[[], T]) -> None:
    """Give a future what ``make`` returns or raises."""
    try:
        outcome.set_result(make())
    except BaseException as error:
        outcome.set_exception(error)


def in_time(seconds: float, make: Callable[[], T], late: Callable[[], CommError]) -> T:
    """Return or raise what ``make`` does, which runs on a thread of its own.

    A thread that hangs is left behind: torch cannot be told to give up a connection.

    Raises:
        CommError: ``late()``, after so many seconds.
    """
    outcome = beside(make)
    if wait([outcome], seconds).not_done:
        raise late()
    return outcome.result()


def agree_on_restart_epoch(
    store: Store, place: RankVariables, deadline: Deadline, connect: Callable[[], Store]
) -> Store:
    """Return the part of ``store`` that belongs to this start of the ranks alone.

    torchrun's own count of restarts does not say it: every node counts those that it began itself,
    so after the loss of a rank the nodes' counts may differ. ``connect`` makes another connection
    to the store.

    Distribution scheme:
      1. Every rank but the first leaves a word that is new under its number.
      2. Rank 0 answers each such word with its own, in the background, until all have read it.
         It may answer a rank of an earlier start, which is dead and does not read it.

    Raises:
        CommError: rank 0 did not come in time.
    """
    word = secrets.token_hex(16)

    def answer_all() -> None:
        answered = dict.fromkeys(range(1, place.size), b"")
        own_connection = connect()
        deadline.poll(lambda: _all_answered(own_connection, word, answered))

    if place.rank == 0:
        beside(answer_all)  # where the store is gone the rank itself, waiting there, says so
        return PrefixStore(f"hyperslab/start {word}", store)
    store.set(f"hyperslab/word {place.rank}", word)
    answer = f"hyperslab/answer {word}"
    if not deadline.poll(lambda: store.check([answer])):
        raise rank_0_missing(place, deadline)
    found = store.get(answer).decode()
    store.set(f"hyperslab/start {found}/read {place.rank}", "")
    return PrefixStore(f"hyperslab/start {found}", store)


def _all_answered(store: Store, word: str, answered: dict[int, bytes]) -> bool:
    """Answer new words; ``answered``: by rank that has not read it yet, its word of the last."""
    for rank, known in list(answered.items()):
        if store.check([f"hyperslab/start {word}/read {rank}"]):
            del answered[rank]
        elif store.check([f"hyperslab/word {rank}"]):
            theirs = store.get(f"hyperslab/word {rank}")
            if theirs != known:
                store.set(f"hyperslab/answer {theirs.decode()}", word)
                answered[rank] = theirs
    return not answered


def rank_0_missing(place: RankVariables, deadline: Deadline) -> CommError:
    """Say what a rank lacked that came and waited."""
    return CommError(
        f"rank 0 did not come to {place.where} within {deadline.seconds:g} s: rank "
        f"{place.rank} of {place.size} is there\n    check that all ranks were started"
    )


RESOLVE_LIMIT = 30.0
"""Limits how long [s] the name of the first rank's machine may be unknown: it may be starting."""


def meet(place: RankVariables, deadline: Deadline) -> Store:
    """Return the store of these ranks: the launcher's file, torchrun's, or one that rank 0 opens.

    Raises:
        HyperslabError: MASTER_PORT is taken, or MASTER_ADDR does not resolve.
        CommError: nobody answers there in time.
    """
    limit = datetime.timedelta(seconds=max(deadline.left, 1.0))
    if place.store is not None:
        store: Store = dist.FileStore(place.store, place.size)  # type: ignore[attr-defined]
        store.set_timeout(limit)
        return store
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _connect_to_store(place, deadline, limit)
        return agree_on_restart_epoch(
            store, place, deadline, lambda: _connect_to_store(place, deadline, limit)
        )
    if place.port == 0:
        return dist.HashStore()  # type: ignore[attr-defined]
    if place.rank > 0:
        return _connect_to_store(place, deadline, limit)
    with _open_listener(place) as listener:
        return dist.TCPStore(  # type: ignore[attr-defined]
            place.address,
            place.port,
            place.size,
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def _connect_to_store(place: RankVariables, deadline: Deadline, limit: datetime.timedelta) -> Store:
    """Wait until somebody listens there: torch tries as long, but says so in pages of its own."""
    resolve = Deadline(min(RESOLVE_LIMIT, deadline.left))
    problem: OSError | None = None

    def tried() -> bool:
        nonlocal problem
        problem = None
        try:
            socket.create_connection((place.address, place.port), max(deadline.left, 0.1)).close()
        except OSError as error:
            problem = error
        given_up = isinstance(problem, socket.gaierror) and not resolve.left
        return problem is None or given_up

    deadline.poll(tried)
    if isinstance(problem, socket.gaierror):
        raise _unknown_host(place, problem)
    if problem is not None:
        raise CommError(
            f"rank {place.rank} of {place.size} does not reach rank 0 at {place.where} within "
            f"{deadline.seconds:g} s: {reason(problem)}\n"
            "    check that rank 0 was started, and that address and port are those of its machine"
        )
    return dist.TCPStore(  # type: ignore[attr-defined]
        place.address, place.port, place.size, timeout=limit, wait_for_workers=False
    )


def _open_listener(place: RankVariables) -> socket.socket:
    """Listen at MASTER_ADDR alone; everywhere if only others know this machine by that name."""
    try:
        found = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _unknown_host(place, error) from None
    family, _, _, _, address = found[0]
    problem = OSError()
    for where, kind in ((address[:2], family), (("", place.port), socket.AF_INET)):
        try:
            return socket.create_server(where, family=kind, backlog=4096)
        except OSError as error:
            problem = error
        if problem.errno != errno.EADDRNOTAVAIL:
            break
    raise HyperslabError(
        f"rank 0 cannot listen at {place.where}: {reason(problem)}\n"
        "    another program or run may have that port: give all ranks another MASTER_PORT"
    ) from None


def _unknown_host(place: RankVariables, error: OSError) -> HyperslabError:
    return HyperslabError(
        f"MASTER_ADDR={place.address!r} is not the name of a machine: {error.strerror}\n"
        "    give all ranks the name or the address of rank 0's machine"
    )


VERDICT_WAIT = 2.0  # [s] that rank 0 waits for the others to read why it ends

MOST_NAMED = 4  # keys and hosts that an error names

Facts = Mapping[str, Any]

VERDICTS: dict[str, type[HyperslabError]] = {
    "lost": CommError,
    "problem": HyperslabError,
    "shared": LayoutError,
    "differ": RecipeError,
}
"""Maps what is wrong to the error that all ranks raise."""


def answer_roll_call(
    store: Store,
    place: RankVariables,
    facts: Facts,
    deadline: Deadline,
    *,
    problem: str = "",
    device: str = "",
    numbering: Numbering | None = None,
) -> tuple[Store, Sequence[int]]:
    """Agree with all other ranks; return the part of the store that is this start's own.

    With it come the numbers of all ranks from now on, by those that they have from their launcher:
    the same ones, or what rank 0's ``numbering`` says, which keeps its own. A rank with a
    ``problem`` cannot go on; all ranks then end with its words. ``device`` is the name of what no
    other rank may have, if there is such a thing.

    Distribution scheme:
      1. Rank 0 writes down which run this is; the others compare.
      2. Every rank takes its number, which nobody else must have, and writes down its facts and
         where it runs.
      3. Rank 0 waits for their count and reads those of all in one request. It writes down what is
         wrong, if something is, or the ranks' new numbers, if they have others.
      4. Every rank reads that.

    Raises:
        HyperslabError: this rank is of another run, or its number is taken, or one has a problem.
        CommError: a rank did not come in time; names all that did not.
        LayoutError: two ranks have one device.
        RecipeError: two ranks want different things; names the first difference.
    """
    _compare_runs(store, place, deadline)
    turn = _take_number(store, place, deadline)
    store = PrefixStore(f"turn {turn}", store)
    mine = {"host": socket.gethostname(), "problem": problem, "device": device, "facts": facts}
    store.set(f"rank {place.rank}", json.dumps(mine))
    store.add("came", 1)
    if problem:
        store.compare_set("problem", "", str(place.rank))
    if place.rank == 0:
        kind, words, numbers = _find_verdict(store, place, deadline, numbering)
        store.set("verdict", json.dumps({"kind": kind, "words": words, "numbers": numbers}))
        if words:
            others = len(_ranks_present(store, place)) - 1
            Deadline(VERDICT_WAIT).poll(lambda: store.add("read", 0) >= others)
    else:
        if not deadline.poll(lambda: store.check(["verdict"])):
            raise _ranks_missing(store, place, deadline)
        kind, words, numbers = json.loads(store.get("verdict")).values()
        store.add("read", 1)
    if words:
        raise VERDICTS[kind](words)
    return store, numbers or range(place.size)


def _compare_runs(store: Store, place: RankVariables, deadline: Deadline) -> None:
    """Tell a run from others by environment variables, which are the same on all its ranks."""
    names = (RUN_VARIABLE, TORCHRUN_VARIABLE)
    mine = {name: os.environ[name] for name in names if name in os.environ}
    mine["WORLD_SIZE"] = str(place.size)
    if place.rank == 0:
        store.compare_set("run", "", json.dumps(mine))
    elif not deadline.poll(lambda: store.check(["run"])):
        raise rank_0_missing(place, deadline)
    theirs = json.loads(store.get("run"))
    if theirs != mine:
        name = next(n for n in (*mine, *theirs) if mine.get(n) != theirs.get(n))
        raise HyperslabError(
            f"rank {place.rank} belongs to another run than those at {place.where}: its {name} is "
            f"{mine.get(name, 'not set')}, theirs is {theirs.get(name, 'not set')}\n"
            "    two runs on one machine need a MASTER_PORT each"
        )


def _take_number(store: Store, place: RankVariables, deadline: Deadline) -> int:
    """Count how often this rank has started here; a program may do so several times."""
    me = f"process {os.getpid()} on {socket.gethostname()}"
    turn = store.add(f"starts {place.rank}", 1)
    store.set(f"process {place.rank} {turn}", me)
    if turn > 1:
        before = f"process {place.rank} {turn - 1}"
        found = deadline.poll(lambda: store.check([before]))
        other = store.get(before).decode() if found else "another process"
        if other != me:
            raise HyperslabError(
                f"RANK={place.rank} is taken: {other} came to {place.where} before {me}\n"
                "    every rank needs a number of its own, and every run a MASTER_PORT"
            )
    return turn


def _find_verdict(
    store: Store, place: RankVariables, deadline: Deadline, numbering: Numbering | None
) -> tuple[str, str, Sequence[int]]:
    """Return the kind and the words of an error if something is wrong with the ranks.

    If nothing is, return their new numbers, none if they keep theirs.
    """
    if not deadline.poll(lambda: store.add("came", 0) == place.size or store.check(["problem"])):
        return "lost", str(_ranks_missing(store, place, deadline)), ()
    if store.check(["problem"]):
        rank = int(store.get("problem"))
        words = json.loads(store.get(f"rank {rank}"))["problem"]
        return "problem", f"rank {rank} says: {words}", ()
    found = [*map(json.loads, store.multi_get([f"rank {rank}" for rank in range(place.size)]))]
    hosts = [one["host"] for one in found]
    users: dict[str, list[int]] = defaultdict(list)
    for rank, one in enumerate(found):
        users[one["device"]].append(rank)
    for device, ranks in users.items():
        if device and len(ranks) > 1:
            words = (
                f"{name_ranks(ranks)} have the same CUDA device, {device}\n"
                "    let every rank see all devices of its machine (srun --gpus-per-node=4),\n"
                "    or give each one of its own; to test several on one: device=cuda-shared in "
                "a recipe"
            )
            return "shared", words, ()
    if words := compare_facts([one["facts"] for one in found], hosts):
        return "differ", words, ()
    if numbering is None:
        if why := interleaved_nodes(hosts):
            log.warning("%s", why)
        return "", "", ()
    numbers = numbering(hosts)
    return "", "", () if [*numbers] == [*range(place.size)] else numbers


def _ranks_present(store: Store, place: RankVariables) -> list[int]:
    return [rank for rank in range(place.size) if store.check([f"rank {rank}"])]


def _ranks_missing(store: Store, place: RankVariables, deadline: Deadline) -> CommError:
    came = _ranks_present(store, place)
    others = [rank for rank in range(place.size) if rank not in came] or [0]
    return CommError(
        f"{name_ranks(others)} did not come to {place.where} within {deadline.seconds:g} s: "
        f"{name_ranks(came)} of {place.size} did\n"
        "    check that all were started, and read the output of those that did not come"
    )


def interleaved_nodes(hosts: Sequence[str]) -> str:
    """Say that the ranks of a node do not follow each other, given each rank's; "" if they do.

    >>> interleaved_nodes(["n1", "n1", "n2", "n2"])
    ''
    >>> interleaved_nodes(["n1", "n2", "n1", "n2"])[:39]
    'the ranks of a node do not follow each '
    """
    changes = sum(one != other for one, other in itertools.pairwise(hosts))
    if changes < len({*hosts}):
        return ""
    return (
        "the ranks of a node do not follow each other, so that neighbours talk over the network if "
        "a program starts torch.distributed itself: srun --distribution=block, or mpirun --map-by "
        "slot"
    )


def compare_facts(facts: list[Facts], hosts: list[str]) -> str:
    """Find the first key in whose values the ranks differ, with them; empty if there is none.

    >>> print(compare_facts([{"a": {"b": 1}}, {"a": {"b": 2}}, {"a": {"b": 2}}], ["n1"] * 3))
    the ranks differ in a.b: 1 on rank 0, 2 on ranks 1 and 2
        start all ranks with the same command, recipe and versions
    """
    if len({json.dumps(one) for one in facts}) == 1:  # Python takes 1 and 1.0 and True for equal
        return ""
    flat = [_flatten_facts(one) for one in facts]
    keys = dict.fromkeys(key for one in flat for key in one)
    differing = [key for key in keys if any(one.get(key) != flat[0].get(key) for one in flat)]
    if not differing:
        return ""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, one in enumerate(flat):
        ranks[one.get(differing[0], "nothing")].append(rank)
    several = len({*hosts}) > 1
    values = [
        f"{value} on {name_ranks(r)}" + (f" ({_name_some(hosts[i] for i in r)})" if several else "")
        for value, r in ranks.items()
    ]
    also = f"\n    and in {_name_some(differing[1:])}" if differing[1:] else ""
    return (
        f"the ranks differ in {differing[0]}: {', '.join(values)}{also}\n"
        "    start all ranks with the same command, recipe and versions"
    )


def name_ranks(ranks: Iterable[int]) -> str:
    """
    >>> name_ranks([3]), name_ranks([0, 1, 2, 5, 7, 8])
    ('rank 3', 'ranks 0 to 2, 5, 7 and 8')
    """
    known = sorted(ranks)
    parts: list[str] = []
    # Ranks that follow each other are as far from their places in the list.
    for _, run in itertools.groupby(enumerate(known), key=lambda pair: pair[1] - pair[0]):
        first, *rest = (rank for _, rank in run)
        parts += [f"{first} to {rest[-1]}"] if len(rest) > 1 else map(str, [first, *rest])
    return f"rank{'s' * (len(known) != 1)} {listed(parts)}"


def _flatten_facts(facts: Facts, key: str = "") -> dict[str, str]:
    """Return dotted keys and values as JSON."""
    found: dict[str, str] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            found |= _flatten_facts(value, f"{key}{name}.")
        else:
            found[f"{key}{name}"] = json.dumps(value)
    return found


def _name_some(words: Iterable[str]) -> str:
    unique = [*dict.fromkeys(words)]
    more = f" and {len(unique) - MOST_NAMED} more" if len(unique) > MOST_NAMED else ""
    return ", ".join(unique[:MOST_NAMED]) + more
