"""Networks of MONAI, unchanged: narrow, shallow, and on extents that do not divide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import monai.networks.nets as nets
import monai.networks.nets.vnet as vnet_blocks
from torch import nn

CLASSES = 3
GROUPS: Any = ("group", {"num_groups": 2})


@dataclass(frozen=True)
class Network:
    """How to make it, and what it is trained with.

    Args:
        make: a new network.
        shape: of its input.
        goal: ``classes`` of every voxel, or ``numbers``: of a sample, or of every patch of it.
        call: how it takes its input.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    goal: str = "classes"
    call: Callable[[nn.Module, Any], Any] = lambda network, x: network(x)


def unet() -> nn.Module:
    """Residual units, batch norm, strided and transposed convolutions, parametric ReLU."""
    return nets.UNet(3, 1, CLASSES, (4, 6, 8), (2, 2), num_res_units=2, norm="batch")


def basic_unet() -> nn.Module:
    """Instance norm, max pooling to the last voxel, replicate padding where extents are odd."""
    return nets.BasicUNet(3, 1, CLASSES, (4, 4, 4, 6, 6, 4))


def basic_unet_plus_plus() -> nn.Module:
    """Dense skips, group norm, interpolation, four outputs."""
    return nets.BasicUNetPlusPlus(
        3, 1, CLASSES, (2, 2, 4, 4, 4, 2), True, norm=GROUPS, upsample="nontrainable"
    )


def dynunet() -> nn.Module:
    """Anisotropic kernels and strides, residual blocks, instance norm, deep supervision."""
    kernels, strides = [(1, 3, 3), (3, 3, 3), (3, 3, 3)], [(1, 1, 1), (1, 2, 2), (2, 2, 2)]
    return nets.DynUNet(
        3, 1, CLASSES, kernels, strides, strides[1:], filters=(4, 6, 8), deep_supervision=True,
        res_block=True,
    )  # fmt: skip


def segresnet() -> nn.Module:
    """Group norm before activation, trilinear upsampling, channel dropout."""
    return nets.SegResNet(
        3, 4, 1, CLASSES, 0.2, norm=GROUPS, blocks_down=(1, 1, 1), blocks_up=(1, 1)
    )


def segresnet_ds() -> nn.Module:
    """Transposed upsampling, an output of every level."""
    return nets.SegResNetDS(3, 4, 1, CLASSES, norm="instance", blocks_down=(1, 1, 1), dsdepth=2)


def attention_unet() -> nn.Module:
    """Attention gates."""
    return nets.AttentionUnet(3, 1, CLASSES, (4, 6, 8), (2, 2))


def regunet() -> nn.Module:
    """Of image registration: additive skips, pooling."""
    return nets.RegUNet(3, 1, 4, 2, out_channels=CLASSES)


def dints() -> nn.Module:
    """From an architecture search: cells that mix resolutions, factorised convolutions."""
    space = nets.TopologyInstance(channel_mul=0.2, num_blocks=2, num_depths=2, device="cpu")
    return nets.DiNTS(space, 1, CLASSES)


def mednext() -> nn.Module:
    """Depthwise convolutions of 5, group norm by channel, GELU, response norm over space."""
    return nets.MedNeXt(
        3, 4, 1, CLASSES, kernel_size=5, deep_supervision=True, use_residual_connection=True,
        blocks_down=(1, 1), blocks_bottleneck=1, blocks_up=(1, 1), global_resp_norm=True,
    )  # fmt: skip


def highresnet() -> nn.Module:
    """Dilated convolutions at full resolution, padded channels."""
    convolution = {"name": "conv_0", "n_features": 4, "kernel_size": 3}
    blocks = [
        {"name": f"res_{n}", "n_features": 2 + 2 * n, "kernels": (3, 3), "repeat": 1}
        for n in (1, 2, 3)
    ]
    tail = [
        {"name": "conv_1", "n_features": 8, "kernel_size": 1},
        {"name": "conv_2", "kernel_size": 1},
    ]
    return nets.HighResNet(3, 1, CLASSES, layer_params=[convolution, *blocks, *tail])


