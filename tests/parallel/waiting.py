"""Steps of whole networks, and who makes the host wait for the device in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hyperslab as hs

_aten = torch.ops.aten
READS = {
    _aten._local_scalar_dense.default,
    _aten.is_nonzero.default,
    _aten.equal.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.unique_consecutive.default,
    _aten.repeat_interleave.Tensor,
}
"""Operators that read values of a tensor on the host, or have a shape that depends on them."""


class NothingIsRead(TorchDispatchMode):
    """Fails where an operator would make the host wait, were its tensors on a GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        masks = func is _aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        reads = masks or func in READS
        assert not reads, f"{func} reads values"
        return func(*args, **(kwargs or {}))


Step = Callable[[], torch.Tensor]


def cosmoflow(grid: hs.Grid, precision: torch.dtype) -> Step:
    """Forward, loss and backward of CosmoFlow with batch norm and dropout."""
    model = hs.parallelize(hs.models.CosmoFlow(32, batch_norm=True), grid)
    x = hs.shard(torch.randn(2, 4, 32, 32, 32, device=grid.device), grid)
    y = torch.rand(2, 4, device=grid.device)
    return _step(model, x, y, F.mse_loss, precision)


def unet(grid: hs.Grid, precision: torch.dtype) -> Step:
    """The same of the U-Net, with cross-entropy."""
    model = hs.parallelize(hs.models.UNet3D(channels=4), grid)
    x = hs.shard(torch.randn(1, 1, 32, 16, 16, device=grid.device), grid)
    y = hs.shard(torch.randint(3, (1, 32, 16, 16), device=grid.device), grid, channels=False)
    return _step(model, x, y, F.cross_entropy, precision)


def _step(model: nn.Module, x: Any, y: Any, loss: Any, precision: torch.dtype) -> Step:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    device = x.device.type

    def step() -> torch.Tensor:
        with torch.autocast(device, precision, enabled=precision != torch.float32):
            found: torch.Tensor = loss(model(x), y)
        found.backward()
        if device == "cuda":  # on the CPU Adam reads its counter
            optimizer.step()
        optimizer.zero_grad()
        return found

    return step


NETWORKS = {"cosmoflow": cosmoflow, "unet": unet}


@contextlib.contextmanager
def waiting_is(mode: str) -> Iterator[None]:
    """What torch does where the host waits for the device: "default", "warn" or "error"."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
