"""Distributes ``conv1d``, ``conv2d``, ``conv3d`` and their transposed forms.

In reading order: the general way, which fills a halo buffer and convolves it without padding
(`BufferConv`), for windows that do not line up with the cut and for transposed convolutions; the
way that costs nothing extra, local convolution plus halo slabs (`SlabConv`); layouts and rules.

A convolution is linear, so its result is the local convolution with zeros at the cut plus the
contribution of the halo alone. The halo of a block is tiled by *slabs*, two per cut dim: a slab
of the first cut dim spans the halos of the later ones, a slab of the last cut dim spans none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.nn.functional as F

from hyperslab.comm import ExchangePlan, Grid, exchange, per_grid, plan_exchange
from hyperslab.comm.communicator import completing
from hyperslab.errors import LayoutError
from hyperslab.geometry import Box, Cover, Interval, Partition, TransposedWindow, Window
from hyperslab.kernels import registry
from hyperslab.kernels.conv import (
    Gradients,
    LocalConv,
    RecomputedInput,
    TakenWeight,
    conv_backward,
    conv_forward,
    conv_input,
    convolve_by_torch,
    differentiable_conv,
    gradient_of_taken,
    input_in_channels_last,
    saved_input,
    take_weight,
    weight_with_graph,
)
from hyperslab.kernels.conv_problem import ConvOptions, Kernels, torch_uses_im2col
from hyperslab.kernels.memory_format import HaloPaddedBuffer, memory_format_of
from hyperslab.ops.filter_parallel import (
    autocast_type,
    filter_share,
    lowered,
    operand_type,
    shard_parameter,
    take_parameter,
)
from hyperslab.ops.fusion import EpilogueOps, conv_operand
from hyperslab.ops.operands import whole_of
from hyperslab.ops.overloads import Operator, PerDim, hashable, per_dim, register_each, spatial_dims
from hyperslab.ops.placement import (
    batched_input,
    output_partition,
    placement,
    read_cover,
    with_batch,
)
from hyperslab.ops.slabs import (
    FEWEST_SLABS,
    MOST_AT_ONCE,
    PARTS_AT_ONCE,
    BlockInput,
    DeferredConv,
    DeferredJoin,
    DeferredUpsampling,
    JoinedInput,
    SlabEpilogue,
    SlabGeometry,
    SlabInput,
    is_wide,
    largest_block,
    planes_of_slab,
)
from hyperslab.tensor import Sharded
from hyperslab.util.torch_internals import BlockFunction, EnableTorchFunction


@dataclass(frozen=True, kw_only=True)
class ConvSpec:
    """One rank's share of a convolution or a transposed one: the exchange, the buffer, the op.

    ``box``: what the buffer spans: what the plan brings, and zeros beside it, where the op could
    not pad or crop its result otherwise. ``options``: of the op that runs on the buffer, with the
    padding that is left to it; of a transposed convolution with its output padding there, too.
    """

    options: ConvOptions
    name: str
    plan: ExchangePlan
    box: Box

    @cached_property
    def local(self) -> bool:
        """Tell if the rank's outputs are the op on its own block: no message and no buffer."""
        return not self.plan.sends and not self.plan.receives and self.box == self.plan.own

    @cached_property
    def part_of_block(self) -> tuple[slice, ...] | None:
        """Return what the outputs read, where it is a part of the block and nothing travels."""
        own = self.plan.own
        return self.box.slices(own) if self.plan.local and own.contains(self.box) else None

    @cached_property
    def margins(self) -> tuple[tuple[slice, ...], ...]:
        """Return the parts of the buffer that nobody fills: padding."""
        return exchange.gaps_in(self.box, self.plan.brought)

    @cached_property
    def halo_places(self) -> list[tuple[tuple[slice, ...], tuple[slice, ...] | None] | None]:
        """Return where each received piece goes in the buffer, and what part of it, if not all."""
        boxes = [t.box for t in self.plan.receives]
        found = [(box, exchange.overlap(self.box, box)) for box in boxes]
        return [at and (at[0], None if self.box.contains(box) else at[1]) for box, at in found]


