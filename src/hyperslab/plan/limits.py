"""How much memory a rank may have."""

from __future__ import annotations

import importlib
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from hyperslab.data.store.budget import free_memory

STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class Limit:
    """Of one rank [B], and where it comes from."""

    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a plan keeps to: memory of a rank, what an empty process takes of it [B], the effort."""

    limit: Limit
    process: int = 0
    everything: bool = False


def host_limit(ranks: int, device: str) -> Limit:
    """What each of so many ranks on this host could have.

    Of a GPU its memory; else its part of what is free (of the machine, and of its control groups)
    together with what a process takes that is there already, or of the addresses that it may have
    (RLIMIT_AS), if that is less.
    """
    if device == "cuda" and torch.cuda.is_available():
        return Limit(torch.cuda.mem_get_info()[1], "the memory of the GPU")
    own = process_bytes()
    limits = [Limit(free_memory() // ranks + own, "a rank's part of the memory that is free here")]
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        left = max(0, addresses - _status("VmSize")) + own
        limits.append(Limit(left, "what the limit of a process's address space leaves (ulimit -v)"))
    return min(limits, key=lambda limit: limit.nbytes)


def process_bytes() -> int:
    """What a rank takes that has imported all that training does, and no tensors: this one [B]."""
    importlib.import_module("torch._dynamo")  # as a process's first optimizer does
    return _status("VmRSS")


def _status(key: str) -> int:
    lines = STATUS.read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields[key].split()[0]) * 1024
