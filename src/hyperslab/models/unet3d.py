"""Builds the 3D U-Net (Çiçek et al. 2016) as Oyama et al. 2020 train it on CT volumes."""

from __future__ import annotations

import torch
from torch import nn


class UNet3D(nn.Module):
    """Predicts the logits of every voxel: (B, in_channels, D, H, W) -> (B, classes, D, H, W).

    The way down has ``levels`` times two convolutions and a maximum pooling, then two convolutions
    at the bottom. The way up has as often a transposed convolution, the skipped map beside it, and
    two convolutions. Every convolution is 3^3, padded, without bias, and followed by batch norm and
    ReLU; the last one is 1^3 and gives the classes' logits. With 32 channels and 3 levels this is
    the paper's network. The weights are He normal: torch's own, which are smaller, often never find
    a rare class, because its logits have no gradient once no feature is left.

    It takes all extents from ``2**levels`` on: if a map has an odd extent, its pooling leaves the
    last plane out, and on the way up a plane of zeros takes its place.

    Args:
        channels: after the very first convolution; every level has twice as many as the one before.

    Raises ValueError for sizes below 1.
    """

    def __init__(
        self, in_channels: int = 1, classes: int = 3, *, channels: int = 32, levels: int = 3
    ) -> None:
        super().__init__()
        if min(in_channels, classes, channels, levels) < 1:
            raise ValueError(f"UNet3D: {in_channels=}, {classes=}, {channels=}, {levels=}: need 1")
        widths = [channels << level for level in range(levels + 2)]
        self.down = nn.ModuleList()
        for level in range(levels + 1):  # the last one is the bottom
            first = widths[level]
            self.down.append(_block(in_channels, first, 2 * first))
            in_channels = 2 * first
        self.pool = nn.MaxPool3d(2)
        self.widen = nn.ModuleList()
        self.up = nn.ModuleList()
        for width, skipped in zip(widths[:1:-1], widths[-2:0:-1], strict=True):
            self.widen.append(nn.ConvTranspose3d(width, width, 2, stride=2, bias=False))
            self.up.append(_block(width + skipped, skipped, skipped))
        self.head = nn.Conv3d(widths[1], classes, 1, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Conv3d, nn.ConvTranspose3d)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped: list[torch.Tensor] = []
        for block in self.down:
            x = block(self.pool(x) if skipped else x)
            skipped.append(x)
        skipped.pop()  # the bottom's own
        for widen, block in zip(self.widen, self.up, strict=True):
            skip = skipped.pop()
            x = block(torch.cat([widen(x, output_size=skip.shape[2:]), skip], dim=1))
        logits: torch.Tensor = self.head(x)
        return logits


def _block(in_channels: int, *widths: int) -> nn.Sequential:
    layers = nn.Sequential()
    for i, width in enumerate(widths, start=1):
        layers.add_module(f"conv{i}", nn.Conv3d(in_channels, width, 3, padding=1, bias=False))
        layers.add_module(f"norm{i}", nn.BatchNorm3d(width))
        layers.add_module(f"act{i}", nn.ReLU(inplace=True))
        in_channels = width
    return layers
