"""Run a function on several gloo ranks: `run_ranks(n, fn, *args)`.

The ranks are worker processes that live as long as the pytest session and are reused from test to
test, so a call costs milliseconds. They are forks of this process as it was when its tests had been
collected (`start_server`), so that no rank imports what the session has imported.
Each call sees a default process group of exactly n ranks, which others that succeeded saw before.
A rank that dies or hangs costs the whole pool; the next call starts a fresh one. Ranks that nobody
calls are stopped (`rest_idle_ranks`): every process group of gloo has a thread that wakes a hundred
times a second, which would take a sixth of a core of a session. What a worker does
is in `tests.worker` and `tests.worlds`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import itertools
import logging
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from hyperslab.util.startup import tie_to_parent
from tests.worker import Outcome, Task, serve

T = TypeVar("T")

MAX_RANKS = 64
GRACE = 10.0  # [s] that the other ranks have after the first one failed
RENEW = 100  # calls that share one process group
LEFT_OUT = 10  # calls of fewer ranks, after which the others are stopped
# What the first optimizer of a process imports takes two seconds; every worker would.
PRELOAD = ["torch._dynamo"]


class RankError(RuntimeError):
    """A rank died or did not end in time."""


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    stacks: Path  # where the worker writes its stacks when it gets SIGUSR1
    is_stopped: bool = False
    left_out: int = 0  # of how many calls, since it took part in one

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has died: its outcome will say so
            os.kill(self.pid, number)
        self.is_stopped = number == signal.SIGSTOP

    def outcome(self) -> Outcome:
        """What the worker sent; a closed pipe means that it is dead."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join(GRACE)
            return Outcome("died", report=f"died with exit code {self.process.exitcode}")

    def hung(self, seconds: float) -> Outcome:
        """The stacks of a worker that does not end."""
        if self.process.is_alive():
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.3)  # faulthandler writes from the signal handler
        stacks = self.stacks.read_text() if self.stacks.exists() else ""
        return Outcome("hung", report=f"still running after {seconds:.0f} s\n{stacks}")

    def kill(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


class _Pool:
    """Worker r is rank r; a call for n ranks uses the first n."""

    def __init__(self) -> None:
        start_server()
        self.context = multiprocessing.get_context("forkserver")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.workers: list[_Worker] = []
        self.numbers = itertools.count()
        self.groups: dict[int, tuple[int, int]] = {}  # by their size: number, calls so far
        self.is_idle = False  # since a look at it

    def grow(self, n: int) -> None:
        for rank in range(len(self.workers), n):
            ours, theirs = self.context.Pipe()
            stacks = Path(self.folder.name, f"stacks-{rank}")
            process = self.context.Process(
                target=serve, args=(rank, theirs, self.store.port, stacks), name=f"rank {rank}"
            )
            process.start()
            theirs.close()
            self.workers.append(_Worker(process, ours, stacks))

    def group(self, n: int) -> int:
        """The number of the process group for this call; a new number is a new group."""
        number, calls = self.groups.get(n, (-1, RENEW))
        if calls == RENEW:
            number, calls = next(self.numbers), 0
        self.groups[n] = number, calls + 1
        return number

    def run(self, n: int, call: bytes, timeout: float) -> list[Outcome]:
        self.grow(n)
        self.is_idle = False
        task = pickle.dumps(Task(self.group(n), n, call))
        for worker in self.workers[n:]:
            worker.left_out += 1
            if worker.left_out > LEFT_OUT and not worker.is_stopped:
                worker.send(signal.SIGSTOP)
        for worker in self.workers[:n]:
            worker.left_out = 0
            if worker.is_stopped:
                worker.send(signal.SIGCONT)
            try:
                worker.connection.send_bytes(task)
            except OSError:  # it died since the last call: its outcome says so
                continue
        outcomes = self.collect(n, timeout)
        if any(o.kind != "returned" for o in outcomes):
            del self.groups[n]
        if any(o.lost for o in outcomes):
            self.groups.clear()
        return outcomes

    def collect(self, n: int, timeout: float) -> list[Outcome]:
        """Wait for every rank, and only for a short while after the first failure."""
        start = time.monotonic()
        deadline = start + timeout
        pending = {worker.connection: rank for rank, worker in enumerate(self.workers[:n])}
        outcomes: dict[int, Outcome] = {}
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = pending.pop(connection)  # type: ignore[call-overload]
                outcomes[rank] = self.workers[rank].outcome()
                if outcomes[rank].kind != "returned":
                    deadline = min(deadline, time.monotonic() + GRACE)
        for rank in pending.values():
            outcomes[rank] = self.workers[rank].hung(time.monotonic() - start)
        return [outcomes[rank] for rank in range(n)]

    def rest(self) -> None:
        for worker in self.workers:
            if self.is_idle and not worker.is_stopped:
                worker.send(signal.SIGSTOP)
        self.is_idle = True

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.folder.cleanup()


@functools.cache
def start_server() -> None:
    """Fork the server from which `multiprocessing` forks the ranks, and its other workers.

    As multiprocessing starts it, it is an interpreter that imports for seconds, and so do its
    workers what else they need. Called before this process has threads, which do not fork.
    """
    resource_tracker.ensure_running()  # an interpreter of its own, indeed
    start = multiprocessing.util.spawnv_passfds
    multiprocessing.util.spawnv_passfds = _fork_server  # type: ignore[assignment]
    try:
        forkserver.ensure_running()
    finally:
        multiprocessing.util.spawnv_passfds = start


def _fork_server(_path: object, _arguments: object, descriptors: Sequence[int]) -> int:
    """Fork a server that has these descriptors, a socket and a pipe; its process id."""
    with warnings.catch_warnings():
        # Newer versions of Python warn of threads, such as the one by which a session of
        # pytest-xdist listens: none of them holds what ranks need.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]
            settle_server(descriptors)
            for name in PRELOAD:
                importlib.import_module(name)
            gc.collect()
            gc.freeze()
            forkserver.main(*descriptors, [])
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)
    return pid


