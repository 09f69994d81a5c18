"""Doing the next pieces of work in the background while the present one is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def ahead(make: Callable[[K], V], keys: Iterable[K], depth: int) -> Generator[V, None, None]:
    """Yield ``make(key)`` for each key in turn, made by one thread up to ``depth`` keys ahead.

    An error is raised where its value would have come. The thread ends with the generator: when
    that is exhausted, closed, dropped, or left by an exception (Ctrl-C too).
    """
    waiting: deque[Future[V]] = deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix="hyperslab-read")
    try:
        for key in keys:
            waiting.append(pool.submit(make, key))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
