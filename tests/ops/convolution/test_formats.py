"""The memory format of what convolutions and their chains return is torch's (tier: two ranks)."""

from __future__ import annotations

import itertools

import torch
from torch import nn

import hyperslab as hs
from hyperslab.kernels.memory_format import memory_format_of
from tests.ranks import run_ranks

LAST = torch.channels_last_3d


def networks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "convolution": nn.Conv3d(4, 3, 3, padding=1),
        "strided": nn.Conv3d(4, 6, 2, stride=2),
        "1": nn.Conv3d(4, 5, 1),
        "5": nn.Conv3d(4, 3, 5, padding=2),
        "groups": nn.Conv3d(4, 4, 3, padding=1, groups=2),
        "transposed": nn.ConvTranspose3d(4, 2, 2, stride=2),
        "norm, maximum": nn.Sequential(
            nn.Conv3d(4, 5, 3, padding=1), nn.BatchNorm3d(5), nn.ReLU(), nn.MaxPool3d(2)
        ),
        "average": nn.Sequential(nn.Conv3d(4, 5, 3, padding=1), nn.LeakyReLU(), nn.AvgPool3d(2)),
        "average alone": nn.AvgPool3d(2),
        "group norm alone": nn.GroupNorm(2, 4),
        "upsampling": nn.Upsample(scale_factor=2),
        "two": nn.Sequential(nn.Conv3d(4, 5, 3, padding=1), nn.ReLU(), nn.Conv3d(5, 3, 3)),
    }


SHAPES = [(1, 4, 4, 4, 4), (2, 4, 4, 6, 4), (1, 4, 16, 20, 16), (1, 4, 64, 81, 2)]
"""Small volumes, of which torch makes columns; a batch; larger ones."""


def others(axes: dict[str, int]) -> list[str]:
    """Where the format is not that of the serial run."""
    grid = hs.Grid(**axes)
    found = []
    cases = itertools.product(SHAPES, (False, True), (False, True))
    for shape, input_last, weights_last in cases:
        x = torch.randn(shape)
        x = x.contiguous(memory_format=LAST) if input_last else x
        for name, network in networks().items():
            network = network.to(memory_format=LAST) if weights_last else network
            try:
                y = network(x)
            except RuntimeError:  # too thin for this kernel
                continue
            z = network(hs.shard(x, grid)).local
            if memory_format_of(y) != memory_format_of(z):
                found.append(f"{name} {shape} {input_last} {weights_last}: {z.stride()}")
    return found


def test_memory_formats_are_those_of_the_serial_run() -> None:
    for axes in ({}, {"depth": 2}):
        for found in run_ranks(2 if axes else 1, others, axes):
            assert not found
