"""Transposed convolution: the rule of ``conv_transpose1d``, ``2d`` and ``3d``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from hyperslab.comm import ExchangePlan, Grid, per_grid, plan_exchange
from hyperslab.errors import LayoutError
from hyperslab.geometry import Box, Crop, Partition, TransposedWindow
from hyperslab.ops.common.arguments import PerDim, hashable, per_dim
from hyperslab.ops.common.forms import Operator, register_each, spatial_dims
from hyperslab.ops.common.operands import whole_of
from hyperslab.ops.common.placement import (
    check_input,
    output_partition,
    placement,
    read_cover,
)
from hyperslab.ops.common.unbatched import with_batch
from hyperslab.ops.convolution.buffered import BufferConv
from hyperslab.ops.convolution.conv import cast_for_autocast, serial_is_last
from hyperslab.ops.kernels.convolution import (
    ConvOptions,
    Gradients,
    Kernels,
    LocalConv,
    converted,
    transposed_backward,
    transposed_forward,
)
from hyperslab.tensor import Sharded


@dataclass(frozen=True, slots=True)
class TransposedSpec:
    """One rank's share of a transposed convolution: what it fetches, and the op on the buffer.

    ``box``: what the buffer spans: the inputs that the rank's outputs read, and a few planes of
    zeros where the op could not crop its result otherwise.
    """

    name: str
    plan: ExchangePlan
    box: Box
    options: ConvOptions
    padding: tuple[int, ...]
    extra: tuple[int, ...]

    @property
    def local(self) -> bool:
        """Whether the rank's outputs are the op on its own block: no message and no buffer."""
        return not self.plan.sends and not self.plan.receives and self.box == self.plan.own

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kernels: Kernels,
    ) -> torch.Tensor:
        """The rank's outputs from the buffer."""
        return transposed_forward(x, weight, bias, self.options, self.padding, self.extra, kernels)

    def backward(
        self,
        gradient: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        needs: Sequence[bool],
        kernels: Kernels,
    ) -> Gradients:
        """Gradients of buffer, weight and bias; None where ``needs`` is false."""
        return transposed_backward(
            gradient, x, weight, self.options, self.padding, self.extra, needs, kernels
        )


@dataclass(frozen=True, slots=True)
class ConvTransposeLayout:
    """One rank's geometry of a transposed convolution."""

    input: Partition  # the input's, after gathering axes for which the output is too thin
    output: Partition
    spec: TransposedSpec


@per_grid
def lay_out_conv_transpose(
    grid: Grid,
    x: Partition,
    shape: torch.Size,
    stride: PerDim,
    padding: PerDim,
    output_padding: PerDim,
    dilation: PerDim,
    groups: int,
) -> ConvTransposeLayout:
    """Where the outputs lie and what they read; ``shape`` is the weight's."""
    options = (per_dim(v, len(shape) - 2) for v in (stride, padding, output_padding, dilation))
    windows = tuple(map(TransposedWindow, shape[2:], *options))
    name = f"conv_transpose{len(windows)}d"
    extents = [w.outputs(e) for w, e in zip(windows, x.shape[2:], strict=True)]
    if any(extent < 1 for extent in extents):
        raise LayoutError(f"{name}: an output {extents} of {x} would be empty; use less padding")
    x, cuts = placement(x, grid, windows, extents, name)
    output = output_partition(x, shape[1] * groups, extents, cuts)
    out = output.box(grid.coords)
    volume = Box.whole(x.shape)
    crops = [
        window.crop(out.interval(dim), x.shape[dim]) for dim, window in enumerate(windows, start=2)
    ]
    cover = read_cover(x, windows, cuts, extents, [True] * len(windows))
    plan = plan_exchange(x, cover, grid)
    return ConvTransposeLayout(x, output, _spec(name, plan, volume, windows, crops, groups))


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
        plan=replace(plan, own=own, wanted=plan.wanted.intersect(volume)),
        box=Box.of([own.interval(0), own.interval(1), *(crop.inputs for crop in crops)]),
        options=ConvOptions(
            stride=tuple(w.stride for w in windows),
            dilation=tuple(w.dilation for w in windows),
            groups=groups,
        ),
        padding=tuple(crop.padding for crop in crops),
        extra=tuple(crop.extra for crop in crops),
    )


@register_each(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, family="convolution")
@with_batch
def convolve_transposed(
    operator: Operator,
    input: Sharded,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: PerDim = 1,
    padding: PerDim = 0,
    output_padding: PerDim = 0,
    groups: int = 1,
    dilation: PerDim = 1,
) -> Sharded:
    """Any kernel, stride, padding, output_padding, dilation, groups.

    Distribution scheme:
    1. Place the outputs: to every input belong the ``stride`` outputs in its middle.
    2. Where they need the rank's own block and no more (a kernel as wide as the stride): the plain
       local op, no message.
    3. Otherwise halo buffer and one op on it, whose cropping yields just the rank's outputs
       (`BufferConv`): no partial sums travel.
    """
    name = operator.__name__
    check_input(input, spatial_dims(operator), name)
    weight = whole_of(weight, f"the filters of {name}")
    bias = whole_of(bias, f"the bias of {name}")
    layout = lay_out_conv_transpose(
        input.grid,
        input.partition,
        weight.shape,
        hashable(stride),
        hashable(padding),
        hashable(output_padding),
        hashable(dilation),
        groups,
    )
    x = input.redistribute(layout.input, f"the gather before {name}")
    kernels = x.policy.kernels
    weight = cast_for_autocast(weight)
    bias = bias if bias is None else cast_for_autocast(bias)
    spec = layout.spec
    last = serial_is_last(x, x.block, weight, spec.options)
    block = converted(cast_for_autocast(x.block), weight, kernels)
    apply = LocalConv.apply if spec.local else BufferConv.apply
    y = apply(block, weight, bias, spec, kernels, None)
    return x.like(y, layout.output, fresh=True, reordered=not last)
