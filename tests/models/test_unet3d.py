"""The 3D U-Net against numbers worked out by hand (tier: no process).

Shapes and flops come from meta tensors, so that 256^3 voxels cost nothing.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hyperslab.models import UNet3D

# (channels in, channels out, kernel volume, poolings before it), in the order of the network.
CONVOLUTIONS = [
    (1, 32, 27, 0), (32, 64, 27, 0),
    (64, 64, 27, 1), (64, 128, 27, 1),
    (128, 128, 27, 2), (128, 256, 27, 2),
    (256, 256, 27, 3), (256, 512, 27, 3),
    (512, 512, 8, 3), (512 + 256, 256, 27, 2), (256, 256, 27, 2),
    (256, 256, 8, 2), (256 + 128, 128, 27, 1), (128, 128, 27, 1),
    (128, 128, 8, 1), (128 + 64, 64, 27, 0), (64, 64, 27, 0),
    (64, 3, 1, 0),
]  # fmt: skip
WEIGHTS = 27 * 604_192 + 8 * 344_064 + 3 * 64  # 3^3, transposed 2^3, 1^3
NORMS = 2 * (32 + 64 + 64 + 128 + 128 + 256 + 256 + 512 + 2 * (256 + 128 + 64))


def meta(**options: int) -> UNet3D:
    with torch.device("meta"):
        return UNet3D(**options)


def volume(*extents: int, channels: int = 1, batch: int = 1) -> torch.Tensor:
    return torch.empty(batch, channels, *extents, device="meta")


def test_it_has_the_layers_of_the_paper() -> None:
    assert sum(a * b * k for a, b, k, _ in CONVOLUTIONS) == WEIGHTS
    model = meta()
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv3d, nn.ConvTranspose3d))]
    assert all(layer.bias is None for layer in layers)
    assert sum(layer.weight.numel() for layer in layers) == WEIGHTS
    assert sum(p.numel() for p in model.parameters()) == WEIGHTS + NORMS
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm3d)]
    assert len(norms) == sum(isinstance(m, nn.ReLU) for m in model.modules()) == 14
    assert {norm.eps for norm in norms} == {1e-5}


@pytest.mark.parametrize("width", [64, 128, 256])
def test_it_does_the_work_of_its_layers(width: int) -> None:
    """A transposed convolution of stride 2 does its work once for every input voxel."""
    expected = sum(2 * a * b * k * (width >> level) ** 3 for a, b, k, level in CONVOLUTIONS)
    counter = FlopCounterMode(display=False)
    with counter:
        y = meta()(volume(width, width, width))
    assert y.shape == (1, 3, width, width, width)
    assert counter.get_total_flops() == expected
    assert expected == pytest.approx(31.264e12 * (width / 256) ** 3, rel=1e-4)


@pytest.mark.parametrize("extents", [(8, 8, 8), (97, 128, 111), (15, 9, 8), (33, 34, 35)])
def test_any_extents_come_back(extents: tuple[int, int, int]) -> None:
    y = meta(channels=2, classes=5, in_channels=4)(volume(*extents, channels=4, batch=2))
    assert y.shape == (2, 5, *extents)


def test_levels_and_channels_are_free() -> None:
    model = meta(channels=8, levels=2, classes=7)
    assert model(volume(8, 8, 8)).shape == (1, 7, 8, 8, 8)
    assert [block.conv1.out_channels for block in model.down] == [8, 16, 32]
    assert [block.conv1.out_channels for block in model.up] == [32, 16]
    for wrong in ({"levels": 0}, {"classes": 0}, {"channels": 0}, {"in_channels": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            meta(**wrong)


def test_what_an_odd_extent_leaves_out_is_zero_on_the_way_up() -> None:
    model = UNet3D(channels=1, levels=1).eval()
    seen: list[torch.Tensor] = []
    model.up[0].conv1.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(torch.randn(1, 1, 5, 4, 7))
    widened, skipped = seen[0][:, :4], seen[0][:, 4:]
    assert widened[:, :, :4, :, :6].ne(0).any()
    assert widened[:, :, 4:].eq(0).all()
    assert widened[..., 6:].eq(0).all()
    assert skipped[:, :, 4:].ne(0).any()
