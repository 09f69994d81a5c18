"""Asks NVML how much memory of a GPU is free, which makes no CUDA context.

Torch's own question makes one, of half a gigabyte, on a device that others may use. NVML comes
with the driver, and is called by ctypes.
"""

from __future__ import annotations

import ctypes
import os

NVML = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    """Is what NVML writes of a device [B]."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def free_gpu_memory() -> int | None:
    """Returns what is free [B] of that visible GPU of this machine which has least of it.

    None where nobody can tell: without NVML, or for a device that it does not know by this name.
    """
    try:
        nvml = ctypes.CDLL(NVML)
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        return _least(nvml)
    finally:
        nvml.nvmlShutdown()


def _least(nvml: ctypes.CDLL) -> int | None:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(count.value)] if visible is None else visible.split(",")
    found = []
    for name in (name.strip() for name in names):
        device, memory = ctypes.c_void_p(), _Memory()
        if name.isdigit():
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(device))
        else:
            failed = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device))
        if failed or nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
            return None
        found.append(memory.free)
    return min(found, default=None)
