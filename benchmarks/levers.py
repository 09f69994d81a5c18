"""Builds the network of `recipes/figure9.yaml` with one of its choices made otherwise.

`levers_sweep.yaml`, beside this file, trains it with each choice alone; docs/science.md has the
errors.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

import hyperslab as hs

GROUPS = 8
"""The groups of channels of a group norm."""


class PaperNet(nn.Module):
    """Predicts targets: (B, 4, width, width, width) -> (B, outputs), as CosmoFlow `paper2020` does.

    Args:
        norm: what follows every convolution.
        padding: of the convolutions; "circular" takes the volume for periodic.
        zero_last: the last dense layer begins at zero, or as the others do.
        shift: training rolls every mini-batch around the periodic volume, by another vector in
            each step.
    """

    def __init__(
        self,
        width: int = 64,
        outputs: int = 4,
        *,
        norm: Literal["batch", "group", "none"] = "batch",
        padding: Literal["zeros", "circular"] = "zeros",
        zero_last: bool = True,
        shift: bool = False,
    ) -> None:
        super().__init__()
        self.network = hs.models.CosmoFlow(width, outputs=outputs, batch_norm=norm != "none")
        for name, module in list(self.network.features.named_children()):
            if isinstance(module, nn.Conv3d):
                module.padding_mode = padding
            elif isinstance(module, nn.BatchNorm3d) and norm == "group":
                self.network.features.add_module(name, nn.GroupNorm(GROUPS, module.num_features))
        if not zero_last:
            nn.init.kaiming_normal_(self.network.head.get_parameter("fc3.weight"), a=0.01)
        self.shift = shift
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.shift:
            self.steps += 1
            generator = torch.Generator().manual_seed(self.steps)
            by = [int(torch.randint(extent, (), generator=generator)) for extent in x.shape[2:]]
            x = torch.roll(x, by, (2, 3, 4))
        predicted: torch.Tensor = self.network(x)
        return predicted
