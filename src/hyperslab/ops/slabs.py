"""Runs a convolution and what follows it over slabs of a rank's block, one after the other.

Where the policy says so (`Policy.slab`) a convolution is deferred like the epilogue behind it
(`hyperslab.ops.fusion`), and `SlabStage` computes both a few planes at a time, so that neither its
result nor that one's gradient is ever whole. Nor is what it reads, where that is joined of a
skipped map and a transposed convolution (docs/design/0034-slabs.md).

In reading order: the windows of a block (`BlockInput`), of a transposed convolution
(`UpsampledInput`) and of several side by side (`JoinedInput`), each a plan, which is opened on
tensors to read windows and to add up their gradients; what is deferred of them,
`DeferredUpsampling` and `DeferredJoin`; the geometry of slabs, `SlabGeometry`; the two loops over
them, forward and backward, `SlabStage`; what a deferred convolution is before it runs,
`DeferredConv` and `SlabEpilogue`.

Legend: n a sample, lo and hi planes of the output along the first spatial dim, all in global
indices; a *window* is what the outputs of a slab read, a box of one sample with zeros outside of
the volume; *operands* are the tensors that autograd keeps, *halos* what other ranks have sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hyperslab.comm import ExchangePlan, Grid, exchange, plan_exchange
from hyperslab.errors import LayoutError
from hyperslab.geometry import Box, Cover, Partition, TransposedWindow, Window
from hyperslab.kernels.conv import RecomputedInput, conv_backward, conv_forward, conv_input
from hyperslab.kernels.conv_problem import ConvOptions, Kernels
from hyperslab.kernels.memory_format import (
    HaloPaddedBuffer,
    compute_dtype,
    dense,
    memory_format_by_strides,
    memory_format_of,
)
from hyperslab.ops.fusion import (
    EpilogueFunction,
    EpilogueOps,
    FusedEpilogue,
    chain_backward,
    chain_backward_sums,
    chain_forward,
    channel_sums,
    in_format,
)
from hyperslab.tensor import Sharded
from hyperslab.util.torch_internals import BlockFunction, version_of

Operands = Sequence[torch.Tensor | None]

FEWEST_SLABS = 4
"""Results of fewer slabs are computed whole."""


class GradientSum:
    """Adds gradients up in single precision at least: slabs may be many."""

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None
        self.dtype: torch.dtype | None = None

    def add(self, part: torch.Tensor | None) -> None:
        if part is None:
            return
        if self.total is None:
            self.dtype = part.dtype
            self.total = part.to(compute_dtype(part))
        else:
            self.total.add_(part)

    @property
    def value(self) -> torch.Tensor | None:
        return None if self.total is None else self.total.to(self.dtype)


@dataclass(frozen=True, slots=True)
class BlockInput:
    """Plans windows of a block, the only operand; ``plan`` brings its halo."""

    name: str
    plan: ExchangePlan

    operands = 1

    @property
    def channels(self) -> int:
        return self.plan.own.shape[1]

    @property
    def halos(self) -> int:
        return len(self.plan.receives)

    def block_of(self, operands: Operands) -> torch.Tensor:
        """Return the whole block that windows are read of, with its graph."""
        (x,) = operands
        assert x is not None
        return x

    def exchange(self, operands: Operands) -> list[torch.Tensor]:
        """Return the halos of the whole block; all ranks exchange together."""
        x = self.block_of(operands)
        return list(exchange.start(dense(x, memory_format_of(x)), self.plan, self.name).wait())

    def open(
        self, operands: Operands, halos: Sequence[torch.Tensor], needs: Sequence[bool]
    ) -> BlockWindows:
        """Return the windows; their gradients add up for the operands that ``needs`` names."""
        return BlockWindows(self, self.block_of(operands), halos, needs[0])


class BlockWindows:
    """Reads windows, and adds up gradients, if needed: of the block, and of halos others sent."""

    def __init__(
        self, input: BlockInput, x: torch.Tensor, halos: Sequence[torch.Tensor], needed: bool
    ) -> None:
        self.plan = input.plan
        self.name = input.name
        self.x = x
        self.halos = halos
        self.dx = torch.zeros_like(x) if needed else None
        self.dhalos = [torch.zeros_like(halo) for halo in halos if needed]

    def read(self, window: Box) -> torch.Tensor:
        """Return a window: a view of an operand where that is all."""
        own = self.plan.own
        if own.contains(window):
            return self.x[window.slices(own)]
        return exchange.join_halo(self.x, self.halos, self.plan, window)

    def add(self, gradient: torch.Tensor, window: Box) -> None:
        if self.dx is None:
            return
        parts = [(self.dx, self.plan.own)]
        parts += [(dhalo, t.box) for dhalo, t in zip(self.dhalos, self.plan.receives, strict=True)]
        for part, at in parts:
            common = window.intersect(at)
            if not common.empty:
                part[common.slices(at)].add_(gradient[common.slices(window)])

    def finish(self) -> list[torch.Tensor | None]:
        """Send home what belongs to other ranks; return the gradients of the operands."""
        if self.dx is not None:
            arriving = exchange.start_adjoint(self.dhalos, self.dx, self.plan, self.name)
            exchange.add_returned(self.dx, arriving.wait(), self.plan)
        return [self.dx]


@dataclass(frozen=True, slots=True)
class UpsampledInput:
    """Plans windows of a transposed convolution, whose operands are block, weight and bias.

    ``volume`` is the box of its whole result. A window is the transposed convolution of what
    touches it, cropped to it (`TransposedWindow.crop`); its gradient is linear, so that those of
    overlapping windows add up.
    """

    block: BlockInput
    volume: Box
    extents: tuple[int, ...]  # of its input, in space
    windows: tuple[TransposedWindow, ...]
    options: ConvOptions
    kernels: Kernels

    operands = 3

    @property
    def channels(self) -> int:
        return self.volume.shape[1]

    @property
    def halos(self) -> int:
        return self.block.halos

    def exchange(self, operands: Operands) -> list[torch.Tensor]:
        return self.block.exchange(operands[:1])

    def open(
        self, operands: Operands, halos: Sequence[torch.Tensor], needs: Sequence[bool]
    ) -> UpsampledWindows:
        return UpsampledWindows(self, operands, halos, needs)

    def crop(self, window: Box) -> tuple[Box, Box, ConvOptions]:
        """Return the window within the volume, the inputs that touch it, and how it is computed."""
        inner = window.intersect(self.volume)
        crops = [
            w.crop(inner.interval(dim), extent)
            for dim, (w, extent) in enumerate(zip(self.windows, self.extents, strict=True), start=2)
        ]
        channels = self.block.plan.own.interval(1)
        inputs = Box.of([window.interval(0), channels, *(crop.inputs for crop in crops)])
        padding, extra = tuple(c.padding for c in crops), tuple(c.extra for c in crops)
        return inner, inputs, self.options._replace(padding=padding, output_padding=extra)


class UpsampledWindows:
    """Computes windows of a transposed convolution; adds up their operands' gradients."""

    def __init__(
        self,
        input: UpsampledInput,
        operands: Operands,
        halos: Sequence[torch.Tensor],
        needs: Sequence[bool],
    ) -> None:
        _, weight, self.bias = operands
        assert weight is not None
        self.weight = weight
        self.input = input
        self.needs = needs
        self.block = input.block.open(operands[:1], halos, needs[:1])
        self.dweight = GradientSum()
        self.dbias = GradientSum()

    def read(self, window: Box) -> torch.Tensor:
        inner, inputs, options = self.input.crop(window)
        if inner.empty:  # all of it is padding
            return exchange.new_box(window, (), self.block.x)
        block = self.block.read(inputs)
        y = conv_forward(block, self.weight, self.bias, options, self.input.kernels)
        if inner == window:
            return y
        out = exchange.new_box(window, (inner,), y)
        exchange.copy_overlap(out, window, y, inner)
        return out

    def add(self, gradient: torch.Tensor, window: Box) -> None:
        inner, inputs, options = self.input.crop(window)
        if inner.empty or not any(self.needs):
            return
        block = self.block.read(inputs)
        g = gradient[inner.slices(window)].to(self.weight.dtype)
        how = (options, self.needs, self.input.kernels)
        dx, dw, db = conv_backward(g, block, self.weight, *how)
        if dx is not None:
            self.block.add(dx, inputs)
        self.dweight.add(dw)
        self.dbias.add(db)

    def finish(self) -> list[torch.Tensor | None]:
        return [*self.block.finish(), self.dweight.value, self.dbias.value]