def settle_server(descriptors: Sequence[int]) -> None:
    """Keep nothing of this process that another one waits for or has set for itself."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in (nowhere, *descriptors):
            os.dup2(nowhere, number, inheritable=False)  # the numbers stay taken: some have owners
    tie_to_parent(signal.SIGKILL)  # and its ranks to it: who is stopped sees nobody's end
    faulthandler.disable()
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    logging.root.handlers.clear()
    # What pytest makes errors, and an interpreter does not show.
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)


@functools.cache
def _pool() -> _Pool:
    return _Pool()


@atexit.register
def close_pool() -> None:
    """End every worker; the next call starts a fresh pool."""
    if _pool.cache_info().currsize:
        _pool().close()
        _pool.cache_clear()


def rest_idle_ranks() -> None:
    """Stop the ranks if there was no call since this was called before; the next one wakes them."""
    if _pool.cache_info().currsize:
        _pool().rest()


def fresh_groups() -> None:
    """Let the next calls find process groups that nothing was done with."""
    _pool().groups.clear()


def run_ranks(n: int, fn: Callable[..., T], *args: Any, timeout: float = 120) -> list[T]:
    """Call fn(*args) on n ranks and return what they returned, by rank.

    `fn`, its arguments and its result must pickle: a function at the top of a module. Torch's
    random state is seeded with 0 on every rank.

    Raises what the first failing rank raised, with the tracebacks of all ranks as a note, or
    RankError when a rank died or ran longer than `timeout` [s].
    """
    if not 1 <= n <= MAX_RANKS:
        raise ValueError(f"run_ranks takes 1 to {MAX_RANKS} ranks, not {n}")
    outcomes = _pool().run(n, pickle.dumps((fn, args)), timeout)
    if any(o.kind in ("died", "hung") for o in outcomes):
        close_pool()
    if all(o.kind == "returned" for o in outcomes):
        return [pickle.loads(o.value) for o in outcomes]
    raise _error(outcomes)


def _error(outcomes: list[Outcome]) -> BaseException:
    report = "\n".join(f"rank {rank}: {o.report or o.kind}" for rank, o in enumerate(outcomes))
    raised = [o for o in outcomes if o.kind == "raised"]
    if not raised or any(o.kind == "died" for o in outcomes):
        return RankError(f"{len(outcomes)} ranks\n{report}")
    error: BaseException = pickle.loads(min(raised, key=lambda o: o.when).value)
    error.add_note(report)
    return error