class BufferConv(BlockFunction):
    """Convolution whose windows do not line up with the cut, or whose input has `HaloPaddedBuffer`.

    Distribution scheme, forward: 1. exchange halos, 2. put block and halos into one buffer that
    spans everything the outputs read, with zeros for padding, 3. convolve the buffer. A block that
    was made with ``padded`` for its halo already lies in that buffer, which is then kept. Otherwise
    only the block (the producer's own tensor, or what ``source`` makes of it) and the thin halos
    are saved, and the backward pass fills the buffer again. Backward: 1. compute the gradients of
    buffer, weight and bias, 2. send the gradients of halos to their owners, which add them; or run
    `backward_with_graph`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        spec: ConvSpec,
        kernels: Kernels,
        source: RecomputedInput | None,
        padded: HaloPaddedBuffer | None = None,
        taken: TakenWeight | None = None,
    ) -> torch.Tensor:
        weight = take_weight(ctx, weight, taken)
        plan = spec.plan
        if padded is None:
            halos = exchange.receive_halo(x, plan, spec.box, spec.name)
        else:
            halos = exchange.start(x, plan, spec.name).wait()
        buffer = _fill_buffer(x, halos, spec, padded)
        kept, ctx.value = saved_input(x, source)
        ctx.spec = spec
        ctx.kernels = kernels
        in_padded = padded is not None and padded.buffer is not None
        ctx.has_buffer = source is None and in_padded
        halos = [buffer] if ctx.has_buffer else halos
        ctx.save_for_backward(weight, *kept, *halos)
        ctx.kept = len(kept)
        ctx.padded = padded and padded.empty()
        return conv_forward(buffer, weight, bias, spec.options, kernels)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        spec = ctx.spec
        weight, *saved = ctx.saved_tensors
        kept = tuple(saved[: ctx.kept])
        halos = saved[ctx.kept :]
        if torch.is_grad_enabled():
            return *backward_with_graph(ctx, gradient, ctx.value(kept), weight), *[None] * 5
        needs = list(ctx.needs_input_grad[:3])
        if ctx.has_buffer:
            (buffer,) = halos
        else:
            buffer = _fill_buffer(ctx.value(kept, ctx.padded), halos, spec, ctx.padded)
        how = (spec.options, needs, ctx.kernels, ctx.taken is not None)
        whole, dw, db = conv_backward(gradient, buffer, weight, *how)
        del buffer
        dw = gradient_of_taken(ctx, dw)
        if whole is None:
            return None, dw, db, *[None] * 5
        dx = exchange.send_home(whole, spec.plan, spec.box, spec.name, private=True)
        return dx, dw, db, *[None] * 5


def backward_with_graph(
    ctx: Any, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> Gradients:
    """Gradients of block, weight and bias out of operators that can be differentiated again.

    For ``create_graph=True``. The halo is fetched once more: the saved one has no history.
    """
    spec: ConvSpec = ctx.spec
    weight = weight_with_graph(ctx, weight)
    buffer = exchange.fetch(x, spec.plan, what=spec.name)
    wanted = spec.plan.wanted
    box = spec.box
    before = [a - b for a, b in zip(wanted.lo, box.lo, strict=True)]
    after = [b - a for a, b in zip(wanted.hi, box.hi, strict=True)]
    margins = [m for ends in zip(reversed(before), reversed(after), strict=True) for m in ends]
    buffer = F.pad(buffer, margins) if any(margins) else buffer
    needs = ctx.needs_input_grad[:3]
    dx, dw, db = conv_backward(gradient, buffer, weight, spec.options, needs, "torch")
    if dx is not None:
        dx = exchange.give_back(dx[wanted.slices(box)], spec.plan, what=spec.name)
    return dx, gradient_of_taken(ctx, dw), db


def _fill_buffer(
    x: torch.Tensor,
    halo: Sequence[torch.Tensor],
    spec: ConvSpec,
    padded: HaloPaddedBuffer | None,
) -> torch.Tensor:
    """Return what the outputs read; ``x`` itself, or a part of it, where that is all."""
    if spec.part_of_block is not None:
        return x[spec.part_of_block]
    if padded is None or padded.buffer is None:
        return exchange.join_halo(x, halo, spec.plan, spec.box)
    buffer = padded.buffer
    for margin in spec.margins:
        buffer[margin].zero_()
    for places, piece in zip(spec.halo_places, halo, strict=True):
        if places is not None:
            into, part = places
            buffer[into] = piece if part is None else piece[part]
    return buffer


def waits_for_host(x: torch.Tensor, largest: int) -> bool:
    """Tell if a GPU convolves the ``largest`` block in less time than the host prepares; for all.

    All ranks decide alike: another graph would let them send in another order.
    """
    return largest <= exchange.FEW_ELEMENTS and registry.device_kind(x) == "cuda"


@dataclass(frozen=True, slots=True)
class Plane:
    """One plane of outputs and the planes of a slab that it reads.

    ``output``: index in the local output; ``first``, ``planes``: which planes of the slab, with
    the dilation between them, meet the taps ``tap .. tap + planes`` of the kernel.
    """

    output: int
    first: int
    planes: int
    tap: int


@dataclass(frozen=True, slots=True)
class Slab:
    """A part of the halo: where it lies, how it is convolved, which outputs it touches."""

    dim: int  # tensor dim across which it lies
    box: Box
    options: ConvOptions
    outputs: tuple[Plane, ...]


def aligned(windows: Sequence[Window], own: Box, out: Box) -> bool:
    """Tell if the plain convolution of the own block yields exactly this rank's outputs."""
    for dim, window in enumerate(windows, start=2):
        lo, hi = own.interval(dim)
        first = out.lo[dim] * window.stride
        count = window.outputs(hi - lo)
        if window.before != window.after or lo != first or count != out.shape[dim]:
            return False
    return True


SMALL_BLOCK = 1 << 20
"""Elements of a block that is copied in less time than the slabs' own kernels are called."""