@dataclass(frozen=True, slots=True)
class JoinedInput:
    """Plans windows of several inputs, whose channels lie side by side; its operands are theirs."""

    parts: tuple[BlockInput | UpsampledInput, ...]
    block_of: Callable[[Operands], torch.Tensor]

    def exchange(self, operands: Operands) -> list[torch.Tensor]:
        given = iter(operands)
        return [halo for part in self.parts for halo in part.exchange(_take(given, part.operands))]

    def open(
        self, operands: Operands, halos: Sequence[torch.Tensor], needs: Sequence[bool]
    ) -> JoinedWindows:
        given, received, needed = iter(operands), iter(halos), iter(needs)
        opened = [
            part.open(
                _take(given, part.operands),
                _take(received, part.halos),
                _take(needed, part.operands),
            )
            for part in self.parts
        ]
        return JoinedWindows(opened, [part.channels for part in self.parts])


@dataclass(frozen=True, slots=True)
class JoinedWindows:
    """Joins windows; deals the channels of their gradients to the inputs that were joined."""

    parts: Sequence[BlockWindows | UpsampledWindows]
    channels: list[int]

    def read(self, window: Box) -> torch.Tensor:
        own = self._windows(window)
        return torch.cat([part.read(at) for part, at in zip(self.parts, own, strict=True)], 1)

    def add(self, gradient: torch.Tensor, window: Box) -> None:
        pieces = gradient.split(self.channels, 1)
        for part, piece, at in zip(self.parts, pieces, self._windows(window), strict=True):
            part.add(piece, at)

    def finish(self) -> list[torch.Tensor | None]:
        return [gradient for part in self.parts for gradient in part.finish()]

    def _windows(self, window: Box) -> list[Box]:
        """Find the window of each part, in channels of its own."""
        sample, _, *space = (window.interval(dim) for dim in range(window.ndim))
        return [Box.of([sample, (0, channels), *space]) for channels in self.channels]


