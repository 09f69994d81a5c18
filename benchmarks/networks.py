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
    """One of `NETWORKS`; ``batch_norm`` is a choice of CosmoFlow's alone."""
    torch.manual_seed(0)
    case = _cosmoflow(width, batch_norm) if network == "cosmoflow" else _BUILDERS[network](width)
    return Case(case.model.to(device), case.x.to(device), case.y.to(device), case.loss)


def _cosmoflow(width: int, batch_norm: bool) -> Case:
    """Of Oyama et al. 2020."""
    model = hs.models.CosmoFlow(width, batch_norm=batch_norm)
    return Case(model, _volume(4, width), torch.rand(1, 4) * 2 - 1, F.mse_loss)


def _unet3d(width: int) -> Case:
    """It always has batch norm."""
    return _segmentation(hs.models.UNet3D(channels=UNET_CHANNELS), width, classes=3)


def _segresnet(width: int) -> Case:
    """MONAI's, with group norm; of Myronenko 2018."""
    from monai.networks.nets import SegResNet

    model = SegResNet(spatial_dims=3, init_filters=8, in_channels=1, out_channels=2)
    return _segmentation(model, width, classes=2)


def _dynunet(width: int) -> Case:
    """MONAI's nnU-Net, with instance norm and strided convolutions; of Isensee et al. 2018."""
    from monai.networks.nets import DynUNet

    model = DynUNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        kernel_size=[3, 3, 3, 3],
        strides=[1, 2, 2, 2],
        upsample_kernel_size=[2, 2, 2],
        filters=[16, 32, 48, 64],
    )
    return _segmentation(model, width, classes=2)


def _resnet(width: int) -> Case:
    """MONAI's resnet18: batch norm, a kernel of 7, overlapping max pooling, two classes."""
    from monai.networks.nets import resnet18

    model = resnet18(spatial_dims=3, n_input_channels=1, num_classes=2)
    return Case(model, _volume(1, width), torch.tensor([1]), F.cross_entropy)


def _segmentation(model: nn.Module, width: int, classes: int) -> Case:
    x = _volume(1, width)
    y = torch.randint(classes, (1, width, width, width))
    return Case(model, x, y, F.cross_entropy)


def _volume(channels: int, width: int) -> torch.Tensor:
    return torch.randn(1, channels, width, width, width)


_BUILDERS: dict[str, Callable[[int], Case]] = {
    "unet3d": _unet3d,
    "segresnet": _segresnet,
    "dynunet": _dynunet,
    "resnet": _resnet,
}
"""MONAI is asked for only where one of its networks is."""

NETWORKS = {"cosmoflow": 128, "unet3d": 64, "segresnet": 64, "dynunet": 64, "resnet": 64}
"""The names, and the width at which each is measured."""

OURS = ("cosmoflow", "unet3d")
"""Those that come with hyperslab."""

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