def thin(plan: ExchangePlan) -> bool:
    """Tell if one convolution of block and halo together costs less than one of each."""
    own = plan.own.size
    return 2 * plan.wanted.size > 3 * own or own <= SMALL_BLOCK


def slabs_of(
    plan: ExchangePlan,
    windows: Sequence[Window],
    options: ConvOptions,
    covered: Sequence[bool],
    out: Box,
) -> tuple[Slab, ...]:
    """Return the slabs that tile this rank's halo inside the volume.

    ``options``: of the convolution of the block. ``covered``: whether the plan's wanted box spans a
    spatial dim with its halo and its padding.
    """
    own = plan.own
    held = [own, *(t.box for t in plan.receives)]  # the wanted box without the padding
    slabs = []
    for dim in range(2, own.ndim):
        first = min(box.lo[dim] for box in held)
        last = max(box.hi[dim] for box in held)
        for lo, hi in ((first, own.lo[dim]), (own.hi[dim], last)):
            if lo < hi and covered[dim - 2]:
                # Earlier dims as the block, later ones with their halo and padding.
                intervals = [own.interval(d) for d in range(dim)] + [(lo, hi)]
                intervals += [plan.wanted.interval(d) for d in range(dim + 1, own.ndim)]
                padding = [
                    0 if d == dim or (d > dim and covered[d - 2]) else window.before
                    for d, window in enumerate(windows, start=2)
                ]
                own_options = options._replace(padding=tuple(padding))
                planes = _touched(windows[dim - 2], (lo, hi), out.interval(dim))
                slabs.append(Slab(dim, Box.of(intervals), own_options, planes))
    return tuple(slabs)


def _touched(window: Window, slab: Interval, out: Interval) -> tuple[Plane, ...]:
    """Lists the planes of outputs ``out`` that read from a slab, across which ``window`` lies."""
    planes = []
    for output in range(*out):
        tap, end = window.taps(output, slab)
        if tap < end:
            first = output * window.stride - window.before + tap * window.dilation - slab[0]
            planes.append(Plane(output - out[0], first, end - tap, tap))
    return tuple(planes)


class SlabConv(BlockFunction):
    """Convolves where the windows line up with the cut.

    Distribution scheme, forward: 1. send boundary planes, 2. convolve the block with the layer's
    own padding while they travel, 3. add each slab's convolution to the few output planes that it
    touches. Backward: 1. compute the gradients of the slabs and send them to their owners, 2.
    compute the gradients of block, weight and bias while they travel, 3. add the gradients that
    arrive; or run `backward_with_graph`. Only the block (the producer's own tensor, or what
    ``source`` makes of it) and the thin slabs are saved.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        spec: ConvSpec,
        options: ConvOptions,
        slabs: tuple[Slab, ...],
        kernels: Kernels,
        source: RecomputedInput | None,
        taken: TakenWeight | None = None,
    ) -> torch.Tensor:
        weight = take_weight(ctx, weight, taken)
        with completing(exchange.start(x, spec.plan, spec.name)) as pending:
            y = conv_forward(x, weight, bias, options, kernels)
        halos = _fill_slabs(x, pending.wait(), spec, slabs)
        for slab, halo in zip(slabs, halos, strict=True):
            for plane in slab.outputs:
                operands = _planes(halo, slab, plane), _taps(weight, slab, plane)
                part = conv_forward(*operands, None, slab.options, kernels)
                y.narrow(slab.dim, plane.output, 1).add_(part)
        kept, ctx.value = saved_input(x, source)
        ctx.spec = spec
        ctx.options = options
        ctx.slabs = slabs
        ctx.kernels = kernels
        ctx.save_for_backward(weight, *halos, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        spec = ctx.spec
        slabs = ctx.slabs
        kernels = ctx.kernels
        weight, *saved = ctx.saved_tensors
        halos = saved[: len(slabs)]
        x = ctx.value(tuple(saved[len(slabs) :]))
        if torch.is_grad_enabled():
            return *backward_with_graph(ctx, gradient, x, weight), *[None] * 6
        needs = list(ctx.needs_input_grad[:3])
        grads = [
            _slab_backward(gradient, halo, weight, slab, needs, kernels)
            for slab, halo in zip(slabs, halos, strict=True)
        ]
        pending = None
        if needs[0]:
            dhalos = [dhalo for dhalo, _ in grads if dhalo is not None]
            pieces = _pieces_of_slabs(dhalos, spec, slabs)
            pending = exchange.start_adjoint(pieces, gradient, spec.plan, spec.name)
        with nullcontext() if pending is None else completing(pending):
            how = (ctx.options, needs, kernels, ctx.taken is not None)
            dx, dw, db = conv_backward(gradient, x, weight, *how)
        if dw is not None:
            for slab, (_, taps) in zip(slabs, grads, strict=True):
                for plane, dtaps in zip(slab.outputs, taps, strict=True):
                    _taps(dw, slab, plane).add_(dtaps)
        if pending is not None and dx is not None:
            exchange.add_returned(dx, pending.wait(), spec.plan)
        return dx, gradient_of_taken(ctx, dw), db, *[None] * 6


def _planes(halo: torch.Tensor, slab: Slab, plane: Plane) -> torch.Tensor:
    step = slab.options.dilation[slab.dim - 2]
    return halo.narrow(slab.dim, plane.first, (plane.planes - 1) * step + 1)


def _taps(weight: torch.Tensor, slab: Slab, plane: Plane) -> torch.Tensor:
    return weight.narrow(slab.dim, plane.tap, plane.planes)


def _fill_slabs(
    x: torch.Tensor, pieces: list[torch.Tensor], spec: ConvSpec, slabs: tuple[Slab, ...]
) -> list[torch.Tensor]:
    halos = []
    parts = [(t.box, piece) for t, piece in zip(spec.plan.receives, pieces, strict=True)]
    for slab in slabs:
        whole = [piece for box, piece in parts if box == slab.box]
        if whole:
            halos.append(whole[0])
            continue
        halo = exchange.new_box(slab.box, [box for box, _ in parts], x)
        for box, piece in parts:
            exchange.copy_overlap(halo, slab.box, piece, box)
        halos.append(halo)
    return halos


def _slab_backward(
    gradient: torch.Tensor,
    halo: torch.Tensor,
    weight: torch.Tensor,
    slab: Slab,
    needs: Sequence[bool],
    kernels: Kernels,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Return the gradient of one slab and of the kernel taps of each of its planes."""
    whole = len(slab.outputs) == 1 and slab.outputs[0].planes == halo.shape[slab.dim]
    dhalo = torch.zeros_like(halo) if needs[0] and not whole else None
    taps = []
    for plane in slab.outputs:
        out = gradient.narrow(slab.dim, plane.output, 1)
        x, weights = _planes(halo, slab, plane), _taps(weight, slab, plane)
        wanted = [needs[0], needs[1], False]
        dx, dw, _ = conv_backward(out, x, weights, slab.options, wanted, kernels)
        if dhalo is None:
            dhalo = dx
        elif dx is not None:
            _planes(dhalo, slab, plane).add_(dx)
        if dw is not None:
            taps.append(dw)
    return dhalo, taps


