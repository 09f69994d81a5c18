"""Which start of the ranks this is, in a store that outlives them: that of torchrun's agents."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from torch.distributed.distributed_c10d import PrefixStore, Store

from hyperslab.comm.start.deadline import Deadline
from hyperslab.comm.start.variables import RankVariables
from hyperslab.errors import CommError


def agree_on_attempt(
    store: Store, place: RankVariables, deadline: Deadline, connect: Callable[[], Store]
) -> Store:
    """The part of ``store`` that belongs to this start of the ranks alone.

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
    if place.rank == 0:
        waiting = dict.fromkeys(range(1, place.size), b"")
        thread = threading.Thread(
            target=_answer, args=(connect, word, waiting, deadline), daemon=True
        )
        thread.start()
        return PrefixStore(f"hyperslab/start {word}", store)
    store.set(f"hyperslab/word {place.rank}", word)
    answer = f"hyperslab/answer {word}"
    if not deadline.poll(lambda: store.check([answer])):
        raise rank_0_missing(place, deadline)
    found = store.get(answer).decode()
    store.set(f"hyperslab/start {found}/read {place.rank}", "")
    return PrefixStore(f"hyperslab/start {found}", store)


def rank_0_missing(place: RankVariables, deadline: Deadline) -> CommError:
    """Of a rank that came and waited."""
    return CommError(
        f"rank 0 did not come to {place.where} within {deadline.seconds:g} s: rank "
        f"{place.rank} of {place.size} is there\n    see whether all ranks were started"
    )


def _answer(
    connect: Callable[[], Store], word: str, waiting: dict[int, bytes], deadline: Deadline
) -> None:
    """``waiting``: by rank, its word that was answered."""
    try:
        store = connect()
        deadline.poll(lambda: _all_answered(store, word, waiting))
    except (CommError, RuntimeError):
        # the store is gone, which the rank itself, waiting there for the others, says
        return


def _all_answered(store: Store, word: str, waiting: dict[int, bytes]) -> bool:
    for rank, answered in list(waiting.items()):
        if store.check([f"hyperslab/start {word}/read {rank}"]):
            del waiting[rank]
        elif store.check([f"hyperslab/word {rank}"]):
            theirs = store.get(f"hyperslab/word {rank}")
            if theirs != answered:
                store.set(f"hyperslab/answer {theirs.decode()}", word)
                waiting[rank] = theirs
    return not waiting
