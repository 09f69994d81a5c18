"""Run a function on ranks that a launcher has started on machines of these names.

The ranks are forks of the server of `tests.ranks`, which find their places in the environment.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from tests.ports import unused_port
from tests.ranks import start_server

T = TypeVar("T")


def run_launched(hosts: Sequence[str], work: Callable[..., T], *args: Any) -> list[T]:
    """Return what each rank of the launcher returns, by the launcher's numbers."""
    start_server()
    context = multiprocessing.get_context("forkserver")
    world = {
        "WORLD_SIZE": str(len(hosts)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(unused_port()),
        "OMP_NUM_THREADS": "1",
    }
    pipes = [context.Pipe(duplex=False) for _ in hosts]
    ranks = []
    for rank, host in enumerate(hosts):
        place = {**world, "RANK": str(rank), "LOCAL_RANK": str(hosts[:rank].count(host))}
        given = (pipes[rank][1], place, host, work, args)
        ranks.append(context.Process(target=_serve, args=given, daemon=True))
        ranks[-1].start()
        pipes[rank][1].close()
    try:
        found = [ours.recv() for ours, _ in pipes if ours.poll(120)]
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    failed = [words for words, _ in found if words]
    assert not failed, failed[0]
    assert len(found) == len(hosts)
    return [value for _, value in found]


def _serve(
    answer: Connection,
    place: dict[str, str],
    host: str,
    work: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    os.environ.update(place)
    socket.gethostname = lambda: host
    try:
        answer.send(("", work(*args)))
    except BaseException:
        answer.send((traceback.format_exc(), None))
    sys.stdout.flush()
    os._exit(0)