def _pieces_of_slabs(
    dhalos: Sequence[torch.Tensor], spec: ConvSpec, slabs: tuple[Slab, ...]
) -> list[torch.Tensor]:
    """The gradient of each received piece; every piece lies in exactly one slab."""
    pieces = []
    for t in spec.plan.receives:
        slab, dhalo = next(
            (s, d) for s, d in zip(slabs, dhalos, strict=True) if s.box.contains(t.box)
        )
        pieces.append(dhalo[t.box.slices(slab.box)])
    return pieces


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


def _check_numbers(*options: PerDim | str) -> None:
    """Refuse tensors among options, which torch takes for numbers.

    One may be another number at the next call, which would find the layout of the first.
    """
    numbers = itertools.chain.from_iterable(o if isinstance(o, tuple) else (o,) for o in options)
    if any(isinstance(number, torch.Tensor) for number in numbers):
        raise LayoutError(
            f"a convolution of a cut tensor with a tensor among its options {options}\n"
            "    use numbers: int(stride)"
        )


@dataclass(frozen=True, slots=True)
class ConvLayout:
    """One rank's geometry of a convolution; made once per (partition, weight shape, options).

    ``options`` and ``margins`` are for the convolution of the block, where nothing is cut in space:
    their padding is what both ends of a dim share, and ``margins`` what one end has more, as
    ``F.pad`` takes it. ``largest`` counts the elements of a rank's largest block, input or output.
    """

    input: Partition  # the input's, after gathering axes for which the output is too thin
    output: Partition
    windows: tuple[Window, ...]
    options: ConvOptions
    margins: tuple[int, ...]
    largest: int
    spec: ConvSpec | None  # None: nothing is cut in space
    slabs: tuple[Slab, ...] | None  # None: through a halo buffer
    halo_planes: tuple[int, int] | None = None  # before and after the block
    plans: dict[object, ConvPlan] = field(default_factory=dict, compare=False, repr=False)


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
    _check_numbers(stride, padding, dilation, groups)
    windows = windows_of(shape, stride, padding, dilation)
    shared = tuple(min(w.before, w.after) for w in windows)
    steps, gaps = tuple(w.stride for w in windows), tuple(w.dilation for w in windows)
    options = ConvOptions(steps, shared, gaps, groups)
    name = f"conv{len(windows)}d"
    extents = [w.outputs(e) for w, e in zip(windows, x.shape[2:], strict=True)]
    x, cuts = placement(x, grid, windows, extents, name)
    output = output_partition(x, shape[0], extents, cuts)
    margins: tuple[int, ...] = ()
    if any(w.before != w.after for w in windows):
        ends = [(w.before - s, w.after - s) for w, s in zip(windows, shared, strict=True)]
        margins = tuple(end for pair in reversed(ends) for end in pair)
    largest = _largest(x, output)
    if not any(cuts):
        return ConvLayout(x, output, windows, options, margins, largest, None, None)
    covered = [c is not None or w.before != w.after for c, w in zip(cuts, windows, strict=True)]
    plan = plan_exchange(x, read_cover(x, windows, cuts, extents, covered), grid)
    left = tuple(0 if c else w.before for c, w in zip(covered, windows, strict=True))
    spec = ConvSpec(
        name=f"the halo exchange of {name} {tuple(shape)}",
        plan=plan,
        box=plan.wanted,
        options=options._replace(padding=left),
    )
    out = output.box(grid.coords)
    slabs = None
    if aligned(windows, plan.own, out) and not thin(plan):
        slabs = slabs_of(plan, windows, options, covered, out)
    halo_planes = _planes_beside(plan.own, plan.wanted)
    return ConvLayout(x, output, windows, options, margins, largest, spec, slabs, halo_planes)


