"""Builds CosmoFlow, which predicts cosmological parameters from a volume of matter.

One module builds the four variants that people run. A variant is a description (`Variant`): its
convolutions, its pooling, its dense layers and its initialisation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from hyperslab.models.widths import check_width


@dataclass(frozen=True)
class ConvLayer:
    channels: int
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    pool: bool = True  # a pooling follows


@dataclass(frozen=True)
class Variant:
    convolutions: tuple[ConvLayer, ...]
    pool: Callable[[], nn.Module]
    last_width: int  # of the map that the dense layers read
    hidden: tuple[int, int]
    slope: float  # of the leaky ReLUs
    dropout: float  # the probability of dropping, after each hidden layer
    initialise: Callable[[torch.Tensor], torch.Tensor]
    bias: bool = True  # of the convolutions, without batch norm
    bound: float | None = None  # the output is bound * tanh, or linear
    drop_features: bool = False  # dropout before the first dense layer too
    zero_last: bool = False  # the last dense layer starts at zero
    in_channels: int = 4
    outputs: int = 4


def paper2020(width: int) -> Variant:
    """Return the network of Oyama et al. 2020, section IV and table I.

    Poolings follow the first log2(width) - 2 convolutions and the fourth convolution has stride 2,
    so the last map is 256 x 2^3 at every width and so is the number of parameters. At 128, 256 and
    512 this is the paper's table; below 128 the same rule drops poolings from the end. The paper
    does not state the initialisation: He normal for the leaky ReLU, and zero for the last dense
    layer, so that training starts from the middle of every parameter's range.
    """
    poolings = _log2(width) - 2
    channels = (16, 32, 64, 128, 256, 256, 256)
    return Variant(
        convolutions=tuple(
            ConvLayer(c, stride=2 if i == 4 else 1, pool=i <= poolings)
            for i, c in enumerate(channels, start=1)
        ),
        pool=functools.partial(nn.AvgPool3d, 2),
        last_width=2,
        hidden=(2048, 256),
        slope=0.01,
        dropout=0.2,
        initialise=functools.partial(nn.init.kaiming_normal_, a=0.01),
        bias=False,
        zero_last=True,
    )


def sc18(width: int) -> Variant:
    """Return the network of Mathuriya et al. 2018, figure 2 and section III-A.

    The stride of 2 belongs to the fourth convolution: only so do the layers do the work of its
    table I (5.2 and 0.1 Gflop forward in the third and fourth) with its three poolings.

    That is at 128. At 64 and 32 the first convolutions are left out with their poolings, one each
    time the width is halved: all that follows is the same, and the last map is 256 x 2^3.
    """
    poolings = _log2(width) - 4
    pooled = (
        ConvLayer(16, kernel=3, padding=0),
        ConvLayer(32, kernel=4, padding=0),
        ConvLayer(64, kernel=4, padding=0),
    )
    return Variant(
        convolutions=(
            *pooled[len(pooled) - poolings :],
            ConvLayer(128, kernel=3, padding=0, stride=2, pool=False),
            ConvLayer(256, kernel=3, padding=0, pool=False),
            ConvLayer(256, kernel=2, padding=0, pool=False),
            ConvLayer(256, kernel=2, padding=0, pool=False),
        ),
        pool=functools.partial(nn.AvgPool3d, 2),
        last_width=2,
        hidden=(2048, 256),
        slope=0.01,
        dropout=0.5,
        drop_features=True,
        initialise=nn.init.xavier_uniform_,
        in_channels=1,
        outputs=3,
    )


def lbann(width: int) -> Variant:
    """LBANN's CosmoFlow: log2(width) - 2 convolutions, so that the last map is 4^3."""
    return Variant(
        convolutions=tuple(ConvLayer(min(16 << i, 256)) for i in range(_log2(width) - 2)),
        pool=functools.partial(nn.AvgPool3d, 3, stride=2, padding=1),
        last_width=4,
        hidden=(2048, 256),
        slope=0.3,
        dropout=0.5,
        bound=1.2,
        initialise=functools.partial(nn.init.kaiming_normal_, nonlinearity="relu"),
        zero_last=True,
    )


