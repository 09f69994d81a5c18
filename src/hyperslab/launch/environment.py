"""The environment of ranks that are started on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from hyperslab.comm.start.variables import STORE, TORCHRUN

LAUNCHER = "HYPERSLAB_LAUNCHER"
"""In a rank's environment: the process that started it."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where torch's `record` writes what a rank raised."""

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""How often the ranks were started before; torchrun says it, too."""


def shared_environment(environ: Mapping[str, str], ranks: int, store: str) -> dict[str, str]:
    """What all ranks of a launch have: an equal part of the cores, and each other.

    They meet in the file ``store`` and talk over the loopback, whatever interface ``environ`` names
    for ranks on several machines: nobody else can reach them.
    """
    shared = {name: value for name, value in environ.items() if name != TORCHRUN}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    shared.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // ranks)))
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        shared["GLOO_SOCKET_IFNAME"] = loopback[0]
        shared["NCCL_SOCKET_IFNAME"] = f"={loopback[0]}"
    shared[LAUNCHER] = str(os.getpid())
    shared[STORE] = store
    shared["WORLD_SIZE"] = str(ranks)
    shared["LOCAL_WORLD_SIZE"] = str(ranks)
    return shared


def rank_environment(shared: Mapping[str, str], rank: int, error_file: str) -> dict[str, str]:
    """What one rank has besides."""
    return {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), ERROR_FILE: error_file}
