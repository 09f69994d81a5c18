"""Distributes ``conv1d``, ``conv2d``, ``conv3d`` and their transposed forms: layouts and rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from hyperslab.comm import ExchangePlan, Grid, per_grid, plan_exchange
from hyperslab.comm.exchange import fetch
from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.geometry import Box, Crop, Partition, TransposedWindow, Window
from hyperslab.kernels import registry
from hyperslab.kernels.conv import (
    Gradients,
    LocalConv,
    conv_backward,
    conv_forward,
    conv_input,
    differentiable_conv,
)
from hyperslab.kernels.conv_problem import ConvOptions, Kernels, torch_uses_im2col
from hyperslab.kernels.memory_format import HaloPaddedBuffer, memory_format_of
from hyperslab.ops.convolution.buffered import BufferConv, ConvSpec
from hyperslab.ops.convolution.overlapped import Slab, SlabConv, aligned, slabs_of, thin
from hyperslab.ops.filter_parallel import filter_share, operand_type, shard_parameter
from hyperslab.ops.fusion import conv_operand
from hyperslab.ops.operands import whole_of
from hyperslab.ops.overloads import Operator, PerDim, hashable, per_dim, register_each, spatial_dims
from hyperslab.ops.placement import check_input, output_partition, placement, read_cover, with_batch
from hyperslab.tensor import Sharded


def windows_of(
    shape: Sequence[int], stride: PerDim, padding: PerDim | str, dilation: PerDim
) -> tuple[Window, ...]:
    """Return one window per spatial dim of a weight of ``shape`` (out, in / groups, *kernel)."""
    kernel = tuple(shape[2:])
    n = len(kernel)
    strides = per_dim(stride, n)
    dilations = per_dim(dilation, n)
    if isinstance(padding, str) and padding not in ("same", "valid"):
        raise ValueError(f"padding={padding!r}; use numbers, 'same' or 'valid'")
    if padding == "same":
        if any(s != 1 for s in strides):
            raise ValueError("padding='same' is not supported for strided convolutions")
        totals = [d * (k - 1) for k, d in zip(kernel, dilations, strict=True)]
        pads = [(total // 2, total - total // 2) for total in totals]
    else:
        pads = [(p, p) for p in per_dim(0 if isinstance(padding, str) else padding, n)]
    return tuple(
        Window(k, s, before, after, d)
        for k, s, (before, after), d in zip(kernel, strides, pads, dilations, strict=True)
    )


@dataclass(frozen=True, slots=True)
class ConvLayout:
    """One rank's geometry of a convolution; made once per (partition, weight shape, options).

    ``padding`` and ``margins`` are for torch's own convolution of the block, where nothing is cut
    in space: what both ends of a dim share, and what one end has more, as ``F.pad`` takes it.
    """

    input: Partition  # the input's, after gathering axes for which the output is too thin
    output: Partition
    options: ConvOptions
    padding: tuple[int, ...]
    margins: tuple[int, ...]
    spec: ConvSpec | None  # None: nothing is cut in space
    slabs: tuple[Slab, ...] | None  # None: through a halo buffer
    room: tuple[int, int] | None = None  # planes of a halo before and after the block


@per_grid
def lay_out_conv(
    grid: Grid,
    x: Partition,
    shape: torch.Size,
    stride: PerDim,
    padding: PerDim | str,
    dilation: PerDim,
    groups: int,
) -> ConvLayout:
    """Return where the outputs of a convolution lie and what they read."""
    windows = windows_of(shape, stride, padding, dilation)
    options = ConvOptions(
        stride=tuple(w.stride for w in windows),
        dilation=tuple(w.dilation for w in windows),
        groups=groups,
    )
    name = f"conv{len(windows)}d"
    extents = [w.outputs(e) for w, e in zip(windows, x.shape[2:], strict=True)]
    x, cuts = placement(x, grid, windows, extents, name)
    output = output_partition(x, shape[0], extents, cuts)
    shared = tuple(min(w.before, w.after) for w in windows)
    margins = _margins(windows)
    if not any(cuts):
        return ConvLayout(x, output, options, shared, margins, None, None)
    covered = [c is not None or w.before != w.after for c, w in zip(cuts, windows, strict=True)]
    spec = ConvSpec(
        name=f"the halo exchange of {name} {tuple(shape)}",
        windows=windows,
        covered=tuple(covered),
        options=options,
        plan=plan_exchange(x, read_cover(x, windows, cuts, extents, covered), grid),
        out=output.box(grid.coords),
    )
    slabs = slabs_of(spec) if aligned(spec) and not thin(spec) else None
    room = _planes_beside(spec.plan.own, spec.box)
    return ConvLayout(x, output, options, shared, margins, spec, slabs, room)


def _planes_beside(own: Box, box: Box) -> tuple[int, int] | None:
    """Planes that a buffer for ``box`` has before and after the block.

    None where it has other extents as well.
    """
    before = own.lo[2] - box.lo[2]
    after = box.hi[2] - own.hi[2]
    fits = min(before, after) >= 0 < max(before, after)
    others = (dim for dim in range(own.ndim) if dim != 2)
    same = all(own.interval(dim) == box.interval(dim) for dim in others)
    return (before, after) if fits and same else None


def _margins(windows: Sequence[Window]) -> tuple[int, ...]:
    """The padding that one end of a dim has more than the other, from the last dim on."""
    if all(w.before == w.after for w in windows):
        return ()
    ends = [(w.before - min(w.before, w.after), w.after - min(w.before, w.after)) for w in windows]
    return tuple(end for pair in reversed(ends) for end in pair)


@register_each(F.conv1d, F.conv2d, F.conv3d, family="convolution", lazy=True, merged=True)
@with_batch
def convolve(
    operator: Operator,
    input: Sharded,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: PerDim = 1,
    padding: PerDim | str = 0,
    dilation: PerDim = 1,
    groups: int = 1,
) -> Sharded:
    """Any kernel, stride, padding, dilation, groups.

    Distribution scheme:
    1. Place every output on the rank that owns the centre of its window.
    2. Nothing cut in space: the plain local convolution, of this rank's share of the filters
       where they are many (`filter_share`).
    3. A block that was computed for this convolution, or a network's input that is converted for
       it: made with room for its halo, and one convolution of both (`BufferConv`).
    4. Windows aligned with the cut: local convolution plus slabs (`SlabConv`), the halo travels
       meanwhile. Otherwise, or if the block is thin: halo buffer and one convolution of it
       (`BufferConv`).
    """
    name = operator.__name__
    check_input(input, spatial_dims(operator), name)
    weight = whole_of(weight, f"the filters of {name}")
    bias = whole_of(bias, f"the bias of {name}")
    layout = lay_out_conv(
        input.grid,
        input.partition,
        weight.shape,
        hashable(stride),
        hashable(padding),
        hashable(dilation),
        groups,
    )
    if layout.spec is not None and input.is_complex():
        raise UnsupportedOp(
            f"{name} of complex numbers has no rule where space is cut: {input.partition} on "
            f"{input.grid}\n    convolve x.real and x.imag, or use hyperslab.gather(x, axes) before"
        )
    x = input.redistribute(layout.input, f"the gather before {name}")
    kernels = x.policy.kernels
    room = None
    if layout.room is not None and kernels != "torch" and registry.device_kind(x) == "cpu":
        room = HaloPaddedBuffer(*layout.room)
    block, source = conv_operand(x, operand_type(x), room)
    share = None
    if layout.spec is None and groups == 1:
        share = filter_share(x, weight, layout.output, 1)
    homes = x.policy.homes
    if share is None:
        weight = shard_parameter(weight, operand_type(weight), homes)
        bias = bias if bias is None else cast_for_autocast(bias)
    else:
        weight = share.of(weight, operand_type(weight), homes)
        bias = bias if bias is None else share.of(bias, operand_type(bias), homes)
    last = serial_is_last(x, block, weight, layout.options)
    given = block
    block = conv_input(block, weight, kernels, operand_type(x), room)
    if layout.spec is None:
        y = differentiable_conv(
            block, weight, bias, layout.options, layout.padding, layout.margins, kernels, source
        )
        if share is not None:
            y = share.whole(y, f"the gather of the filters of {name}")
    elif room is not None and room.buffer is not None:
        y = BufferConv.apply(block, weight, bias, layout.spec, kernels, source, room)
    elif block is not given and not block.requires_grad:  # nobody else keeps a copy of it
        block = fetch(block, layout.spec.plan, what=layout.spec.name)  # in its place: it is freed
        y = LocalConv.apply(block, weight, bias, layout.spec, kernels, None)
    elif layout.slabs is None:
        y = BufferConv.apply(block, weight, bias, layout.spec, kernels, source)
    else:
        y = SlabConv.apply(block, weight, bias, layout.spec, layout.slabs, kernels, source)
    return x.like(y, layout.output, fresh=True, reordered=not last)


def serial_is_last(
    x: Sharded, block: torch.Tensor, weight: torch.Tensor, options: ConvOptions
) -> bool:
    """Tell if serial torch's convolution returns channels last.

    It does where an operand is that, but for small volumes, of which it makes columns.
    """
    formats = {memory_format_of(weight)}
    if not x.reordered:
        formats.add(memory_format_of(block))
    if formats == {torch.contiguous_format}:
        return False
    on_cpu = block.device.type == "cpu" and operand_type(x) == torch.float32
    return not (on_cpu and torch_uses_im2col(x.shape, weight.shape, options))


def cast_for_autocast(value: torch.Tensor) -> torch.Tensor:
    """Cast a convolution's argument as autocast would if it knew our autograd functions."""
    return value.to(operand_type(value))


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

    @property
    def local(self) -> bool:
        """Tell if the rank's outputs are the op on its own block: no message and no buffer."""
        return not self.plan.sends and not self.plan.receives and self.box == self.plan.own

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kernels: Kernels,
    ) -> torch.Tensor:
        """Compute the rank's outputs from the buffer."""
        return conv_forward(x, weight, bias, self.options, self.padding, kernels)

    def backward(
        self,
        gradient: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        needs: Sequence[bool],
        kernels: Kernels,
    ) -> Gradients:
        """Gradients of buffer, weight and bias; None where ``needs`` is false."""
        return conv_backward(gradient, x, weight, self.options, self.padding, needs, kernels)


@dataclass(frozen=True, slots=True)
class ConvTransposeLayout:
    """Holds one rank's geometry of a transposed convolution."""

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
    """Return where the outputs lie and what they read; ``shape`` is the weight's."""
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
    return ConvTransposeLayout(
        x, output, _transposed_spec(name, plan, volume, windows, crops, groups)
    )


def _transposed_spec(
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
            output_padding=tuple(crop.extra for crop in crops),
        ),
        padding=tuple(crop.padding for crop in crops),
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
    block = conv_input(cast_for_autocast(x.block), weight, kernels)
    apply = LocalConv.apply if spec.local else BufferConv.apply
    y = apply(block, weight, bias, spec, kernels, None)
    return x.like(y, layout.output, fresh=True, reordered=not last)