SlabInput = BlockInput | JoinedInput
SlabWindows = BlockWindows | JoinedWindows


def _take(values: Iterator[Any], count: int) -> list[Any]:
    return [next(values) for _ in range(count)]


def versions_of(operands: Operands) -> tuple[int, ...]:
    return tuple(version_of(t) for t in operands if t is not None and not t.is_inference())


def _check_unchanged(operands: Operands, versions: tuple[int, ...], what: str) -> None:
    if versions_of(operands) != versions:
        raise LayoutError(
            f"{what} was changed in place before its result was used\n    change a clone() of it, "
            "change it after the backward pass, or use memory=none"
        )


def is_wide(partition: Partition, dtype: torch.dtype, nbytes: int | None) -> bool:
    """Tell if a rank's block has several slabs of ``nbytes``; all ranks decide alike."""
    if nbytes is None or 0 in partition.shape or partition.thin:
        return False
    return math.prod(largest_block(partition)) * dtype.itemsize >= FEWEST_SLABS * nbytes


def largest_block(partition: Partition) -> list[int]:
    return [
        extent if cut is None else cut.largest
        for extent, cut in zip(partition.shape, partition.cuts, strict=True)
    ]


@dataclass(slots=True, eq=False)
class DeferredUpsampling:
    """Holds the operands of a transposed convolution that has not run.

    ``input`` and ``partition`` are the partitions of its input and of its result, ``run`` computes
    the whole block with its graph.
    """

    source: Sharded | None
    tensors: Operands
    input: Partition
    partition: Partition
    windows: tuple[TransposedWindow, ...]
    options: ConvOptions
    kernels: Kernels
    dtype: torch.dtype
    run: Callable[..., torch.Tensor]
    with_graph: bool
    versions: tuple[int, ...] = field(init=False)

    recomputable = False

    def __post_init__(self) -> None:
        self.versions = versions_of(self.tensors)

    @property
    def sources(self) -> Iterable[Sharded]:
        return () if self.source is None else (self.source,)

    def value(self) -> torch.Tensor:
        what = f"the weight of a transposed convolution of {self.input}, or its input,"
        _check_unchanged(self.tensors, self.versions, what)
        with torch.set_grad_enabled(self.with_graph):
            return self.run(*self.tensors)

    def reader(self, cover: Cover, grid: Grid) -> UpsampledInput:
        """Return what reads windows of the result within this rank's box of ``cover``."""
        intervals = list(self.input.cover.intervals)
        axes = list(self.input.cover.axes)
        extents = self.input.shape[2:]
        for dim, (window, extent) in enumerate(zip(self.windows, extents, strict=True), start=2):
            axes[dim] = cover.axes[dim]
            intervals[dim] = tuple(
                _touching(window, span, self.partition.shape[dim], extent)
                for span in cover.intervals[dim]
            )
        plan = plan_exchange(self.input, Cover(tuple(axes), tuple(intervals)), grid)
        name = f"the halo exchange of conv_transpose{len(self.windows)}d"
        volume = Box.whole(self.partition.shape)
        return UpsampledInput(
            BlockInput(name, plan), volume, tuple(extents), self.windows, self.options, self.kernels
        )


