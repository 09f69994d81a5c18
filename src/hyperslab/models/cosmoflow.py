"""CosmoFlow: cosmological parameters from a volume of matter, in the four variants people run.

One module builds them all. A variant is a description (`cosmoflow_variants.py`): its
convolutions, its pooling, its dense layers and its initialisation.
"""

from __future__ import annotations

import torch
from torch import nn

from hyperslab.models.cosmoflow_variants import Variant, variant_of


class CosmoFlow(nn.Module):
    """(B, in_channels, width, width, width) -> (B, outputs), targets in [-1, 1].

    Every convolution is followed by batch norm where asked for, a leaky ReLU, and mostly a pooling;
    three dense layers follow.

    Args:
        width: voxels along each side of the volume; each variant says which it takes.
        variant: "paper2020" (Oyama et al. 2020, table I), "sc18" (Mathuriya et al. 2018, figure 2),
            "lbann" (the network of LBANN's users) or "mlperf" (the MLPerf HPC benchmark).
        in_channels: the variant's own where None.
        outputs: the variant's own where None.
        dropout: the probability of dropping; the variant's own where None.
        batch_norm: after every convolution, which then has no bias.

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
        _initialise(self, spec)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.features(x))
        return y if self.bound is None else self.bound * torch.tanh(y)


def _initialise(model: CosmoFlow, spec: Variant) -> None:
    """Weights as the variant draws them, biases zero."""
    for module in model.modules():
        if isinstance(module, (nn.Conv3d, nn.Linear)):
            spec.initialise(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    if spec.zero_last:
        nn.init.zeros_(model.head.get_parameter("fc3.weight"))


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
