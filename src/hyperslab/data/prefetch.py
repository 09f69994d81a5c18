"""Doing the next pieces of work in the background while the present one is used."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

V = TypeVar("V")

Job = tuple[Future[V], Callable[..., V], tuple[Any, ...]]


class BackgroundQueue(Generic[V]):
    """Jobs done one after the other by a thread, which ends when there are none left.

    With ``inline`` a job is done by the one who asks for it, when it is submitted.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self.inline = inline
        self._jobs: deque[Job[V]] = deque()
        self._thread: threading.Thread | None = None
        self._idle = True
        self._lock = threading.Lock()

    def submit(self, job: Callable[..., V], *arguments: Any) -> Future[V]:
        """The job's result; an error is raised where that is asked for."""
        future: Future[V] = Future()
        if self.inline:
            _do((future, job, arguments))
            return future
        with self._lock:
            self._jobs.append((future, job, arguments))
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
            for future, _, _ in self._jobs if cancel else ():
                future.cancel()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)


def _do(work: Job[V]) -> None:
    future, job, arguments = work
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(job(*arguments))
    except BaseException as error:
        future.set_exception(error)