def _touching(
    window: TransposedWindow, span: tuple[int, int], outputs: int, extent: int
) -> tuple[int, int]:
    """Return the inputs of a volume that touch those of its outputs that ``span`` names."""
    lo, hi = max(span[0], 0), min(span[1], outputs)
    if lo >= hi:
        return 0, 0
    first, end = window.reads((lo, hi))
    first = max(first, 0)
    return first, max(first, min(end, extent))


@dataclass(slots=True, eq=False)
class DeferredJoin:
    """Holds what ``torch.cat`` joins along the channels and has not copied yet.

    ``parts``: a block or a deferred transposed convolution each, with its partition.
    """

    sources: Sequence[Sharded]
    parts: Sequence[tuple[Partition, torch.Tensor | DeferredUpsampling]]
    partition: Partition
    run: Callable[[list[torch.Tensor]], torch.Tensor]
    with_graph: bool
    versions: tuple[int, ...] = field(init=False)

    recomputable = False

    def __post_init__(self) -> None:
        self.versions = versions_of(self.tensors)

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        """Return the operands of a `JoinedInput` that reads this."""
        found: list[torch.Tensor | None] = []
        for _, part in self.parts:
            found += [part] if isinstance(part, torch.Tensor) else part.tensors
        return found

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0][1].dtype

    def first_of(self, tensors: Operands) -> tuple[torch.Tensor, Partition]:
        """Return the first of its operands, with the partition that it is a block of."""
        partition, part = self.parts[0]
        block = tensors[0]
        assert block is not None
        return block, partition if isinstance(part, torch.Tensor) else part.input

    def with_tensors(self, tensors: Operands) -> DeferredJoin:
        given: Iterator[Any] = iter(tensors)
        parts: list[tuple[Partition, torch.Tensor | DeferredUpsampling]] = []
        for partition, part in self.parts:
            if isinstance(part, torch.Tensor):
                parts.append((partition, next(given)))
            else:
                tensors = _take(given, 3)
                parts.append((partition, replace(part, source=None, tensors=tensors)))
        return replace(self, sources=(), parts=parts)

    def value(self) -> torch.Tensor:
        what = f"what torch.cat joins as {self.partition}"
        _check_unchanged(self.tensors, self.versions, what)
        with torch.set_grad_enabled(self.with_graph):
            if self.sources:  # whose gradients somebody may watch
                return self.run([source.block for source in self.sources])
            return self.block_of(self.tensors)

    def bypassed(self) -> None:
        """State that windows are computed from the operands, past the tensors in between."""
        for source in self.sources:
            if isinstance(source.pending, DeferredUpsampling):
                source.mark_as_bypassed("a convolution over slabs computes in parts")

    @property
    def block_of(self) -> Callable[[Operands], torch.Tensor]:
        """Return what computes the block of operands, with its graph; it holds none of its own."""
        run = self.run
        ways = [None if isinstance(part, torch.Tensor) else part.run for _, part in self.parts]

        def join(tensors: Operands) -> torch.Tensor:
            given: Iterator[Any] = iter(tensors)
            return run([next(given) if way is None else way(*_take(given, 3)) for way in ways])

        return join

    def reader(self, cover: Cover, grid: Grid, name: str) -> JoinedInput:
        """Return what reads windows of the result within this rank's box of ``cover``."""
        parts: list[BlockInput | UpsampledInput] = []
        for partition, part in self.parts:
            if isinstance(part, torch.Tensor):
                own = partition.cover
                intervals = (*own.intervals[:2], *cover.intervals[2:])
                of_part = Cover((*own.axes[:2], *cover.axes[2:]), intervals)
                parts.append(BlockInput(name, plan_exchange(partition, of_part, grid)))
            else:
                parts.append(part.reader(cover, grid))
        return JoinedInput(tuple(parts), self.block_of)


