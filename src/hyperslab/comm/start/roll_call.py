"""Who comes, and whether all are of one run and want the same: before anything else is started.

Legend: what a rank wants are its *facts*, nested dictionaries of JSON's values. The store carries
text only, nothing that is run.
"""

from __future__ import annotations

import json
import os
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from hyperslab.comm.start.attempt import rank_0_missing
from hyperslab.comm.start.deadline import Deadline
from hyperslab.comm.start.variables import RUN, RankVariables
from hyperslab.errors import CommError, HyperslabError, LayoutError, RecipeError

LAST = 2.0  # [s] that rank 0 waits for the others to read why it ends

MOST_NAMED = 4  # keys and hosts that an error names

Facts = Mapping[str, Any]

VERDICTS: dict[str, type[HyperslabError]] = {
    "lost": CommError,
    "problem": HyperslabError,
    "shared": LayoutError,
    "differ": RecipeError,
}
"""The errors that all ranks raise, by what is wrong."""


def answer_roll_call(
    store: Store,
    place: RankVariables,
    facts: Facts,
    deadline: Deadline,
    *,
    problem: str = "",
    device: str = "",
) -> Store:
    """Agree with all other ranks; the part of the store that is this start's own.

    A rank with a ``problem`` cannot go on; all ranks then end with its words. ``device`` is the
    name of what no other rank may have, if there is such a thing.

    Distribution scheme:
      1. Rank 0 writes down which run this is; the others compare.
      2. Every rank takes its number, which nobody else must have, and writes down its facts.
      3. Rank 0 reads those of all and writes down what is wrong, if something is.
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
    host = socket.gethostname()
    mine = {"host": host, "problem": problem, "device": device, "facts": facts}
    store.set(f"facts {place.rank}", json.dumps(mine))
    if problem:
        store.compare_set("problem", "", str(place.rank))
    if place.rank == 0:
        verdict = _judge(store, place, deadline)
        store.set("verdict", json.dumps(verdict))
        if verdict["words"]:
            others = len(_came(store, place)) - 1
            Deadline(LAST).poll(lambda: store.add("read", 0) >= others)
    else:
        if not deadline.poll(lambda: store.check(["verdict"])):
            raise _missing(_came(store, place), place, deadline)
        verdict = json.loads(store.get("verdict"))
        store.add("read", 1)
    if verdict["words"]:
        raise VERDICTS[verdict["kind"]](verdict["words"])
    return store


def identity(environ: Mapping[str, str], size: int) -> dict[str, str]:
    """What tells a run from others, by the variables that say so: the same on all its ranks."""
    found = {name: environ[name] for name in (RUN, "TORCHELASTIC_RUN_ID") if name in environ}
    return found | {"WORLD_SIZE": str(size)}


def _compare_runs(store: Store, place: RankVariables, deadline: Deadline) -> None:
    mine = identity(os.environ, place.size)
    if place.rank == 0:
        found = store.compare_set("run", "", json.dumps(mine))
    elif deadline.poll(lambda: store.check(["run"])):
        found = store.get("run")
    else:
        raise rank_0_missing(place, deadline)
    theirs = json.loads(found)
    if theirs != mine:
        name = next(n for n in (*mine, *theirs) if mine.get(n) != theirs.get(n))
        raise HyperslabError(
            f"rank {place.rank} is of another run than those at {place.where}: its {name} is "
            f"{mine.get(name, 'not set')}, theirs is {theirs.get(name, 'not set')}\n"
            "    two runs on one machine need a MASTER_PORT each"
        )


def _take_number(store: Store, place: RankVariables, deadline: Deadline) -> int:
    """How often this rank has started here; a program may do so several times."""
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


def _judge(store: Store, place: RankVariables, deadline: Deadline) -> dict[str, str]:
    """What is wrong with the ranks, if something is: the kind of error and its words."""
    missing = [*range(place.size)]

    def known() -> bool:
        while missing and store.check([f"facts {missing[-1]}"]):
            missing.pop()
        return not missing or store.check(["problem"])

    if not deadline.poll(known):
        return {"kind": "lost", "words": str(_missing(_came(store, place), place, deadline))}
    if store.check(["problem"]):
        rank = int(store.get("problem"))
        words = json.loads(store.get(f"facts {rank}"))["problem"]
        return {"kind": "problem", "words": f"rank {rank} says: {words}"}
    found = [json.loads(store.get(f"facts {rank}")) for rank in range(place.size)]
    words = _shared_device([one["device"] for one in found])
    if words:
        return {"kind": "shared", "words": words}
    words = compare_facts([one["facts"] for one in found], [one["host"] for one in found])
    return {"kind": "differ", "words": words}


def _shared_device(devices: list[str]) -> str:
    """Which ranks have the same one, if any do."""
    for device in dict.fromkeys(filter(None, devices)):
        ranks = [rank for rank, other in enumerate(devices) if other == device]
        if len(ranks) > 1:
            return (
                f"{name_ranks(ranks)} have the same CUDA device, {device}\n"
                "    give each one of its own (srun --gpus-per-task=1), or let every rank see all\n"
                "    devices of its machine; to test several on one: device=cuda-shared in a recipe"
            )
    return ""


def _came(store: Store, place: RankVariables) -> list[int]:
    return [rank for rank in range(place.size) if store.check([f"facts {rank}"])]


def _missing(came: list[int], place: RankVariables, deadline: Deadline) -> CommError:
    others = [rank for rank in range(place.size) if rank not in came] or [0]
    return CommError(
        f"{name_ranks(others)} did not come to {place.where} within {deadline.seconds:g} s: "
        f"{name_ranks(came)} of {place.size} did\n"
        "    see whether all were started, and what those that did not come have said"
    )


def compare_facts(facts: list[Facts], hosts: list[str]) -> str:
    """In what the ranks differ, the first key with its values; empty if in nothing.

    >>> print(compare_facts([{"a": {"b": 1}}, {"a": {"b": 2}}, {"a": {"b": 2}}], ["n1"] * 3))
    the ranks differ in a.b: 1 on rank 0, 2 on ranks 1 and 2
        start all ranks with the same command, recipe and versions
    """
    flat = [_flat(one) for one in facts]
    keys = dict.fromkeys(key for one in flat for key in one)
    differing = [key for key in keys if any(one.get(key) != flat[0].get(key) for one in flat)]
    if not differing:
        return ""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, one in enumerate(flat):
        ranks[one.get(differing[0], "nothing")].append(rank)
    several = len({*hosts}) > 1
    values = [
        f"{value} on {name_ranks(r)}" + (f" ({_some(hosts[i] for i in r)})" if several else "")
        for value, r in ranks.items()
    ]
    also = f"\n    and in {_some(differing[1:])}" if differing[1:] else ""
    return (
        f"the ranks differ in {differing[0]}: {', '.join(values)}{also}\n"
        "    start all ranks with the same command, recipe and versions"
    )


def name_ranks(ranks: Iterable[int]) -> str:
    """
    >>> name_ranks([3]), name_ranks([0, 1, 2, 5, 7, 8])
    ('rank 3', 'ranks 0 to 2, 5, 7 and 8')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    words = " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))
    return f"rank{'s' * (sum(map(len, runs)) != 1)} {words}"


def _flat(facts: Facts, key: str = "") -> dict[str, str]:
    """Dotted keys and values as JSON."""
    found: dict[str, str] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{key}{name}.")
        else:
            found[f"{key}{name}"] = json.dumps(value)
    return found


def _some(words: Iterable[str]) -> str:
    unique = [*dict.fromkeys(words)]
    more = f" and {len(unique) - MOST_NAMED} more" if len(unique) > MOST_NAMED else ""
    return ", ".join(unique[:MOST_NAMED]) + more
