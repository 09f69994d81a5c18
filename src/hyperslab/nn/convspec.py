"""One rank's share of a convolution, as geometry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hyperslab.comm import Plan
from hyperslab.geometry import Box, Window


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """The windows, the exchange and the output box of one rank.

    ``covered[i]``: the plan's wanted box spans spatial dim ``i`` with its halo and its padding,
    so that a convolution of it needs no padding there.
    """

    name: str
    windows: tuple[Window, ...]
    covered: tuple[bool, ...]
    groups: int
    plan: Plan
    out: Box

    @property
    def stride(self) -> list[int]:
        return [w.stride for w in self.windows]

    @property
    def dilation(self) -> list[int]:
        return [w.dilation for w in self.windows]

    @property
    def uncovered_padding(self) -> list[int]:
        """Padding left to the op when it runs on the wanted box."""
        return [0 if c else w.before for c, w in zip(self.covered, self.windows, strict=True)]


def conv_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    spec: ConvSpec,
    padding: Sequence[int],
    stride: Sequence[int] | None = None,
) -> torch.Tensor:
    """The local convolution of torch with the parameters of ``spec``."""
    stride = spec.stride if stride is None else stride
    zero = [0] * len(spec.windows)
    return torch.ops.aten.convolution(
        x, weight, bias, stride, padding, spec.dilation, False, zero, spec.groups
    )


def conv_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    spec: ConvSpec,
    padding: Sequence[int],
    needs: Sequence[bool],
    stride: Sequence[int] | None = None,
) -> Any:
    """Gradients of input, weight and bias of `conv_forward`; None where ``needs`` is false."""
    stride = spec.stride if stride is None else stride
    zero = [0] * len(spec.windows)
    return torch.ops.aten.convolution_backward(
        gradient,
        x,
        weight,
        [weight.shape[0]],
        stride,
        padding,
        spec.dilation,
        False,
        zero,
        spec.groups,
        list(needs),
    )
