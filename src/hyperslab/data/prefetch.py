"""Prefetches mini-batches: later steps are loaded in the background of the present one."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from hyperslab.errors import DataError

V = TypeVar("V")

_Job = tuple[Future[V], Callable[[], V]]

_Waiting = deque[tuple[int, Future[V]]]
"""Steps that were asked for."""


@dataclass(frozen=True, slots=True)
class PrefetchPolicy:
    """How much is read ahead: ``depth`` mini-batches, of together at most ``bytes`` a rank [B].

    Raises:
        DataError: one of them is negative.
    """

    depth: int = 2
    bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if min(self.depth, self.bytes) < 0:
            raise DataError(
                f"prefetch={self.depth}, prefetch_bytes={self.bytes}: both need to be >= 0"
            )

    def batches(self, size: int) -> int:
        """The mini-batches of ``size`` [B] that are read ahead."""
        return min(self.depth, self.bytes // size)


@dataclass
class StepsAhead(Generic[V]):
    """The steps that one pass over an epoch has asked for, and those that it will ask for."""

    waiting: _Waiting[V]
    todo: Iterator[tuple[int, int]]


class Prefetcher(Generic[V]):
    """Loads the steps of epochs, ``depth`` of them ahead of the one that is used.

    ``load`` takes epoch and step. It is called in the order in which steps are asked for, by one
    thread; with ``inline`` by the one that asks. ``promised``: other ranks count on every step
    that was asked for, so none is cancelled.
    """

    def __init__(
        self,
        load: Callable[[int, int], V],
        *,
        steps: int,
        depth: int,
        inline: bool,
        promised: bool,
    ) -> None:
        self.load = load
        self.steps = steps
        self.depth = depth
        self.promised = promised
        self.wait_seconds = 0.0
        """Time for which `take` has waited so far [s]."""
        self._queue: BackgroundQueue[V] = BackgroundQueue(inline=inline)
        self._next: tuple[int, _Waiting[V]] = (-1, deque())  # what was asked for of the next epoch

    def begin(self, epoch: int, start: int, *, onward: bool) -> StepsAhead[V]:
        """The steps of an epoch from ``start`` on; with ``onward`` those of the next one follow."""
        begun, waiting = self._next
        self._next = (-1, deque())
        first = start
        if begun == epoch and start == 0 and waiting:
            first = waiting[-1][0] + 1
        else:
            self._cancel(waiting)
            waiting = deque()
        return StepsAhead(waiting, self._todo(epoch, first, onward))

    def take(self, ahead: StepsAhead[V]) -> V:
        """What was loaded for the next step; later ones are asked for first."""
        self._ask(ahead, 1 + self.depth)
        begin = time.perf_counter()
        result = ahead.waiting[0][1].result()
        self.wait_seconds += time.perf_counter() - begin
        ahead.waiting.popleft()
        return result

    def hand_on(self, epoch: int, ahead: StepsAhead[V]) -> None:
        """The epoch has ended: what is still asked for is of the next one, ``epoch``."""
        self._ask(ahead, self.depth)
        self._next = (epoch, ahead.waiting)

    def drop(self, ahead: StepsAhead[V]) -> None:
        """The pass has ended early: do not load what it has asked for, unless it is promised."""
        self._cancel(ahead.waiting)
        if not self.promised:
            self._queue.join(cancel=False)

    def join(self, *, cancel: bool, seconds: float | None = None) -> None:
        """Wait until the steps are loaded; with ``cancel`` only for the one that is under way."""
        self._queue.join(cancel=cancel, seconds=seconds)

    def _todo(self, epoch: int, step: int, onward: bool) -> Iterator[tuple[int, int]]:
        yield from ((epoch, later) for later in range(step, self.steps))
        if onward:
            yield from ((epoch + 1, later) for later in range(self.steps))

    def _ask(self, ahead: StepsAhead[V], count: int) -> None:
        """Ask for steps until so many are waited for."""
        while len(ahead.waiting) < count and (key := next(ahead.todo, None)) is not None:
            job = functools.partial(self._load, *key)
            ahead.waiting.append((key[1], self._queue.submit(job)))

    def _load(self, epoch: int, step: int) -> V:
        # A method, so that this object lives, and can be left at exit, while there are steps.
        return self.load(epoch, step)

    def _cancel(self, waiting: _Waiting[V]) -> None:
        if not self.promised:
            for _, future in waiting:
                future.cancel()


class BackgroundQueue(Generic[V]):
    """Jobs done one after the other by a thread, which ends when there are none left.

    With ``inline`` a job is done by the one who asks for it, when it is submitted.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self.inline = inline
        self._jobs: deque[_Job[V]] = deque()
        self._thread: threading.Thread | None = None
        self._idle = True
        self._lock = threading.Lock()

    def submit(self, job: Callable[[], V]) -> Future[V]:
        """The job's result; an error is raised where that is asked for."""
        future: Future[V] = Future()
        if self.inline:
            _do((future, job))
            return future
        with self._lock:
            self._jobs.append((future, job))
            if self._idle:
                self._idle = False
                # A daemon: a process that ends does not wait for a rank that will not answer.
                self._thread = threading.Thread(
                    target=self._run, name="hyperslab-read", daemon=True
                )
                self._thread.start()
        return future

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._idle = True
                    return
                job = self._jobs.popleft()
            _do(job)
            del job  # or its result would live until the next one comes

    def join(self, *, cancel: bool, seconds: float | None = None) -> None:
        """Wait until the jobs are done; with ``cancel`` only for the one that is under way."""
        with self._lock:
            for future, _ in self._jobs if cancel else ():
                future.cancel()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)


def _do(work: _Job[V]) -> None:
    future, job = work
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)