@dataclass(frozen=True, slots=True)
class ConvPlan:
    """Holds what is decided about a kind of call of `convolve`, beside its geometry.

    ``dtype``, ``filters``, ``added``: the types in which input, weight and bias are taken.
    """

    dtype: torch.dtype
    filters: torch.dtype
    added: torch.dtype
    filters_last: bool  # cast to channels last
    at_once: bool  # by `_convolve_at_once`
    may_share: bool  # the filters among ranks, if there are many
    may_slab: bool  # run over slabs, if the block has several
    takes_filters: bool  # in the convolution's own node of the graph
    beside: tuple[int, int] | None  # planes of a buffer before and after the block


def plan_conv(
    x: Sharded, weight: torch.Tensor, bias: torch.Tensor | None, layout: ConvLayout
) -> ConvPlan:
    """Return the plan of a call, which is made once for all that it depends on."""
    policy = x.policy
    autocast = autocast_type(x.device.type)
    circumstances = registry.circumstances(x)
    key = (
        x.dtype,
        weight.dtype,
        weight.device.type,
        None if bias is None else bias.dtype,
        autocast,
        policy.kernels,
        policy.slab is None,
        circumstances,
    )
    found = layout.plans.get(key)
    if found is None:
        found = layout.plans[key] = _new_plan(x, weight, bias, autocast, layout)
    return found


def _new_plan(
    x: Sharded,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    autocast: torch.dtype | None,
    layout: ConvLayout,
) -> ConvPlan:
    policy = x.policy
    filters = lowered(weight.dtype, autocast)
    dtype = lowered(x.dtype, autocast)
    kind = registry.device_kind(x)
    in_c = kind == "cpu" and policy.kernels != "torch"
    alike = dtype == filters and weight.device.type == x.device.type
    given = registry.format_for(policy.kernels, kind, dtype, weight.dim(), alike)
    return ConvPlan(
        dtype=dtype,
        filters=filters,
        added=filters if bias is None else lowered(bias.dtype, autocast),
        filters_last=registry.casts_filters_last(weight, filters, policy.kernels),
        at_once=policy.slab is None and waits_for_host(x, layout.largest),
        may_share=layout.spec is None and layout.options.groups == 1,
        may_slab=policy.slab is not None or _parts_for_cudnn(x, layout) > 0,
        takes_filters=given == "channels last" and not layout.margins,
        beside=layout.halo_planes if in_c else None,
    )


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


@register_each(F.conv1d, F.conv2d, F.conv3d, lazy=True, merged=True)
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
    """Takes any kernel, stride, padding, dilation and groups.

    Distribution scheme:
    1. Place every output on the rank that owns the centre of its window.
    2. If nothing is cut in space, run the plain local convolution, with this rank's share of the
       filters if there are many (`filter_share`).
    3. If the block was computed for this convolution, or is a network's input that is converted for
       it, it has room for its halo: run one convolution of both (`BufferConv`).
    4. If the windows are aligned with the cut, run the local convolution and the slabs' ones, while
       the halo travels (`SlabConv`). Otherwise, or if the block is thin, fill a halo buffer and run
       one convolution of it (`BufferConv`).
    """
    if input.is_complex():
        return _convolve_parts(operator, input, weight, bias, stride, padding, dilation, groups)
    name = operator.__name__
    input = batched_input(input, spatial_dims(operator), name)
    if Sharded in (type(weight), type(bias)):
        weight = whole_of(weight, f"the filters of {name}")
        bias = whole_of(bias, f"the bias of {name}")
    if bias is not None and bias.dtype != weight.dtype:
        _check_type_of_bias(bias, weight)
    if list in (type(stride), type(padding), type(dilation)):
        stride, padding, dilation = hashable(stride), hashable(padding), hashable(dilation)
    grid = input.grid
    partition = input.partition
    layout = lay_out_conv(grid, partition, weight.shape, stride, padding, dilation, groups)
    x = input
    if layout.input is not partition:
        x = input.redistribute(layout.input, f"the gather before {name}")
    plan = plan_conv(x, weight, bias, layout)
    if plan.at_once:
        return _convolve_at_once(x, weight, bias, layout)
    share = None
    if plan.may_share:
        share = filter_share(x, weight, layout.output, 1)
    geometry = None
    if plan.may_slab and share is None:
        geometry = _slab_geometry(x, weight, layout)
    if geometry is not None and isinstance(geometry.input, JoinedInput):
        return _convolve_joined(x, weight, bias, layout, geometry)
    beside = plan.beside
    padded = HaloPaddedBuffer(*beside) if beside is not None and geometry is None else None
    policy = x.policy
    homes = policy.homes
    dtype = plan.dtype
    block, source = conv_operand(x, dtype, padded)
    rows = () if share is None else (share.rows, share.index)
    last = serial_is_last(x, block, weight, layout.options, dtype)
    taken = None
    if plan.takes_filters and not rows and geometry is None:
        weight, taken = take_parameter(weight, plan.filters, homes, last=plan.filters_last)
    else:
        weight = shard_parameter(weight, plan.filters, homes, *rows, last=plan.filters_last)
    if bias is not None:
        kind = plan.added
        if rows:
            bias = shard_parameter(bias, kind, homes, *rows)
        elif bias.dtype != kind:
            bias = bias.to(kind)
    if geometry is not None:
        conv = DeferredConv(geometry, (block,), weight, bias, source)
        pending = SlabEpilogue(x, conv, 0, EpilogueOps(conv.dtype), torch.is_grad_enabled())
        if pending.can_wait:
            return x.will_be(pending, layout.output, reordered=not last)
    how = (layout, dtype, policy.kernels, padded)
    y = _convolve_block(block, weight, bias, *how, source=source, taken=taken)
    if share is not None:
        y = exchange.fetch(y, share.plan, what=f"the gather of the filters of {name}")
    return x.like(y, layout.output, fresh=True, reordered=not last)


