"""NVML is asked for the memory of GPUs, and pretended here (tier: no process)."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from hyperslab.planner.calibrate import reserved_of_device
from hyperslab.planner.search import HOLES, host_bounds
from hyperslab.util.gpu_memory import free_gpu_memory

FREE = {"0": 70 << 30, "1": 50 << 30, "2": 60 << 30, "GPU-2": 60 << 30}
"""By the names of three devices, of which the last has a UUID."""


class Nvml:
    """Three devices; handles are numbers."""

    names = tuple(FREE)
    failing = ""
    open = 0

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not needed")

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return int(self.failing == "start")

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 3
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        return self._handle(str(index), device)

    def nvmlDeviceGetHandleByUUID(self, name: bytes, device: Any) -> int:
        return self._handle(name.decode(), device)

    def _handle(self, name: str, device: Any) -> int:
        if name not in FREE:
            return 6
        device._obj.value = 1 + self.names.index(name)
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        memory._obj.total = 80 << 30
        memory._obj.free = FREE[self.names[device.value - 1]]
        return int(self.failing == "memory")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    fake = Nvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


@pytest.mark.parametrize(
    ("visible", "free"),
    [
        (None, 50 << 30),
        ("0", 70 << 30),
        ("2,0", 60 << 30),
        (" GPU-2 , 0", 60 << 30),
        ("GPU-7", None),
        ("7", None),
        ("", None),
    ],
)
def test_the_least_of_the_visible_devices(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, visible: str | None, free: int | None
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert free_gpu_memory() == free
    assert nvml.open == 0


@pytest.mark.parametrize("failing", ["start", "memory"])
def test_nvml_that_does_not_work(nvml: Nvml, failing: str) -> None:
    nvml.failing = failing
    assert free_gpu_memory() is None


def test_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert free_gpu_memory() is None


def test_a_plan_makes_no_cuda_context(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own question would."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert host_bounds(8, "cuda").nbytes == int((1 - HOLES) * (50 << 30))
    assert not torch.cuda.is_initialized()


def test_a_rank_counts_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 << 30, 16 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 << 30)
    assert host_bounds(1, "cuda").nbytes == int((1 - HOLES) * (12 << 30))


def test_what_of_a_device_holds_no_tensor_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 << 30, 16 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 4 << 30)
    assert reserved_of_device(torch.device("cuda", 0)) == 2 << 30
