"""Asks NVML how much memory of a GPU is free, and files whether there is a GPU, without torch.

Torch's own question makes one, of half a gigabyte, on a device that others may use. NVML comes
with the driver, and is called by ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from hyperslab.util.documents import read_text

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


@functools.cache
def torch_knows_cuda() -> bool:
    """Say whether torch was built for CUDA or ROCm, as its text has it."""
    spec = find_spec("torch")
    text = ""
    if spec is not None and spec.submodule_search_locations:
        with suppress(OSError):
            text = read_text(Path(spec.submodule_search_locations[0], "version.py"))
    return len(re.findall(r"^(?:cuda|hip)\b.*= None$", text, re.MULTILINE)) < 2


_GPU_FILES = ("nvidia*", "nvmap", "nvhost*", "dxg", "kfd")
"""Matches the files in /dev of the drivers for CUDA, also on Jetson and WSL, and for ROCm."""


def machine_has_gpu(devices: Path = Path("/dev")) -> bool:
    """Say whether there may be a device for torch here: False where no driver has a file."""
    return sys.platform != "linux" or any(any(devices.glob(name)) for name in _GPU_FILES)
