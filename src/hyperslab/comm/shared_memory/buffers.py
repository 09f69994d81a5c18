"""Large tensors that all ranks of one machine map."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
import torch.distributed as dist

from hyperslab.comm.shared_memory.segment import share_file

PAGE = 4096  # [B]


def shared_buffers(nbytes: int) -> list[torch.Tensor] | None:
    """Memory of so many bytes of each rank of the default group, by rank; all ranks call this.

    It begins as zeros and lasts as long as a tensor in it. None where ranks cannot share memory, or
    where there is not as much (see `share_file`).
    """
    each = -(-max(nbytes, 1) // PAGE) * PAGE
    whole = share_file(each * dist.get_world_size(), _map)
    if whole is None:
        return None
    with torch.inference_mode(False):  # or they could not be written to outside that mode
        return [part[:nbytes] for part in whole.split(each)]


def _map(path: Path) -> torch.Tensor:
    with path.open("r+b", buffering=0) as file, torch.inference_mode(False):
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
