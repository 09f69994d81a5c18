"""The networks that are measured, each with one sample and its loss.

    python benchmarks/networks.py [--network densenet121 fno ...] [--dtype float32 bfloat16]
                                  [--turns 3] [--ranks 2] [--width W] [--json OUT]

compares a step over ranks of one thread with plain torch's on as many threads, in turn. Networks
of others that have been behind plain torch are measured here alone: `OTHERS`.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from clock import machine, stopwatch
from launch import run_ranks
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


def _densenet121(width: int) -> Case:
    """MONAI's: 120 small convolutions, as many batch norms, joined channels.

    In bfloat16 on a CPU plain torch's weights become NaN: see docs/differences.md.
    """
    from monai.networks.nets import DenseNet121

    return Case(DenseNet121(3, 1, 2), _volume(1, width), torch.tensor([1]), F.cross_entropy)


class ConvNeXtBlock(nn.Module):
    """Of Liu et al. 2022 in three dims: a depthwise kernel of 7, layer norm, two dense layers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv3d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.widen = nn.Linear(channels, 4 * channels)
        self.narrow = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(1e-6 * torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 4, 1))
        y = self.narrow(F.gelu(self.widen(y))) * self.scale
        return x + y.permute(0, 4, 1, 2, 3)


class NormOfChannels(nn.LayerNorm):
    """Layer norm over the channels of a volume."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 4, 1)).permute(0, 4, 1, 2, 3)


ATTO = {40: 2, 80: 2, 160: 6, 320: 2}
"""Blocks of ConvNeXt-atto by channels."""


def _convnext(width: int) -> Case:
    """ConvNeXt-atto."""
    layers: list[nn.Module] = []
    before = 1
    for channels, blocks in ATTO.items():
        if before == 1:
            layers += [nn.Conv3d(1, channels, 4, 4), NormOfChannels(channels)]
        else:
            layers += [NormOfChannels(before), nn.Conv3d(before, channels, 2, 2)]
        layers += [ConvNeXtBlock(channels) for _ in range(blocks)]
        before = channels
    ends = [nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.LayerNorm(before), nn.Linear(before, 2)]
    model = nn.Sequential(*layers, *ends)
    return Case(model, _volume(1, width), torch.tensor([1]), F.cross_entropy)


def _fno(width: int) -> Case:
    """neuraloperator's Fourier operator, 16 modes, four layers; of Li et al. 2021."""
    from neuralop.models import FNO

    model = FNO((16, 16, 16), 1, 1, hidden_channels=16, n_layers=4)
    y = torch.randn(1, width, width, width)
    return Case(model, _volume(1, width), y, lambda found, y: F.mse_loss(found[:, 0], y))


def _swinunetr(width: int) -> Case:
    """MONAI's, attention in windows."""
    from monai.networks.nets import SwinUNETR

    return _segmentation(SwinUNETR(1, 2, feature_size=12), width, classes=2)


def _unetr(width: int) -> Case:
    """MONAI's, a small one: attention over all patches."""
    from monai.networks.nets import UNETR

    sizes = {"feature_size": 8, "hidden_size": 192, "mlp_dim": 768, "num_heads": 6}
    return _segmentation(UNETR(1, 2, (width,) * 3, **sizes), width, classes=2)


def _mednext(width: int) -> Case:
    """MONAI's small one: depthwise kernels of 3, group norms by channel."""
    from monai.networks.nets import MedNeXt

    model = MedNeXt(3, 16, 1, 2, kernel_size=3, use_residual_connection=True)
    return _segmentation(model, width, classes=2)


SEGMENTING: dict[str, tuple[str, dict[str, Any]]] = {
    "unet": ("UNet", {"channels": (16, 32, 64, 128), "strides": (2, 2, 2), "num_res_units": 2}),
    "basicunet": ("BasicUNet", {}),
    "attentionunet": ("AttentionUnet", {"channels": (16, 32, 64, 128), "strides": (2, 2, 2)}),
    "highresnet": ("HighResNet", {}),
    "vnet": ("VNet", {}),
}
"""More of MONAI's networks for segmentation, by the name of the class and what it is given."""


def _segmenting(network: str, width: int) -> Case:
    from monai.networks import nets

    name, options = SEGMENTING[network]
    model = getattr(nets, name)(spatial_dims=3, in_channels=1, out_channels=2, **options)
    return _segmentation(model, width, classes=2)


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
    "densenet121": _densenet121,
    "convnext": _convnext,
    "fno": _fno,
    "swinunetr": _swinunetr,
    "unetr": _unetr,
    "mednext": _mednext,
    **{name: functools.partial(_segmenting, name) for name in SEGMENTING},
}
"""MONAI is asked for only where one of its networks is."""

PACKAGES = {
    "segresnet": ("monai",),
    "dynunet": ("monai",),
    "resnet": ("monai",),
    "densenet121": ("monai",),
    "fno": ("neuralop",),
    "swinunetr": ("monai", "einops"),
    "unetr": ("monai", "einops"),
    "mednext": ("monai",),
    **dict.fromkeys(SEGMENTING, ("monai",)),
}
"""What the networks of others need, all in the extras `medical` and `dev`."""

NETWORKS = {"cosmoflow": 128, "unet3d": 64, "segresnet": 64, "dynunet": 64, "resnet": 64}
"""The names, and the width at which each is measured."""

OTHERS = ("densenet121", "convnext", "fno", "swinunetr", "unetr", "mednext", *SEGMENTING)
"""Those that no other benchmark runs, at a width of 64."""

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


def measurable(networks: Iterable[str]) -> list[str]:
    """Those whose packages are there; says what the others lack."""
    found = []
    for network in networks:
        missing = [name for name in PACKAGES.get(network, ()) if find_spec(name) is None]
        if missing:
            print(f"{network} is left out, for want of {', '.join(missing)}", flush=True)
        else:
            found.append(network)
    return found


def main() -> None:
    from step import compare_steps, print_step  # it imports this module

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = [*NETWORKS, *OTHERS]
    parser.add_argument("--network", nargs="+", choices=names, default=OTHERS)
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--turns", type=int, default=5, help="of each side")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, help="voxels along each side")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results there")
    options = parser.parse_args()
    where = machine()
    what = {key: str(value) for key, value in vars(options).items() if key != "json"}
    results: dict[str, dict[str, object]] = {}
    for network in measurable(options.network):
        width = options.width or NETWORKS.get(network, 64)
        for name in options.dtype:
            given = (network, width, options.ranks, options.turns, getattr(torch, name))
            result = run_ranks(options.ranks, compare_steps, *given)[0]
            results.setdefault(network, {"width": width})[name] = result
            print_step(f"{network}-{width}, {name}", result, options.ranks)
            if options.json:  # each at once: a later one may fail
                found = {**where, "options": what, **results}
                options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
