"""Runs tasks on a pool of worker processes that end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from tempfile import gettempdir
from types import FrameType
from typing import Any, TypeVar

from hyperslab.errors import HyperslabError
from hyperslab.util import startup
from hyperslab.util.free_memory import keep_freed_memory

T = TypeVar("T")


def map_tasks(
    function: Callable[..., T], tasks: Sequence[tuple[Any, ...]], workers: int
) -> Generator[T, None, None]:
    """Yield what ``function`` returns for each task, as they end; with one worker, in order.

    With one worker or one task everything happens in this process. What the function raises ends
    the others that have not begun; Ctrl-C, SIGTERM, and closing this, ends all of them at once.

    Raises:
        HyperslabError: a worker died, or the server of workers cannot begin.
    """
    workers = min(workers, len(tasks))
    if workers <= 1:
        yield from (function(*task) for task in tasks)
        return
    context = multiprocessing.get_context("forkserver")  # threads, a progress bar's say, never fork
    context.set_forkserver_preload([startup.__name__, function.__module__])
    pool = ProcessPoolExecutor(workers, context, _begin_worker)
    others = {*multiprocessing.active_children()}
    try:
        with _leaving_on_sigterm():
            with _tied():
                waiting = [pool.submit(function, *task) for task in tasks]
            yield from (future.result() for future in as_completed(waiting))
    except (KeyboardInterrupt, SystemExit, GeneratorExit):  # nobody wants what they are at any more
        for worker in {*multiprocessing.active_children()} - others:
            worker.terminate()
        raise
    except BrokenProcessPool as error:
        raise HyperslabError(
            "a worker died, perhaps because memory ran out; use fewer workers and run the "
            "command again: "
            "finished files are kept"
        ) from error
    except OSError as error:
        if str(error) != "AF_UNIX path too long":
            raise
        raise HyperslabError(
            f"the path of the folder for temporary files is too long for a socket: {gettempdir()}\n"
            "    set TMPDIR to a shorter one in the environment"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _leaving_on_sigterm() -> Iterator[None]:
    """Exit on SIGTERM as usual: ended at once, the pool would leave a folder and semaphores."""
    ours = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    if not ours or before not in (signal.SIG_DFL, startup.exit_on_signal):
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, _frame: FrameType | None) -> None:
    if startup.is_command():
        startup.say_stopped(number)
    raise SystemExit(128 + number)


@contextmanager
def _tied() -> Iterator[None]:
    """Have the server of the workers end with this process, also while it imports."""
    os.environ[startup.TIED_TO] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[startup.TIED_TO]


def _begin_worker() -> None:
    """Keep freed memory; end with the parent, who also answers Ctrl-C."""
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:  # a worker whose parent is killed would wait for ever
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