def _check_type_of_bias(bias: torch.Tensor, weight: torch.Tensor) -> None:
    """Raises torch's error: what the rule calls would convert the bias, a complex one too."""
    if operand_type(bias) != operand_type(weight):
        raise RuntimeError(
            f"Input type ({weight.dtype}) and bias type ({bias.dtype}) should be the same"
        )


def _convolve_parts(
    operator: Operator,
    input: Sharded,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *options: object,
) -> Sharded:
    """Convolves complex numbers, by four convolutions of their real and imaginary parts."""
    with EnableTorchFunction():  # or torch would ask for no rule inside of one
        first, second = (None, None) if bias is None else (bias.real, bias.imag)

        def convolve(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> Any:
            return operator(x, w, b, *options)

        real = convolve(input.real, weight.real, first) - convolve(input.imag, weight.imag)
        imaginary = convolve(input.real, weight.imag, second) + convolve(input.imag, weight.real)
        return cast(Sharded, torch.complex(real, imaginary))


def _convolve_at_once(
    x: Sharded, weight: torch.Tensor, bias: torch.Tensor | None, layout: ConvLayout
) -> Sharded:
    """Convolves a block that a GPU would wait for, with as little as possible done by the host.

    By torch's own operator, whose gradient is not written in Python. It keeps the block with its
    halo for the backward pass: to join them again takes the host longer.
    """
    given = x.dtype
    dtype = operand_type(x)
    spec = layout.spec
    if x.recipe is not None:
        block = conv_operand(x, dtype)[0]  # too small to be computed twice
    elif spec is None:
        block = x.native_or_block
    else:  # an alias of the block would be one more node of the graph
        block = x.block if spec.plan.in_place else x.native
    policy = x.policy
    kept = dtype if weight.dtype == given else operand_type(weight)
    weight = shard_parameter(weight, kept, policy.homes)
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype if bias.dtype == given else operand_type(bias))
    last = serial_is_last(x, block, weight, layout.options, dtype)
    if block.dtype != dtype:
        block = block.to(dtype)
    options = layout.options
    if spec is not None:
        options = spec.options
        block = exchange.fetch(block, spec.plan, what=spec.name)
    elif layout.margins:
        block = F.pad(block, layout.margins)
    y = convolve_by_torch(block, weight, bias, options, policy.kernels)
    return x.like(y, layout.output, fresh=True, reordered=not last)


def _convolve_joined(
    x: Sharded,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    layout: ConvLayout,
    geometry: SlabGeometry,
) -> Sharded:
    """Defers the convolution of channels that are not joined yet; each slab joins its window."""
    join = x.pending
    assert isinstance(join, DeferredJoin)
    join.bypassed()
    x.mark_as_bypassed("a convolution over slabs joins in parts")
    weight = shard_parameter(weight, operand_type(weight), x.policy.homes)
    bias = bias if bias is None else bias.to(operand_type(bias))
    conv = DeferredConv(geometry, join.tensors, weight, bias, None)
    pending = SlabEpilogue(x, conv, 0, EpilogueOps(conv.dtype), torch.is_grad_enabled())
    first, *_ = join.first_of(join.tensors)
    last = serial_is_last(x, first, weight, layout.options, operand_type(x))
    return x.will_be(pending, layout.output, reordered=not last)


