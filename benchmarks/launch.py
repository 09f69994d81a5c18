"""Start ranks on this machine for a benchmark."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hyperslab.comm.bootstrap import GLOO_ON_CUDA

T = TypeVar("T")

TIME_LIMIT = timedelta(minutes=5)  # for one message, so that a failed rank ends the others


def run_ranks(
    n: int, fn: Callable[..., T], *args: Any, share_devices: bool = False, backend: str = ""
) -> list[T]:
    """Call ``fn(*args)`` on ``n`` ranks with one thread each; what they return, by rank.

    NCCL where the machine has a GPU for every rank, otherwise gloo on the CPU; gloo on the GPUs
    that there are where ranks are to share them; or the ``backend`` that is named.
    """
    if not backend:
        backend = "nccl" if torch.cuda.device_count() >= n else "gloo"
        backend = GLOO_ON_CUDA if share_devices else backend
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(n, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        store = Path(folder, "store").as_uri()
        futures = [pool.submit(_rank, rank, n, store, backend, fn, args) for rank in range(n)]
        return [future.result() for future in futures]


def _rank(
    rank: int, n: int, store: str, backend: str, fn: Callable[..., T], args: tuple[Any, ...]
) -> T:
    torch.set_num_threads(1)
    # All ranks are on this machine: gloo must not look for an address of it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if backend != "gloo":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        backend,
        init_method=store,
        rank=rank,
        world_size=n,
        timeout=TIME_LIMIT,
    )
    try:
        return fn(*args)
    finally:
        dist.destroy_process_group()
