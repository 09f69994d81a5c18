"""Transposed convolution: the rule of ``conv_transpose1d``, ``2d`` and ``3d``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.comm import ExchangePlan, Grid, per_grid, plan_exchange
from hyperslab.errors import LayoutError
from hyperslab.geometry import Box, Crop, Partition, TransposedWindow
from hyperslab.ops.common.arguments import hashable, per_dim
from hyperslab.ops.common.placement import (
    check_input,
    output_partition,
    placement,
    read_cover,
)
from hyperslab.ops.convolution.buffered import BufferConv
from hyperslab.ops.convolution.conv import cast_for_autocast
from hyperslab.tensor import Sharded, register

LOCAL = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True, slots=True)
class TransposedSpec:
    """One rank's share of a transposed convolution: what it fetches, and the op on the buffer.

    ``box``: what the buffer spans: the inputs that the rank's outputs read, and a few planes of
    zeros where the op could not crop its result otherwise.
    """

    name: str
    plan: ExchangePlan
    box: Box
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    extra: tuple[int, ...]
    groups: int

    @property
    def local(self) -> bool:
        """Whether the rank's outputs are the op on its own block: no message and no buffer."""
        return not self.plan.sends and not self.plan.receives and self.box == self.plan.own

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The rank's outputs from the buffer."""
        return torch.ops.aten.convolution(
            x,
            weight,
            bias,
            self.stride,
            self.padding,
            self.dilation,
            True,
            self.extra,
            self.groups,
        )

    def backward(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, needs: Sequence[bool]
    ) -> Any:
        """Gradients of buffer, weight and bias; None where ``needs`` is false."""
        return torch.ops.aten.convolution_backward(
            gradient,
            x,
            weight,
            [weight.shape[1] * self.groups],
            self.stride,
            self.padding,
            self.dilation,
            True,
            self.extra,
            self.groups,
            list(needs),
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's geometry of a transposed convolution."""

    input: Partition  # the input's, after gathering axes for which the output is too thin
    output: Partition
    spec: TransposedSpec


@per_grid
def lay_out(
    grid: Grid, x: Partition, shape: torch.Size, options: Sequence[Any], groups: int
) -> Layout:
    """Where the outputs lie and what they read; ``shape`` is the weight's.

    ``options``: stride, padding, output_padding, dilation, as torch takes them.
    """
    windows = tuple(
        map(TransposedWindow, shape[2:], *(per_dim(value, len(shape) - 2) for value in options))
    )
    name = f"conv_transpose{len(windows)}d"
    extents = [w.outputs(e) for w, e in zip(windows, x.shape[2:], strict=True)]
    if any(extent < 1 for extent in extents):
        raise LayoutError(f"{name}: an output {extents} of {x} would be empty; use less padding")
    x, cuts = placement(x, grid, windows, extents, name)
    output = output_partition(x, shape[1] * groups, extents, cuts)
    out, volume = output.box(grid.coords), Box.whole(x.shape)
    crops = [
        window.crop(out.interval(dim), x.shape[dim]) for dim, window in enumerate(windows, start=2)
    ]
    cover = read_cover(x, windows, cuts, extents, [True] * len(windows))
    plan = plan_exchange(x, cover, grid)
    return Layout(x, output, _spec(name, plan, volume, windows, crops, groups))


def _spec(
    name: str,
    plan: ExchangePlan,
    volume: Box,
    windows: Sequence[TransposedWindow],
    crops: Sequence[Crop],
    groups: int,
) -> TransposedSpec:
    own = plan.own
    return TransposedSpec(
        name=f"the halo exchange of {name}",
        plan=ExchangePlan(own, plan.wanted.intersect(volume), plan.sends, plan.receives),
        box=Box.of([own.interval(0), own.interval(1), *(crop.inputs for crop in crops)]),
        stride=tuple(w.stride for w in windows),
        padding=tuple(crop.padding for crop in crops),
        dilation=tuple(w.dilation for w in windows),
        extra=tuple(crop.extra for crop in crops),
        groups=groups,
    )


def convolve_transposed(
    n: int,
    x: Sharded,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: int,
    dilation: Any,
) -> Sharded:
    """An ``n``-dim transposed convolution of a cut tensor (batch, channel, *spatial).

    Distribution scheme:
    1. Place the outputs: to every input belong the ``stride`` outputs in its middle.
    2. Where they need the rank's own block and no more (a kernel as wide as the stride): the plain
       local op, no message.
    3. Otherwise halo buffer and one op on it, whose cropping yields just the rank's outputs
       (`BufferConv`): no partial sums travel.
    """
    check_input(x, n, f"conv_transpose{n}d")
    options = tuple(map(hashable, (stride, padding, output_padding, dilation)))
    layout = lay_out(x.grid, x.partition, weight.shape, options, groups)
    x = x.redistribute(layout.input, f"the gather before conv_transpose{n}d")
    local, weight = cast_for_autocast(x.local), cast_for_autocast(weight)
    bias = bias if bias is None else cast_for_autocast(bias)
    spec = layout.spec
    if spec.local:
        return x.like(spec.forward(local, weight, bias), layout.output)
    return x.like(BufferConv.apply(local, weight, bias, spec), layout.output)


def _register(n: int) -> None:
    def rule(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Sharded:
        """Any kernel, stride, padding, output_padding, dilation, groups."""
        return convolve_transposed(
            n, input, weight, bias, stride, padding, output_padding, groups, dilation
        )

    register(LOCAL[n], family="convolution")(rule)


for _n in LOCAL:
    _register(_n)
