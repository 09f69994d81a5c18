"""Start-up: the process group of the ranks, from torchrun's or mpirun's environment."""

from __future__ import annotations

import atexit
import datetime
import os

import torch
import torch.distributed as dist

from hyperslab.comm.mpi import adopt_mpi
from hyperslab.errors import LayoutError


def start_ranks(device: str, timeout: float) -> bool:
    """Start ``torch.distributed`` as a recipe says; True if there was none before.

    ``device`` is "auto", "cpu" or "cuda"; a rank that waits longer than ``timeout`` [s] for the
    others gives up. One rank on the CPU of a machine with CUDA gets a process group of its own,
    so that the grid stays on the CPU too.

    Raises:
        LayoutError: there is no CUDA device for this rank.
        ValueError: ``device`` is another word.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {device!r}: use auto, cpu or cuda")
    if dist.is_initialized():
        return False
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if cuda:
        _take_device()
    if _is_rank():
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group("nccl" if cuda else "gloo", timeout=limit)
        return True
    if not cuda and torch.cuda.is_available():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return True
    return False


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
        dist.init_process_group("nccl" if cuda else "gloo")
        atexit.register(_stop_distributed)


def device_of_rank(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where the tensors of this rank are, by the backend of a process group (default: of all)."""
    if dist.is_initialized() and "nccl" not in dist.get_backend(group):
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def time_limit() -> datetime.timedelta:
    """How long a rank of the default process group waits for the others."""
    group = dist.distributed_c10d._get_default_group()
    device = torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
    limit: datetime.timedelta = group._get_backend(device).options._timeout
    return limit


def _is_rank() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _take_device() -> None:
    index = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if index >= count:
        raise LayoutError(
            f"local rank {index} has no CUDA device: this machine has {count}\n"
            "    start at most one rank per device, or use device=cpu"
        )
    torch.cuda.set_device(index)


def _stop_distributed() -> None:
    """What was started here is ended here: gloo's threads abort a process that just exits."""
    if dist.is_initialized():
        dist.destroy_process_group()
