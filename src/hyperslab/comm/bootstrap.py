"""Start the ranks' process group; do what only one may do, or what must go well on all."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from hyperslab.errors import HyperslabError, LayoutError

T = TypeVar("T")


def start_ranks(device: str, timeout: float) -> bool:
    """Start ``torch.distributed`` from torchrun's variables; True if there was none before.

    ``device`` is "auto", "cpu" or "cuda"; a rank that waits longer than ``timeout`` [s] for the
    others gives up. One rank on the CPU of a machine with CUDA gets a process group of its own,
    so that the grid stays on the CPU too.

    Raises:
        LayoutError: there is no CUDA device for this rank.
    """
    if dist.is_initialized():
        return False
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    backend, limit = "nccl" if cuda else "gloo", datetime.timedelta(seconds=timeout)
    if cuda:
        _take_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=limit)
        return True
    if not cuda and torch.cuda.is_available():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        return True
    return False


def _take_device(index: int) -> None:
    count = torch.cuda.device_count()
    if index >= count:
        raise LayoutError(
            f"local rank {index} has no CUDA device: this machine has {count}\n"
            "    start at most one rank per device, or use device=cpu"
        )
    torch.cuda.set_device(index)


def on_main(
    function: Callable[[], T], failing: str, error: type[HyperslabError] = HyperslabError
) -> T:
    """Call a function on rank 0 and give every rank its result.

    What goes wrong there goes wrong everywhere: each rank raises ``error`` with ``failing`` and
    the reason, or the HyperslabError itself.
    """
    if not dist.is_initialized():
        return _attempt(function, failing, error)
    outcome: list[object] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = _attempt(function, failing, error)
        except HyperslabError as problem:
            outcome[1] = problem
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[1], HyperslabError):
        raise outcome[1]
    return outcome[0]  # type: ignore[return-value]


def on_all(
    function: Callable[[], T], failing: str, error: type[HyperslabError] = HyperslabError
) -> T:
    """Call a function on every rank; what goes wrong on one goes wrong on all, as in `on_main`."""
    if not dist.is_initialized():
        return _attempt(function, failing, error)
    result, problem = None, None
    try:
        result = _attempt(function, failing, error)
    except HyperslabError as caught:
        problem = caught
    problems: list[HyperslabError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    first = next((found for found in problems if found is not None), None)
    if first is not None:
        raise first
    return result  # type: ignore[return-value]


def _attempt(function: Callable[[], T], failing: str, error: type[HyperslabError]) -> T:
    try:
        return function()
    except HyperslabError:
        raise
    except Exception as problem:
        raise error(f"{failing}: {reason(problem)}") from problem


def reason(problem: BaseException) -> str:
    """Why, in a few words: the operating system's where it is its error."""
    if isinstance(problem, OSError) and problem.strerror:
        return f"{problem.strerror}: {problem.filename}" if problem.filename else problem.strerror
    return f"{type(problem).__name__}: {problem}"