def join_channels(
    tensors: Sequence[Any], dim: int, run: Callable[[list[torch.Tensor]], torch.Tensor]
) -> Sharded | None:
    """Defer a concatenation of channels whose result is wide; None where it is to be computed.

    ``run`` concatenates blocks with their graph.
    """
    first = tensors[0] if isinstance(tensors, list | tuple) and tensors else None
    if not isinstance(first, Sharded) or first.policy.slab is None or first.is_complex():
        return None
    if not 3 <= first.dim() <= 5 or dim not in (1, 1 - first.dim()):
        return None
    if any(not isinstance(t, Sharded) or t.dim() != first.dim() for t in tensors):
        return None
    partition = first.partition.with_dim(1, sum(t.shape[1] for t in tensors), None)
    for t in tensors:
        same = t.partition.with_dim(1, partition.shape[1], None) == partition
        if not same or t.partition.cuts[1] is not None or t.dtype != first.dtype:
            return None
    if not is_wide(partition, first.dtype, first.policy.slab):
        return None
    parts: list[tuple[Partition, torch.Tensor | DeferredUpsampling]] = []
    graph = torch.is_grad_enabled()
    for t in tensors:
        pending = t.pending
        if isinstance(pending, DeferredUpsampling) and pending.with_graph == graph:
            t.force_readers()
            parts.append((t.partition, pending))
            continue
        t.force()
        if not t.private and t.block.is_inference():
            return None  # nothing would tell of a change
        parts.append((t.partition, t.block))
    join = DeferredJoin(tuple(tensors), parts, partition, run, graph)
    return first.will_be(join, partition, reordered=all(t.reordered for t in tensors))


SLAB_BYTES = 1 << 25
"""Bytes of the convolution's result in one slab: small beside any block that does not fit."""

MOST_AT_ONCE = 1 << 30
"""Elements of a block up to which cuDNN convolves it at once: in half precision more bytes than 32
bits can count, for which it has few kernels or none."""

PARTS_AT_ONCE = 4
"""Slabs that a block of so many elements would be, on a CUDA device."""

PLANES_PER_HALO = 8
"""Planes of a slab for each that it shares with the next one, whose gradient is computed twice.

Fewer, down to two, where a slab would have more than `MOST_BYTES` times the bytes it should have.
"""

MOST_BYTES = 4


@dataclass(frozen=True, slots=True)
class Slab:
    """Names some planes of one sample's output, and the box of the input that they read."""

    sample: int
    planes: slice
    window: Box