def _convolve_block(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    layout: ConvLayout,
    dtype: torch.dtype,
    kernels: Kernels,
    padded: HaloPaddedBuffer | None = None,
    source: RecomputedInput | None = None,
    taken: TakenWeight | None = None,
) -> torch.Tensor:
    """Computes this rank's block at once, by the steps 2 to 4 of `convolve`.

    ``taken`` makes the weight of a parameter, where the convolution computes in channels last.
    """
    if taken is None:
        block = conv_input(x, weight, kernels, dtype, padded)
    else:
        block = input_in_channels_last(x, dtype, padded)
    spec = layout.spec
    if spec is None:
        given = (layout.options, layout.margins, kernels, source, taken)
        return differentiable_conv(block, weight, bias, *given)
    if padded is not None and padded.buffer is not None:
        return BufferConv.apply(block, weight, bias, spec, kernels, source, padded, taken)
    if block is not x and not block.requires_grad:  # nobody else keeps a copy of it
        block = exchange.fetch(block, spec.plan, what=spec.name)  # in its place: it is freed
        return LocalConv.apply(block, weight, bias, spec.options, kernels, None, taken)
    if layout.slabs is None:
        return BufferConv.apply(block, weight, bias, spec, kernels, source, None, taken)
    slabs = (layout.options, layout.slabs)
    return SlabConv.apply(block, weight, bias, spec, *slabs, kernels, source, taken)


@per_grid
def lay_out_slabs(
    _: Grid, x: Partition, output: Partition, windows: tuple[Window, ...]
) -> tuple[Cover, tuple[int, ...]]:
    """Return what every rank's slabs read, and the padding that is left to the operator.

    That has the padding along the first spatial dim: slabs have none of their own.
    """
    cuts = output.cuts[2:]
    covered = [c is not None or w.before != w.after for c, w in zip(cuts, windows, strict=True)]
    covered[0] = True
    cover = read_cover(x, windows, cuts, output.shape[2:], covered)
    return cover, tuple(0 if c else w.before for c, w in zip(covered, windows, strict=True))


def _slab_geometry(x: Sharded, weight: torch.Tensor, layout: ConvLayout) -> SlabGeometry | None:
    """Return how a convolution runs over slabs; None where it does not. All ranks decide alike."""
    nbytes = x.policy.slab
    parts = _parts_for_cudnn(x, layout)
    if nbytes is None and not parts:
        return None
    output = layout.output
    dtype = operand_type(x)
    if nbytes is None:
        nbytes = math.prod(largest_block(output)) * dtype.itemsize // parts
    if 0 in output.shape or output.thin:
        return None
    extents = largest_block(output)
    windows = layout.windows
    kernels = x.policy.kernels
    join = x.pending
    if not isinstance(join, DeferredJoin) or join.with_graph != torch.is_grad_enabled():
        join = None
    # A window of a block is a view, but one of channels that are joined for it takes memory, too.
    channels = extents[1] if join is None else max(extents[1], x.shape[1])
    plane = channels * math.prod(extents[3:]) * dtype.itemsize
    planes = planes_of_slab(windows[0], plane, nbytes, overlapping=True)
    if join is None and extents[0] * extents[2] < FEWEST_SLABS * planes:
        return None
    cover, left = lay_out_slabs(x.grid, layout.input, output, windows)
    name = f"the halo exchange of conv{len(windows)}d {tuple(weight.shape)}"
    input: SlabInput
    if join is None:
        input = BlockInput(name, plan_exchange(layout.input, cover, x.grid))
    else:
        input = join.reader(cover, x.grid, name)
    return SlabGeometry(
        input=input,
        wanted=cover.box(x.grid.coords),
        out=output.box(x.grid.coords),
        window=windows[0],
        options=layout.options._replace(padding=left),
        kernels=kernels,
        dtype=dtype,
        plane=plane,
        nbytes=nbytes,
        too_large=parts > 0,
        run=partial(_convolve_block, layout=layout, dtype=dtype, kernels=kernels),
    )


