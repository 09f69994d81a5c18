"""Builds networks that see a whole periodic volume, but only so far at once.

    python benchmarks/receptive_field.py SWEEP --json benchmarks/results/receptive-field-32.json

records what a sweep of `receptive_field_sweep.yaml`, beside this file, found: errors on the test
split with intervals, as `hyperslab report --json` writes them, and the weights of each network.
docs/receptive-field.md says what follows.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from hyperslab.models.multiscale import SettledNorm

RECEPTIVE_FIELDS = (1, 3, 5, 9, 17, 33)
"""The voxels along each side on which a feature depends, by the number of layers of 3^3."""

CHANNELS = (16, 32, 32, 32, 32, 32)
"""The channels behind each convolution."""


class PatchNet(nn.Module):
    """Predicts targets of a periodic volume: (B, in_channels, D, H, W) -> (B, outputs).

    Each network is the beginning of the one with the next larger receptive field: convolutions of
    3^3, then one of 1, which makes its features. Convolutions of 3^3 behind the first have stride
    2, so neighbouring patches overlap by half and more, and every voxel counts. The head reads the
    mean and the variance of each feature over the volume, which no longer know where a patch was.
    So the prediction follows from the distribution of patches alone, however they are arranged.

    Args:
        receptive_field: the width of a patch, one of `RECEPTIVE_FIELDS` [voxels].
        hidden: the width of the hidden layer behind the means and variances.

    Raises ValueError for another receptive field.
    """

    def __init__(
        self, in_channels: int = 4, outputs: int = 4, *, receptive_field: int, hidden: int = 128
    ) -> None:
        super().__init__()
        if receptive_field not in RECEPTIVE_FIELDS:
            raise ValueError(f"{receptive_field=}: use one of {RECEPTIVE_FIELDS}")
        wide = RECEPTIVE_FIELDS.index(receptive_field)
        kernels = [*([3] * wide or [1]), 1]
        widths = pairwise((in_channels, *CHANNELS[: len(kernels)]))
        self.features = nn.Sequential()
        for i, (kernel, (taken, given)) in enumerate(zip(kernels, widths, strict=True)):
            self.features.append(
                nn.Conv3d(taken, given, 3, 2 if i else 1, 1, padding_mode="circular", bias=False)
                if kernel == 3
                else nn.Conv3d(taken, given, 1, bias=False)
            )
            self.features.append(nn.BatchNorm3d(given))
            self.features.append(nn.LeakyReLU(0.01))
        last = nn.Linear(hidden, outputs)
        nn.init.zeros_(last.weight)  # training starts from the middle of every range
        self.head = nn.Sequential(
            SettledNorm(2 * CHANNELS[-1]),
            nn.Linear(2 * CHANNELS[-1], hidden),
            nn.LeakyReLU(0.01),
            last,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.features(x)
        wide = torch.promote_types(patches.dtype, torch.float32)
        variance, mean = torch.var_mean(patches.to(wide), (2, 3, 4), correction=0)
        predicted: torch.Tensor = self.head(torch.cat([mean, torch.log(variance + 1e-4)], 1))
        return predicted


def main() -> None:
    # A recipe imports this module for its network, from a folder in which there is no `clock`.
    from clock import machine

    from hyperslab.studies.configurations import read_comparison
    from hyperslab.studies.report.comparison import comparison_numbers

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("sweep", type=Path, help="the folder of the sweep")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    numbers = comparison_numbers(read_comparison([options.sweep]))
    for row in numbers["rows"]:
        net = PatchNet(receptive_field=int(row["name"]))
        row["weights"] = sum(weight.numel() for weight in net.parameters())
    command = "hyperslab sweep benchmarks/receptive_field_sweep.yaml"
    record = {"machine": machine(), "command": command, **numbers}
    options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