def autoencoder() -> nn.Module:
    """Dilated layers between encoder and decoder, no skips."""
    return nets.AutoEncoder(
        3, 1, CLASSES, (4, 6, 8), (2, 1, 2), inter_channels=[8, 8], inter_dilations=[1, 2]
    )


def vnet() -> nn.Module:
    """The blocks of VNet, two levels of its five: kernels of 5, ELU, channel dropout."""
    return ShallowVNet()


class ShallowVNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        act: Any = ("elu", {"inplace": True})
        self.enter = vnet_blocks.InputTransition(3, 1, 16, act)
        self.down = vnet_blocks.DownTransition(3, 16, 1, act, 0.5)
        self.up = vnet_blocks.UpTransition(3, 32, 32, 1, act, (0.5, 0.5))
        self.leave = vnet_blocks.OutputTransition(3, 32, CLASSES, act)

    def forward(self, x: Any) -> Any:
        skip = self.enter(x)
        return self.leave(self.up(self.down(skip), skip))


def voxelmorph() -> nn.Module:
    """Registration: a U-Net without norm, a field that is integrated, and sampled at places."""
    return nets.VoxelMorph(nets.VoxelMorphUNet(3, 2, 3, (4, 4, 6, 6), (4, 4)), 2)


def register(network: nn.Module, x: Any) -> Any:
    """Moving and fixed image are the two channels; the field counts as classes."""
    moved, field = network(x[:, :1], x[:, 1:])
    return field + moved


def densenet() -> nn.Module:
    """Dense connections, batch norm, average pooling."""
    return nets.DenseNet(3, 1, 4, init_features=8, growth_rate=4, block_config=(2, 2, 2))


def resnet() -> nn.Module:
    """A kernel of 7 with a stride, overlapping max pooling, shortcuts with a stride."""
    return nets.ResNet(
        "basic", [1, 1, 1, 1], [4, 4, 6, 8], n_input_channels=1, conv1_t_stride=2, num_classes=4
    )


def efficientnet() -> nn.Module:
    """Inverted bottlenecks, squeeze and excitation, one-sided padding."""
    blocks = ["r1_k3_s11_e1_i8_o8_se0.25", "r2_k5_s22_e2_i8_o8_se0.25"]
    return nets.EfficientNet(blocks, 3, 1, 4, 0.25, image_size=20, dropout_rate=0.2)


def discriminator() -> nn.Module:
    """Kernels of 4 that do not line up with the cut, an output of every layer."""
    return nets.PatchDiscriminator(3, 4, 1, num_layers_d=2)


NETWORKS: dict[str, Network] = {
    "UNet": Network(unet, (2, 1, 20, 24, 12)),
    "BasicUNet": Network(basic_unet, (2, 1, 17, 16, 33)),
    "BasicUNetPlusPlus": Network(basic_unet_plus_plus, (1, 1, 16, 16, 32)),
    "DynUNet": Network(dynunet, (2, 1, 14, 20, 12)),
    "SegResNet": Network(segresnet, (2, 1, 20, 12, 12)),
    "SegResNetDS": Network(segresnet_ds, (1, 1, 20, 24, 20)),
    "AttentionUnet": Network(attention_unet, (2, 1, 20, 12, 12)),
    "RegUNet": Network(regunet, (1, 1, 20, 24, 20)),
    "DiNTS": Network(dints, (2, 1, 12, 8, 20)),
    "MedNeXt": Network(mednext, (1, 1, 20, 12, 12)),
    "HighResNet": Network(highresnet, (1, 1, 18, 17, 19)),
    "AutoEncoder": Network(autoencoder, (2, 1, 20, 12, 28)),
    "VNet": Network(vnet, (2, 1, 12, 10, 14)),
    "VoxelMorph": Network(voxelmorph, (2, 2, 16, 24, 16), call=register),
    "DenseNet": Network(densenet, (2, 1, 27, 30, 25), "numbers"),
    "ResNet": Network(resnet, (2, 1, 33, 30, 25), "numbers"),
    "EfficientNet": Network(efficientnet, (2, 1, 20, 20, 20), "numbers"),
    "PatchDiscriminator": Network(discriminator, (2, 1, 21, 24, 25), "numbers"),
}