def _parts_for_cudnn(x: Sharded, layout: ConvLayout) -> int:
    """Count the slabs of a block that is too large for cuDNN; 0 of one that is not.

    A plan, which scales what it traces of few ranks to many, takes such a block for whole.
    """
    small = layout.largest <= MOST_AT_ONCE
    if small or registry.device_kind(x) != "cuda" or not x.grid.has_values:
        return 0
    return -(-layout.largest * PARTS_AT_ONCE // MOST_AT_ONCE)


def serial_is_last(
    x: Sharded,
    block: torch.Tensor,
    weight: torch.Tensor,
    options: ConvOptions,
    dtype: torch.dtype,
) -> bool:
    """Tell if serial torch's convolution in ``dtype`` returns channels last.

    It does where an operand is that, but for small volumes, of which it makes columns.
    """
    if weight.is_contiguous() and (x.reordered or block.is_contiguous()):
        return False
    formats = {memory_format_of(weight)}
    if not x.reordered:
        formats.add(memory_format_of(block))
    if formats == {torch.contiguous_format}:
        return False
    on_cpu = block.device.type == "cpu" and dtype == torch.float32
    return not (on_cpu and torch_uses_im2col(x.shape, weight.shape, options))


@dataclass(frozen=True, slots=True)
class ConvTransposeLayout:
    """Holds one rank's geometry of a transposed convolution; ``largest`` as in `ConvLayout`."""

    input: Partition  # the input's, after gathering axes for which the output is too thin
    output: Partition
    largest: int
    spec: ConvSpec
    windows: tuple[TransposedWindow, ...]


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
    _check_numbers(stride, padding, output_padding, dilation, groups)
    options = (per_dim(v, len(shape) - 2) for v in (stride, padding, output_padding, dilation))
    windows = tuple(map(TransposedWindow, shape[2:], *options))
    name = f"conv_transpose{len(windows)}d"
    extents = [w.outputs(e) for w, e in zip(windows, x.shape[2:], strict=True)]
    if any(extent < 1 for extent in extents):
        raise LayoutError(f"{name}: an output {extents} of {x} would be empty; use less padding")
    x, cuts = placement(x, grid, windows, extents, name)
    output = output_partition(x, shape[1] * groups, extents, cuts)
    out = output.box(grid.coords)
    crops = [
        window.crop(out.interval(dim), x.shape[dim]) for dim, window in enumerate(windows, start=2)
    ]
    cover = read_cover(x, windows, cuts, extents, [True] * len(windows))
    plan = plan_exchange(x, cover, grid)
    own = plan.own
    spec = ConvSpec(
        name=f"the halo exchange of {name}",
        plan=replace(plan, wanted=plan.wanted.intersect(Box.whole(x.shape))),
        box=Box.of([own.interval(0), own.interval(1), *(crop.inputs for crop in crops)]),
        options=ConvOptions(
            stride=tuple(w.stride for w in windows),
            padding=tuple(crop.padding for crop in crops),
            dilation=tuple(w.dilation for w in windows),
            groups=groups,
            output_padding=tuple(crop.extra for crop in crops),
        ),
    )
    return ConvTransposeLayout(x, output, _largest(x, output), spec, windows)


def _largest(*partitions: Partition) -> int:
    return max(math.prod(largest_block(part)) for part in partitions)


@register_each(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
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
    """Takes any kernel, stride, padding, output_padding, dilation and groups.

    Distribution scheme:
    1. Place the outputs: the ``stride`` outputs in the middle of an input belong to it.
    2. If they need only the rank's own block (a kernel as wide as the stride), run the plain local
       op without a message.
    3. Otherwise run one op on a halo buffer, and crop its result to the rank's outputs
       (`BufferConv`): no partial sums travel.
    4. If the policy has slabs and the result is wide, defer it: if it is joined with other
       channels, slabs compute the parts that they need.
    """
    if input.is_complex():
        options = (stride, padding, output_padding, groups, dilation)
        return _convolve_parts(operator, input, weight, bias, *options)
    name = operator.__name__
    input = batched_input(input, spatial_dims(operator), name)
    if Sharded in (type(weight), type(bias)):
        weight = whole_of(weight, f"the filters of {name}")
        bias = whole_of(bias, f"the bias of {name}")
    if list in map(type, (stride, padding, output_padding, dilation)):
        stride, padding = hashable(stride), hashable(padding)
        output_padding, dilation = hashable(output_padding), hashable(dilation)
    given = (stride, padding, output_padding, dilation)
    partition = input.partition
    layout = lay_out_conv_transpose(input.grid, partition, weight.shape, *given, groups)
    x = input
    if layout.input is not partition:
        x = input.redistribute(layout.input, f"the gather before {name}")
    kernels = x.policy.kernels
    autocast = autocast_type(x.device.type)
    weight = weight.to(lowered(weight.dtype, autocast))
    bias = bias if bias is None else bias.to(lowered(bias.dtype, autocast))
    spec = layout.spec
    block = x.block
    dtype = lowered(block.dtype, autocast)
    last = serial_is_last(x, block, weight, spec.options, dtype)
    block = conv_input(block if block.dtype == dtype else block.to(dtype), weight, kernels)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if spec.local:
            return LocalConv.apply(x, weight, bias, spec.options, kernels, None)
        if waits_for_host(x, layout.largest):
            whole = exchange.fetch(x, spec.plan, box=spec.box, what=spec.name)
            return convolve_by_torch(whole, weight, bias, spec.options, kernels)
        return BufferConv.apply(x, weight, bias, spec, kernels, None)

    wide = is_wide(layout.output, block.dtype, x.policy.slab)
    if wide and (x.private or not block.is_inference()):
        pending = DeferredUpsampling(
            source=x,
            tensors=(block, weight, bias),
            input=layout.input,
            partition=layout.output,
            windows=layout.windows,
            options=spec.options,
            kernels=kernels,
            dtype=block.dtype,
            run=run,
            with_graph=torch.is_grad_enabled(),
        )
        return x.will_be(pending, layout.output, reordered=not last)
    return x.like(run(block, weight, bias), layout.output, fresh=True, reordered=not last)
