"""One rank's share of a convolution, as geometry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.comm import Plan
from hyperslab.geometry import Box, Window

IM2COL = 20480  # below this batch * channels * rows torch 2.13 takes im2col in float32


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

    @property
    def box(self) -> Box:
        """What the buffer spans for one convolution of block and halo."""
        return self.plan.wanted

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The rank's outputs from the buffer."""
        return conv_forward(x, weight, bias, self, self.uncovered_padding)

    def backward(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, needs: Sequence[bool]
    ) -> Any:
        """Gradients of buffer, weight and bias; None where ``needs`` is false."""
        return conv_backward(gradient, x, weight, self, self.uncovered_padding, needs)


def conv_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    spec: ConvSpec,
    padding: Sequence[int],
) -> torch.Tensor:
    """The local convolution of torch with the parameters of ``spec``."""
    zero = [0] * len(spec.windows)
    if _asks_for_onednn(x, weight):
        return torch.ops.aten.mkldnn_convolution(
            x, weight.contiguous(), bias, padding, spec.stride, spec.dilation, spec.groups
        )
    return torch.ops.aten.convolution(
        x, weight, bias, spec.stride, padding, spec.dilation, False, zero, spec.groups
    )


def conv_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    spec: ConvSpec,
    padding: Sequence[int],
    needs: Sequence[bool],
) -> Any:
    """Gradients of input, weight and bias of `conv_forward`; None where ``needs`` is false."""
    if too_shallow(x, weight) and needs[1]:
        margins = [m for p in reversed(padding) for m in (p, p)]
        dx, dw, db = conv_backward(
            gradient, F.pad(x, margins), weight, spec, [0] * len(padding), needs
        )
        return None if dx is None else F.pad(dx, [-m for m in margins]), dw, db
    zero = [0] * len(spec.windows)
    if _asks_for_onednn(x, weight) and not torch.is_grad_enabled():
        x = x.to_mkldnn()  # chooses the kernel; the gradients are ordinary tensors, without graph
    return torch.ops.aten.convolution_backward(
        gradient,
        x,
        weight,
        [weight.shape[0]],
        spec.stride,
        padding,
        spec.dilation,
        False,
        zero,
        spec.groups,
        list(needs),
    )


def _asks_for_onednn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether to name the kernel instead of leaving the choice to torch.

    For a small input torch takes im2col however many channels come out: two to five times slower
    on the blocks and slabs of a cut volume.
    """
    return bool(
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.dim() in (4, 5)
        and x.numel() > 0
        and x.shape[:4].numel() <= IM2COL
        and x.is_contiguous()
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
    )


def too_shallow(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether oneDNN's bfloat16 kernel needs padding to be part of ``x`` itself.

    Its weight gradient reads, and sometimes writes, foreign memory when the kernel is larger than
    the volume in some dim (oneDNN 3.12): garbage or NaN, also in a plain torch convolution.
    """
    larger = any(k > e for k, e in zip(weight.shape[2:], x.shape[2:], strict=True))
    return larger and x.device.type == "cpu" and x.dtype == torch.bfloat16
