"""What the first rank that failed has said, for those that only see that it is gone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hyperslab.comm.start.deadline import Deadline, in_time
from hyperslab.comm.start.roll_call import name_ranks
from hyperslab.errors import CommError, HyperslabError, Stopped, reason

T = TypeVar("T")

HEAR = 1.0
"""How long [s] a rank that lost another one looks for its words: they may come after its end."""

KEY = "last words"


@contextmanager
def last_words() -> Iterator[None]:
    """What a rank raises inside ends the others with its words, where they lose contact with it.

    Of several that fail, the first. Where none says anything, the error names those of whom nothing
    is heard. Without a process group it does nothing.
    """
    turn = _try(lambda store: store.add(f"{KEY} {dist.get_rank()}", 1))
    key = f"{KEY} of turn {turn}"  # the words of an earlier failure are not of this one
    try:
        yield
    except CommError as error:
        heard = _try(lambda store: _hear(store, key))
        if heard is None:
            raise
        raise CommError(heard if heard.startswith("rank") else f"{error}\n    {heard}") from error
    except Stopped:
        raise
    except Exception as error:
        words = str(error) if isinstance(error, HyperslabError) else reason(error)
        _try(lambda store: _leave(store, key, words))
        raise


def _try(speak: Callable[[Store], T]) -> T | None:
    """What a call returns; None where the store has ended or does not answer."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    with suppress(CommError, RuntimeError, ValueError):
        store = dist.distributed_c10d._get_default_store()
        return in_time(2 * HEAR, lambda: speak(store), lambda: CommError("no store"))
    return None


def _leave(store: Store, key: str, words: str) -> None:
    said = json.dumps([dist.get_rank(), words])
    store.compare_set(key, "", said)
    if dist.get_rank() == 0:  # the store may end with this process
        others = dist.get_world_size() - 1
        Deadline(HEAR).poll(lambda: store.add(f"{key} heard", 0) >= others)


def _hear(store: Store, key: str) -> str | None:
    """The words of the first rank that failed; if there are none, who says nothing at all.

    That is who was lost, or has not noticed yet that somebody was.
    """
    me, size = dist.get_rank(), dist.get_world_size()
    store.set(f"{key} lost {me}", "")
    if Deadline(HEAR).poll(lambda: store.check([key])):
        rank, words = json.loads(store.get(key))
        store.add(f"{key} heard", 1)
        return None if rank == me else f"rank {rank} says: {words}"
    silent = [rank for rank in range(size) if not store.check([f"{key} lost {rank}"])]
    return f"nothing was heard of {name_ranks(silent)}" if silent and size > 2 else None