def planes_of_slab(window: Window, plane: int, nbytes: int, *, overlapping: bool) -> int:
    """Count the planes of a slab of about ``nbytes``, where one takes ``plane`` bytes.

    ``overlapping``: what slabs share of their windows costs work.
    """
    plane = max(1, plane)
    planes = max(1, nbytes // plane)
    if not overlapping:
        return planes
    shared = window.span - 1
    return max(planes, min(PLANES_PER_HALO * shared, max(2 * shared, MOST_BYTES * nbytes // plane)))


@dataclass(frozen=True, slots=True)
class SlabGeometry:
    """Holds one rank's geometry of a convolution over slabs, and how it is computed.

    ``wanted`` is what all slabs read of ``input``, with the padding along the first spatial dim and
    along those that are cut; the padding of ``options`` is left to the operator. ``out`` is this
    rank's box of the output. ``run(block, weight, bias, source=...)`` convolves a block at once,
    with its graph.
    """

    input: SlabInput
    wanted: Box
    out: Box
    window: Window
    options: ConvOptions
    kernels: Kernels
    dtype: torch.dtype
    plane: int  # bytes of the widest plane that a slab makes
    nbytes: int  # of a slab
    too_large: bool  # to be convolved at once
    run: Callable[..., torch.Tensor]

    def slabs(self, *, overlapping: bool, multiple: int = 1) -> Iterator[Slab]:
        """Cut the output: ``multiple`` planes belong together; see `planes_of_slab`."""
        planes = planes_of_slab(self.window, self.plane, self.nbytes, overlapping=overlapping)
        planes = -(-planes // multiple) * multiple
        first, end = self.out.interval(2)
        wanted = self.wanted
        rest = [wanted.interval(dim) for dim in range(3, wanted.ndim)]
        begin = self.out.lo[0]
        for n in range(begin, self.out.hi[0]):
            for lo in range(first, end, planes):
                hi = min(lo + planes, end)
                reads = self.window.reads((lo, hi))
                box = Box.of([(n, n + 1), wanted.interval(1), reads, *rest])
                yield Slab(n - begin, slice(lo - first, hi - first), box)

    def read(self, windows: SlabWindows, slab: Slab, weight: torch.Tensor) -> torch.Tensor:
        """Return what a slab's outputs read, as it is convolved: a network's input is converted."""
        return conv_input(windows.read(slab.window), weight, self.kernels, self.dtype)

    def convolve(
        self, window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return conv_forward(window, weight, bias, self.options, self.kernels)

    def whole(
        self,
        operands: Operands,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        source: RecomputedInput | None = None,
    ) -> torch.Tensor:
        return self.run(self.input.block_of(operands), weight, bias, source=source)


def _rows_of(parts: torch.Tensor | None, sample: int) -> torch.Tensor | None:
    """Returns the numbers of one sample, of (K, R, C) where R is 1 or the samples."""
    if parts is None or parts.shape[1] == 1:
        return parts
    return parts[:, sample : sample + 1].contiguous()


class SlabStage(BlockFunction):
    """Convolves and applies an epilogue, slab by slab.

    Distribution scheme, forward: 1. exchange the halo of the whole block, unless the statistics of
    the epilogue's normalisation have needed it before, 2. for every slab: convolve its window,
    apply the epilogue. Kept are the block, the thin halos, and the epilogue's marks, a bit an
    element or less. A result that is not ``wanted`` is not computed: checkpointing runs the
    function again for what it keeps. Backward: 1. behind a normalisation the sums over all slabs,
    which are convolved once more, and one all-reduce of them, 2. for every slab: the gradient of
    the epilogue, from the marks or from the slab that is convolved once more, and those of window,
    weight and bias, 3. gradients of halos travel home and are added.
    """

    @staticmethod
    def forward(
        ctx: Any,
        geometry: SlabGeometry,
        links: EpilogueOps,
        halos: Sequence[torch.Tensor],
        source: RecomputedInput | None,
        padded: HaloPaddedBuffer | None,
        wanted: bool,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        norm_bias: torch.Tensor | None,
        *operands: torch.Tensor | None,
    ) -> torch.Tensor:
        marking = links.leaves_marks and any(ctx.needs_input_grad)
        statistics = links.statistics
        norm = None if statistics is None else statistics.norm
        tile = (links.pool or (1,))[0]
        needs_input = any(ctx.needs_input_grad[_OPERANDS:])
        slabs = list(geometry.slabs(overlapping=needs_input, multiple=tile))
        options = (links.slope, links.pool, links.maximum, marking, links.dtype)
        marks = []
        formats = []  # of slabs, for marks lie in that order: one voxel's may differ
        y = None
        windows = geometry.input.open(operands, halos, [False] * len(operands))
        for slab in slabs if wanted else ():
            window = geometry.read(windows, slab, weight)
            z = geometry.convolve(window, weight, bias)
            part, mark = chain_forward(z, _rows_of(norm, slab.sample), *options)
            if y is None:
                y = _allocate_result(geometry.out, part, tile, padded)
            y[slab.sample : slab.sample + 1, :, _pooled(slab.planes, links)] = part
            marks.append(mark)
            formats.append(memory_format_by_strides(z))
        ctx.formats = formats
        kept = operands if source is None else source.tensors
        ctx.source = source
        ctx.geometry = geometry
        ctx.links = links
        ctx.slabs = slabs
        ctx.counts = [len(kept), len(halos)]
        ctx.save_for_backward(weight, bias, *kept, *halos, *(marks if marking else ()))
        return weight.new_empty(0) if y is None else y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        statistics = ctx.links.statistics
        if statistics is not None:
            statistics.affine.check_unchanged()
        if torch.is_grad_enabled():
            return *[None] * _WEIGHT, *_backward_with_graph(ctx, gradient)
        return *[None] * _WEIGHT, *_backward(ctx, gradient)


_WEIGHT, _NORM, _OPERANDS = 6, 8, 10
"""Places among the arguments of a `SlabStage`: weight and bias, those of a norm, the operands."""


def _allocate_result(
    out: Box, part: torch.Tensor, tile: int, padded: HaloPaddedBuffer | None
) -> torch.Tensor:
    """Allocate the whole result, of which ``part`` is a slab; in ``padded``, if it may be."""
    shape = (out.shape[0], part.shape[1], out.shape[2] // tile, *part.shape[3:])
    order = memory_format_of(part)
    y = None if padded is None else padded.block(shape, part.dtype, order)
    if y is not None:
        return y
    return torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=order)


def _pooled(planes: slice, links: EpilogueOps) -> slice:
    """Maps planes before the pooling to those behind it."""
    step = (links.pool or (1,))[0]
    return slice(planes.start // step, planes.stop // step)


def _unpack(ctx: Any) -> tuple[Any, ...]:
    weight, bias, *saved = ctx.saved_tensors
    count, halos = ctx.counts
    kept = tuple(saved[:count])
    operands = kept if ctx.source is None else (ctx.source.value(kept),)
    return operands, weight, bias, saved[count : count + halos], saved[count + halos :]


def _backward_with_graph(ctx: Any, gradient: torch.Tensor) -> list[torch.Tensor | None]:
    """Compute gradients that can be differentiated again, of the whole stage with its graph."""
    operands, weight, bias, _, _ = _unpack(ctx)
    links = ctx.links
    # Views, as of parameters themselves the gradient would be that of all ranks.
    weight, bias, *norms = (
        None if one is None else one.view_as(one) for one in (weight, bias, *links.parameters)
    )
    z = ctx.geometry.whole(operands, weight, bias)
    y = EpilogueFunction.apply(z, *norms, links)
    inputs = [weight, bias, *norms, *operands]
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad[_WEIGHT:]) if needed]
    found = torch.autograd.grad(y, [inputs[i] for i in wanted], gradient, create_graph=True)
    return [found[wanted.index(i)] if i in wanted else None for i in range(len(inputs))]


def _backward(ctx: Any, gradient: torch.Tensor) -> list[torch.Tensor | None]:
    geometry: SlabGeometry = ctx.geometry
    links: EpilogueOps = ctx.links
    operands, weight, bias, halos, marks = _unpack(ctx)
    needs_input = ctx.needs_input_grad[_OPERANDS:]
    needs = [any(needs_input), *ctx.needs_input_grad[_WEIGHT:_NORM]]
    options = (links.slope, links.pool, links.maximum)
    statistics = links.statistics
    nothing = gradient.new_empty(0, dtype=torch.uint8)

    def parts(
        windows: SlabWindows,
    ) -> Iterator[tuple[Slab, torch.Tensor, torch.Tensor, torch.Tensor]]:
        for at, slab in enumerate(ctx.slabs):
            part = gradient[slab.sample : slab.sample + 1, :, _pooled(slab.planes, links)]
            window = geometry.read(windows, slab, weight)
            yield slab, window, in_format(part, ctx.formats[at]), marks[at] if marks else nothing

    dnorm: list[torch.Tensor | None] = [None, None]
    through = None
    if statistics is not None:
        sums = None
        windows = geometry.input.open(operands, halos, [False] * len(operands))
        for slab, window, g, mark in parts(windows):
            x_of_norm = geometry.convolve(window, weight, bias)
            row_of_norm = _rows_of(statistics.norm, slab.sample)
            found = chain_backward_sums(g, mark, x_of_norm, row_of_norm, *options)
            if sums is None:
                rows = statistics.norm.shape[1]
                sums = found.new_zeros(len(found), rows, *found.shape[2:])
            row = slab.sample if sums.shape[1] > 1 else 0
            sums[:, row : row + 1] += found
        *parameters, through = statistics.gradients(sums, any(needs))
        dnorm = [parameters[i] if ctx.needs_input_grad[_NORM + i] else None for i in range(2)]
    windows = geometry.input.open(operands, halos, needs_input)
    dweight = GradientSum()
    dbias = GradientSum()
    _, channels, _, *space = geometry.out.shape
    if any(needs):
        for slab, window, g, mark in parts(windows):
            shape = [1, channels, slab.planes.stop - slab.planes.start, *space]
            z = None if statistics is None else geometry.convolve(window, weight, bias)
            norm = None if statistics is None else _rows_of(statistics.norm, slab.sample)
            passed = _rows_of(through, slab.sample)
            g = chain_backward(g, mark, z, norm, passed, *options, shape, geometry.dtype)
            how = (geometry.options, needs, geometry.kernels)
            dwindow, dw, db = conv_backward(g, window, weight, *how)
            dweight.add(dw)
            dbias.add(db)
            if dwindow is not None:
                windows.add(dwindow, slab.window)
    return [dweight.value, dbias.value, *dnorm, *windows.finish()]


@dataclass(slots=True, eq=False)
class DeferredConv:
    """Holds the operands of a convolution that has not run; stands for the block of its result."""

    geometry: SlabGeometry
    operands: Operands
    weight: torch.Tensor
    bias: torch.Tensor | None
    source: RecomputedInput | None
    wanted: bool = True
    versions: tuple[int, ...] = field(init=False)
    _halos: Sequence[torch.Tensor] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.versions = versions_of(self.all_operands)

    @property
    def all_operands(self) -> Operands:
        return (*self.operands, self.weight, self.bias)

    @property
    def changed(self) -> bool:
        return versions_of(self.all_operands) != self.versions

    @property
    def shape(self) -> tuple[int, ...]:
        return self.geometry.out.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.geometry.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def requires_grad(self) -> bool:
        return any(t is not None and t.requires_grad for t in self.all_operands)

    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def halos(self) -> Sequence[torch.Tensor]:
        """Return the parts of windows that other ranks hold, which send them once."""
        if self._halos is None:
            with torch.no_grad():
                self._halos = self.geometry.input.exchange(self.operands)
        return self._halos

    def channel_sums(self, groups: int) -> torch.Tensor:
        """Sum up what the moments of the result are made of, see ``hyperslab::channel_sums``."""
        geometry = self.geometry
        rows: list[torch.Tensor | None] = [None] * (self.shape[0] if groups else 1)
        windows = geometry.input.open(self.operands, self.halos, [False] * len(self.operands))
        for slab in geometry.slabs(overlapping=False):
            window = geometry.read(windows, slab, self.weight)
            sums = channel_sums(geometry.convolve(window, self.weight, self.bias), groups)
            row = slab.sample if groups else 0
            before = rows[row]
            rows[row] = sums if before is None else before + sums
        return torch.cat([sums for sums in rows if sums is not None], 1)

    def stage(self, links: EpilogueOps, padded: HaloPaddedBuffer | None) -> torch.Tensor:
        operands: Operands = (self.weight, self.bias, *links.parameters, *self.operands)
        if not torch.is_grad_enabled():  # or the marks of the gradient would be made
            operands = [None if t is None else t.detach() for t in operands]
        how = (self.geometry, links, self.halos, self.source, padded, self.wanted)
        return SlabStage.apply(*how, *operands)


class SlabEpilogue(FusedEpilogue):
    """Defers a convolution, too; its ``block`` is a `DeferredConv`, ``source`` that one's input."""

    __slots__ = ()

    @property
    def can_wait(self) -> bool:
        """Tell if the result may be computed later: a change of the input would be noticed.

        Torch, which keeps the input for the gradient, refuses such a change as well.
        """
        operands = self.block.operands
        return self.source.private or not any(t is not None and t.is_inference() for t in operands)

    @property
    def recomputable(self) -> bool:
        """Tell that the result is kept: nothing else is of which it could be computed."""
        return False

    def check_unchanged(self) -> None:
        if self.block.changed:
            raise LayoutError(
                f"the weight of a convolution of {self.source.partition}, or its input, was "
                "changed in place before its result was used\n    change it after the backward "
                "pass, or use memory=none"
            )

    def keep_only(self) -> None:
        """Compute no result, if possible, but what the backward pass keeps.

        For checkpointing, which has had the result before. Behind a normalisation nothing that is
        kept depends on it.
        """
        links = self.links
        if links.statistics is not None and not links.leaves_marks and not self._alive():
            self.block.wanted = False

    def computed(self, links: EpilogueOps) -> torch.Tensor:
        """Convolve and apply the epilogue over slabs; the block at once where none follows."""
        conv: DeferredConv = self.block
        joined = isinstance(conv.geometry.input, JoinedInput)
        if links.empty and links.dtype == conv.dtype and not joined and not conv.geometry.too_large:
            return conv.geometry.whole(conv.operands, conv.weight, conv.bias, conv.source)
        return conv.stage(links, self.padded)
