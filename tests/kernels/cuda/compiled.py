"""What a process without a GPU runs: the kernels compiled for one, and not started.

The place of Triton's driver is taken by one that says which GPU it is for and starts nothing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from hyperslab.kernels import registry
from tests.comm.packed import plan_of

HOPPER = GPUTarget("cuda", 90, 32)
SHARED = 227 * 1024  # [B] of a Hopper's multiprocessor that one program may have

built: list[str] = []


class NoGpu:
    """Compiles for ``HOPPER``; its launcher starts nothing."""

    def __init__(self) -> None:
        properties = {"max_shared_mem": SHARED, "multiprocessor_count": 132, "warpSize": 32}
        self.utils = SimpleNamespace(
            load_binary=self.load_binary, get_device_properties=lambda _: properties
        )

    def load_binary(self, name: str, binary: bytes, *_: Any) -> tuple[int, int, int, int, int]:
        assert binary[:4] == b"\x7fELF", name
        built.append(name)
        return 0, 0, 0, 0, 1024

    def launcher_cls(self, _source: Any, _metadata: Any) -> Any:
        return lambda *_, **__: None

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def run_all() -> None:
    """CosmoFlow's chains, with batch norm; a maximum of ReLU; what is sent to neighbours."""
    kernels = {name: one.triton for name, one in registry.OPERATORS.items() if one.cuda}
    x = torch.zeros(1, 16, 4, 4, 4, dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last_3d)
    norm = torch.ones(3, 1, 16)
    pool = [2, 2, 2]
    kernels["channel_sums"](x, 0)
    g, marks = kernels["chain_forward"](x, norm, 0.01, pool, False, True, x.dtype)
    kernels["chain_backward_sums"](g, marks, x, norm, 0.01, pool, False)
    factors = [x, norm, norm[:2]]
    kernels["chain_backward"](g, marks, *factors, 0.01, pool, False, x.shape, x.dtype)
    _, marks = kernels["chain_forward"](x, None, 0.0, pool, True, True, x.dtype)
    kernels["chain_backward"](g, marks, *[None] * 3, 0.0, pool, True, x.shape, x.dtype)
    kernels["chain_forward"](torch.zeros(1, 3, 5), None, 0.0, [], False, True, torch.float32)
    sums = torch.zeros(3, 16, dtype=torch.float64)
    norm, moments = kernels["normalisation"](sums, norm[0, 0], norm[0, 0], 64, 1e-5, 16, 1)
    kernels["running_statistics"](moments, moments[0, 0].float(), moments[1, 0].float(), 0.1, 1.5)
    *_, shared = kernels["parameter_gradients"](sums[:2, None], norm, moments, 1)
    kernels["through_statistics"](shared, norm, moments, 64, 1)
    kernels["reorder"](x, False, torch.float32)
    kernels["drop_elements"](x, x.shape, [0] * 5, torch.tensor(2**61), 0.5)
    boxes = plan_of(0).boxes_sent
    block = torch.zeros(boxes.own.shape, dtype=torch.bfloat16)
    pieces = boxes.pack(block)
    boxes.add(block, pieces)


if __name__ == "__main__":
    driver.set_active(NoGpu())
    run_all()
    print(*sorted(set(built)))
