"""Start-up: the process group of the ranks, from torchrun's or mpirun's environment."""

from __future__ import annotations

import atexit
import datetime
import os

import torch
import torch.distributed as dist

from hyperslab.comm.mpi import adopt_mpi
from hyperslab.errors import LayoutError

GLOO_ON_CUDA = "cpu:gloo,cuda:gloo"
"""The backend by which several ranks share one CUDA device, which NCCL refuses."""


STORE = "HYPERSLAB_STORE"
"""In a rank's environment: the file by which the ranks that `hyperslab` started find each other."""


def start_ranks(device: str, timeout: float) -> bool:
    """Start ``torch.distributed`` as a recipe says; True if there was none before.

    ``device`` is "auto", "cpu", "cuda" or "cuda-shared", where several ranks may have one device
    and gloo carries what NCCL would; a rank that waits longer than ``timeout`` [s] for the others
    gives up. One rank on the CPU of a machine with CUDA gets a process group of its own, so that
    the grid stays on the CPU too.

    Raises:
        LayoutError: there is no CUDA device for this rank.
        ValueError: ``device`` is another word.
    """
    if device not in ("auto", "cpu", "cuda", "cuda-shared"):
        raise ValueError(f"device {device!r}: use auto, cpu, cuda or cuda-shared")
    if dist.is_initialized():
        return False
    shared = device == "cuda-shared"
    cuda = shared or device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if cuda:
        _take_device(shared=shared)
    if _is_rank():
        limit = datetime.timedelta(seconds=timeout)
        backend = "nccl" if cuda else "gloo"
        _meet(GLOO_ON_CUDA if shared else backend, limit)
        return True
    if not cuda and torch.cuda.is_available():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return True
    return False


_SHARING = (
    "    let every rank see all devices of its machine\n"
    "    to test several ranks on one device: device=cuda-shared in a recipe, or before the grid\n"
    f'    torch.distributed.init_process_group("{GLOO_ON_CUDA}")'
)


def start_distributed() -> None:
    """Start ``torch.distributed`` if this process is a rank and nobody has; it ends at exit.

    Raises:
        LayoutError: there is no CUDA device for this rank.
    """
    if dist.is_initialized():
        return
    adopt_mpi(os.environ)
    if _is_rank():
        cuda = torch.cuda.is_available()
        if cuda:
            _take_device()
        _meet("nccl" if cuda else "gloo", None)
        atexit.register(_stop_distributed)


def device_of_rank(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where the tensors of this rank are, by the backend of a process group (default: of all).

    On a CUDA device with NCCL, or where the backend names it (`GLOO_ON_CUDA`); gloo alone is for
    the CPU.
    """
    if dist.is_initialized():
        backend = dist.get_backend(group)
        if "nccl" not in backend and "cuda:" not in backend:
            return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def time_limit() -> datetime.timedelta:
    """How long a rank of the default process group waits for the others."""
    group = dist.distributed_c10d._get_default_group()
    limit: datetime.timedelta = group._get_backend(device_of_rank()).options._timeout
    return limit


def _is_rank() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _meet(backend: str, limit: datetime.timedelta | None) -> None:
    """Start the process group: where the launcher says, else by torchrun's variables."""
    path = os.environ.get(STORE)
    if path is None:
        dist.init_process_group(backend, timeout=limit)
        return
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(path, size)  # type: ignore[attr-defined]
    if limit is not None:
        store.set_timeout(limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)


def _take_device(*, shared: bool = False) -> None:
    index = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if count == 0 or (index >= count and not shared):
        raise LayoutError(
            f"local rank {index} has no CUDA device: this machine has {count}\n"
            "    start at most one rank per device, or use device=cpu"
            + (f"\n{_SHARING}" if count else "")
        )
    torch.cuda.set_device(index % count)


def _stop_distributed() -> None:
    """What was started here is ended here: gloo's threads abort a process that just exits."""
    if dist.is_initialized():
        dist.destroy_process_group()