def mlperf(width: int) -> Variant:
    """Implements the MLPerf HPC benchmark: five convolutions, a last map of (width / 32)^3."""
    return Variant(
        convolutions=tuple(ConvLayer(c) for c in (32, 64, 128, 256, 512)),
        pool=functools.partial(nn.MaxPool3d, 2),
        last_width=width // 32,
        hidden=(128, 64),
        slope=0.3,
        dropout=0.5,
        bound=1.2,
        initialise=nn.init.xavier_uniform_,
    )


COSMOFLOW_VARIANTS: dict[str, Callable[[int], Variant]] = {
    "paper2020": paper2020,
    "sc18": sc18,
    "lbann": lbann,
    "mlperf": mlperf,
}


def variant_of(name: str, width: int) -> Variant:
    """Describe a variant; raises as `check_width`."""
    check_width(name, width)
    return COSMOFLOW_VARIANTS[name](width)


def _log2(width: int) -> int:
    return width.bit_length() - 1


class CosmoFlow(nn.Module):
    """Predicts targets in [-1, 1]: (B, in_channels, width, width, width) -> (B, outputs).

    Every convolution is followed by batch norm (if asked for), a leaky ReLU and, mostly, a pooling;
    three dense layers follow.

    Args:
        width: voxels along each side of the volume; each variant says which it takes.
        variant: "paper2020" (Oyama et al. 2020, table I), "sc18" (Mathuriya et al. 2018, figure 2),
            "lbann" (the network of LBANN's users) or "mlperf" (the MLPerf HPC benchmark).
        in_channels: None takes the variant's own.
        outputs: None takes the variant's own.
        dropout: the probability of dropping; None takes the variant's own.
        batch_norm: adds one after every convolution, which then has no bias.

    Raises ValueError for a variant that does not exist and a width that it does not take.
    """

    def __init__(
        self,
        width: int = 128,
        *,
        variant: str = "paper2020",
        in_channels: int | None = None,
        outputs: int | None = None,
        batch_norm: bool = False,
        dropout: float | None = None,
    ) -> None:
        super().__init__()
        spec = variant_of(variant, width)
        channels = spec.in_channels if in_channels is None else in_channels
        self.features = _features(spec, channels, batch_norm)
        self.head = _head(
            spec,
            outputs=spec.outputs if outputs is None else outputs,
            dropout=spec.dropout if dropout is None else dropout,
        )
        self.bound = spec.bound
        for module in self.modules():
            if isinstance(module, (nn.Conv3d, nn.Linear)):
                spec.initialise(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if spec.zero_last:
            nn.init.zeros_(self.head.get_parameter("fc3.weight"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.features(x))
        return y if self.bound is None else self.bound * torch.tanh(y)


def _features(spec: Variant, channels: int, batch_norm: bool) -> nn.Sequential:
    layers = nn.Sequential()
    for i, conv in enumerate(spec.convolutions, start=1):
        layers.add_module(
            f"conv{i}",
            nn.Conv3d(
                channels,
                conv.channels,
                conv.kernel,
                stride=conv.stride,
                padding=conv.padding,
                bias=spec.bias and not batch_norm,
            ),
        )
        if batch_norm:
            layers.add_module(f"norm{i}", nn.BatchNorm3d(conv.channels))
        layers.add_module(f"act{i}", nn.LeakyReLU(spec.slope))
        if conv.pool:
            layers.add_module(f"pool{i}", spec.pool())
        channels = conv.channels
    return layers


def _head(spec: Variant, *, outputs: int, dropout: float) -> nn.Sequential:
    layers = nn.Sequential()
    layers.add_module("flatten", nn.Flatten())
    if spec.drop_features:
        layers.add_module("drop0", nn.Dropout(dropout))
    features = spec.convolutions[-1].channels * spec.last_width**3
    for i, hidden in enumerate(spec.hidden, start=1):
        layers.add_module(f"fc{i}", nn.Linear(features, hidden))
        layers.add_module(f"act{i}", nn.LeakyReLU(spec.slope))
        layers.add_module(f"drop{i}", nn.Dropout(dropout))
        features = hidden
    layers.add_module("fc3", nn.Linear(features, outputs))
    return layers
