"""The networks that are measured, each with one sample and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from clock import stopwatch
from torch import nn

import hyperslab as hs

UNET_CHANNELS = 16
"""Of the first convolution: half of the paper's, for two cores."""


@dataclass
class Case:
    """A network with the same numbers on every rank, one sample, and what it should give."""

    model: nn.Module
    x: torch.Tensor
    y: torch.Tensor
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def cut(self, grid: hs.Grid) -> None:
        """From now on over the ranks of ``grid``."""
        hs.parallelize(self.model, grid)
        self.x = hs.shard(self.x, grid)
        if self.y.dim() > 2:
            self.y = hs.shard(self.y, grid, channels=False)


def make_case(network: str, width: int, batch_norm: bool, device: torch.device) -> Case:
    """CosmoFlow (Oyama et al. 2020) or the 3D U-Net, which always has batch norm."""
    torch.manual_seed(0)
    if network == "cosmoflow":
        model: nn.Module = hs.models.CosmoFlow(width, batch_norm=batch_norm)
        x = torch.randn(1, 4, width, width, width)
        y = torch.rand(1, 4) * 2 - 1
        return Case(model.to(device), x.to(device), y.to(device), F.mse_loss)
    model = hs.models.UNet3D(channels=UNET_CHANNELS)
    x = torch.randn(1, 1, width, width, width)
    y = torch.randint(3, (1, width, width, width))
    return Case(model.to(device), x.to(device), y.to(device), F.cross_entropy)


NETWORKS = {"cosmoflow": 128, "unet3d": 64}
"""The names, and the width at which each is measured."""

PARTS = ("forward", "backward", "optimiser")


class Step:
    """One training step, in its parts."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case = case
        self.dtype = dtype
        self.optimizer = torch.optim.Adam(case.model.parameters(), lr=1e-4)
        self.device = case.y.device

    def forward(self) -> None:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            self.loss = self.case.loss(self.case.model(self.case.x).float(), self.case.y)

    def backward(self) -> None:
        self.loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self) -> list[float]:
        torch.manual_seed(1)  # the same dropout on both sides
        return stopwatch(self.device, [self.forward, self.backward, self.update])
