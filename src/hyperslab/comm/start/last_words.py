"""What the first rank that failed has said, for those that only see that it is gone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hyperslab.comm.start.deadline import Deadline, in_time
from hyperslab.errors import CommError, HyperslabError, Stopped, reason

T = TypeVar("T")

HEAR = 1.0
"""How long [s] a rank that lost another one looks for its words: they may come after its end."""

KEY = "last words"


@contextmanager
def last_words() -> Iterator[None]:
    """What a rank raises inside ends the others with its words, where they lose contact with it.

    Of several that fail, the first. Without a process group it does nothing.
    """
    turn = _try(lambda store: store.add(f"{KEY} {dist.get_rank()}", 1))
    key = f"{KEY} of turn {turn}"  # the words of an earlier failure are not of this one
    try:
        yield
    except CommError as error:
        words = _try(lambda store: _hear(store, key))
        if words:
            raise CommError(words) from error
        raise
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
    if not Deadline(HEAR).poll(lambda: store.check([key])):
        return None
    rank, words = json.loads(store.get(key))
    store.add(f"{key} heard", 1)
    return None if rank == dist.get_rank() else f"rank {rank} says: {words}"
