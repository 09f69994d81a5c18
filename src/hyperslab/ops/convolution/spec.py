"""One rank's share of a convolution, as geometry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hyperslab.comm import ExchangePlan
from hyperslab.geometry import Box, Window
from hyperslab.ops.kernels.convolution import (
    ConvOptions,
    Gradients,
    Kernels,
    conv_backward,
    conv_forward,
)


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """The windows, the exchange and the output box of one rank.

    ``covered[i]``: the plan's wanted box spans spatial dim ``i`` with its halo and its padding,
    so that a convolution of it needs no padding there.
    """

    name: str
    windows: tuple[Window, ...]
    covered: tuple[bool, ...]
    options: ConvOptions
    plan: ExchangePlan
    out: Box

    @property
    def uncovered_padding(self) -> list[int]:
        """Padding left to the op when it runs on the wanted box."""
        return [0 if c else w.before for c, w in zip(self.covered, self.windows, strict=True)]

    @property
    def box(self) -> Box:
        """What the buffer spans for one convolution of block and halo."""
        return self.plan.wanted

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kernels: Kernels,
    ) -> torch.Tensor:
        """The rank's outputs from the buffer."""
        return conv_forward(x, weight, bias, self.options, self.uncovered_padding, kernels)

    def backward(
        self,
        gradient: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        needs: Sequence[bool],
        kernels: Kernels,
    ) -> Gradients:
        """Gradients of buffer, weight and bias; None where ``needs`` is false."""
        padding = self.uncovered_padding
        return conv_backward(gradient, x, weight, self.options, padding, needs, kernels)
