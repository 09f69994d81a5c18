"""What this node is."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")


def processor_name() -> str:
    """Of the GPU, where there is one, or of the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return (_cpu_fields("model name") or [platform.processor() or platform.machine()])[0]


def sockets(device: torch.device) -> int:
    """Of the CPU; devices of a node that reach each other's memory count as one."""
    if device.type == "cuda":
        count = torch.cuda.device_count()
        near = [d for d in range(1, count) if torch.cuda.can_device_access_peer(0, d)]
        return max(1, count // (1 + len(near)))
    return max(1, len(set(_cpu_fields("physical id"))))


def memory_of_rank(device: torch.device, ranks: int) -> int:
    """[B] of a GPU, or of the node for each of so many ranks."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def _cpu_fields(name: str) -> list[str]:
    """The values of a field of /proc/cpuinfo, one a core."""
    if not CPU_INFO.exists():
        return []
    pairs = (line.partition(":") for line in CPU_INFO.read_text().splitlines())
    return [value.strip() for key, _, value in pairs if key.strip() == name]
