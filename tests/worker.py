"""One rank of the pool of `tests.ranks`: take a task, enter its process group, call, answer."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from hyperslab.util.startup import tie_to_parent
from tests.gpus import settle_device
from tests.worlds import Worlds, share_device


@dataclass(frozen=True)
class Task:
    group: int  # its number: a new one asks for a new process group of so many ranks
    world: int
    call: bytes  # pickled (function, arguments)


@dataclass(frozen=True)
class Outcome:
    kind: str  # returned | raised | died | hung
    value: bytes = b""  # the pickled result or exception
    report: str = ""
    lost: bool = False  # the call ended the process groups that were there
    when: float = field(default_factory=time.monotonic)


def serve(rank: int, connection: Connection, port: int, stacks: Path) -> None:
    """Answer tasks until the other end of the pipe is closed."""
    _settle(stacks)
    worlds = Worlds(rank, dist.TCPStore("127.0.0.1", port, is_master=False))
    while True:
        try:
            task: Task = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        worlds.enter(task.group, task.world)
        outcome = _call(task.call)
        if not worlds.park(task.world):
            outcome = replace(outcome, lost=True)
        elif outcome.kind == "raised":  # the others may wait for this rank: let them fail now
            worlds.leave(task.world)
        connection.send_bytes(pickle.dumps(outcome))


def _settle(stacks: Path) -> None:
    tie_to_parent(signal.SIGKILL)
    torch.set_num_threads(1)
    settle_device()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then ends us
    faulthandler.register(signal.SIGUSR1, file=stacks.open("w"), all_threads=True)
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    share_device(loopback)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.freeze()  # what torch made is never garbage: later collections take a millisecond


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(call: bytes) -> Outcome:
    torch.manual_seed(0)
    try:
        fn, args = pickle.loads(call)
        return Outcome("returned", pickle.dumps(fn(*args)))
    except BaseException as error:
        return Outcome("raised", _pickled(error), traceback.format_exc())
    finally:
        sys.stdout.flush()


def _pickled(error: BaseException) -> bytes:
    """The exception, or its text where it does not survive the way."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return data
