"""Builds a network that predicts parameters from statistics of its features at every scale."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from hyperslab.models.summary_statistics import summary_count, summary_statistics


class SettledNorm(nn.BatchNorm1d):
    """Normalises features (N, F) by the average statistics of the first mini-batches.

    Batch norm would compare a sample with the others of its mini-batch for ever, and its mean over
    16 samples is off by a quarter of what tells samples apart.

    Args:
        batches: whose statistics count. One of a single sample, as an epoch may end with, does not.
    """

    def __init__(self, features: int, *, batches: int = 8) -> None:
        super().__init__(features)
        self.batches = batches
        self._seen = 0  # num_batches_tracked on the host: no step waits for a GPU to tell it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self._seen < self.batches and len(x) > 1:
            self._seen += 1
            self.momentum = 1 / self._seen  # a plain average over mini-batches
            return super().forward(x)
        mean, variance = self.running_mean, self.running_var
        return F.batch_norm(x, mean, variance, self.weight, self.bias, eps=self.eps)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self._seen = int(state_dict.get(f"{prefix}num_batches_tracked", self._seen))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class MultiscaleNet(nn.Module):
    """Predicts targets: (B, in_channels, D, H, W) -> (B, outputs).

    Every stage is a convolution of 3^3, batch norm, a leaky ReLU and an average pooling of 2^3. The
    head reads the mean and the logarithm of the variance of every channel, of the volume itself and
    behind every stage, so that each scale is heard and no place is: moving a periodic universe by
    the product of all strides changes nothing. It is made for targets that belong to the whole of a
    statistically homogeneous volume. (The last map of CosmoFlow, flattened, tells places apart that
    mean the same, and hears only its coarsest scale.)

    Args:
        channels: of each stage's convolution; none, and the head reads the volume's own statistics.
        hidden: the width of the two hidden layers of the head.
        periodic: convolutions go on at the other side of the volume; False pads with zeros.
        summary_width: the head also reads the summary statistics of volumes that hold log(1 +
            count): skewness and kurtosis, moments and power spectra of the logarithm of counts that
            two Gaussians smooth, power spectra of each channel and between channels, of the input
            and of the contrast of counts, and the distribution of counts at three smoothings
            (`hyperslab.models.summary_statistics`). The bins of wave number are those of a cube of
            so many voxels a side; volumes of other extents have the same bins per voxel.

    Raises ValueError for sizes below 1.
    """

    def __init__(
        self,
        in_channels: int = 4,
        outputs: int = 4,
        *,
        channels: Sequence[int] = (16, 32, 64, 128),
        hidden: int = 256,
        dropout: float = 0.0,
        periodic: bool = True,
        summary_width: int | None = None,
    ) -> None:
        super().__init__()
        widths = [in_channels, *channels]
        if min(*widths, outputs, hidden, 1 if summary_width is None else summary_width) < 1:
            raise ValueError(
                f"MultiscaleNet: {in_channels=}, {outputs=}, {channels=}, {hidden=}, "
                f"{summary_width=}: need 1"
            )
        mode: Literal["circular", "zeros"] = "circular" if periodic else "zeros"
        self.stages = nn.ModuleList(
            nn.Sequential(
                nn.Conv3d(i, o, 3, padding=1, padding_mode=mode, bias=False),
                nn.BatchNorm3d(o),
                nn.LeakyReLU(0.01),
                nn.AvgPool3d(2),
            )
            for i, o in pairwise(widths)
        )
        features = 2 * sum(widths)
        self.summary_width = summary_width
        if summary_width is not None:
            features += summary_count(in_channels, summary_width)
        last = nn.Linear(hidden, outputs)
        nn.init.zeros_(last.weight)  # training starts from the middle of every range
        self.norm = SettledNorm(features)
        self.head = nn.Sequential(
            nn.Linear(features, hidden),
            nn.LeakyReLU(0.01),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.LeakyReLU(0.01),
            nn.Dropout(dropout),
            last,
        )

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the head reads of volumes, (B, F), before it is normalised."""
        found = [_moments(x)]
        summary = None if self.summary_width is None else summary_statistics(x, self.summary_width)
        for stage in self.stages:
            x = stage(x)
            found.append(_moments(x))
        if summary is not None:
            found.append(summary)
        return torch.cat(found, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        predicted: torch.Tensor = self.head(self.norm(self.features(x)))
        return predicted


def _moments(x: torch.Tensor) -> torch.Tensor:
    """Return the means and the log variances (B, 2C) of channels (B, C, D, H, W).

    Universes differ by less than half a precision tells apart in a mean: float32 at least.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    variance, mean = torch.var_mean(x.to(wide), (2, 3, 4), correction=0)
    return torch.cat([mean, torch.log(variance + 1e-4)], 1)
