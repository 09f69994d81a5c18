"""Reads the windows of slabs out of what a convolution takes, which need not exist as a whole.

The widest tensor of a U-Net is what its last level joins: the result of a transposed convolution
and the map that was skipped. Where the policy says so (`Policy.slab`) both operators are deferred,
and the convolution behind them, which runs over slabs (`hyperslab.ops.slabs`), computes a window of
the one and copies a window of the other.

In reading order: the windows of a block (`BlockInput`), of a transposed convolution
(`UpsampledInput`) and of several side by side (`JoinedInput`). Each is a plan, which is opened on
tensors to read windows and to add up their gradients. Then what is deferred, `DeferredUpsampling`
and `DeferredJoin`.

Legend: *operands* are the tensors that autograd keeps, *halos* what other ranks have sent of them;
a *window* is a box of one sample in global indices of what is read, zeros outside of the volume.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hyperslab.comm import ExchangePlan, Grid, plan_exchange
from hyperslab.comm.exchange import (
    add_returned,
    copy_overlap,
    join_halo,
    new_box,
    start,
    start_adjoint,
)
from hyperslab.errors import LayoutError
from hyperslab.geometry import Box, Cover, Partition, TransposedWindow
from hyperslab.kernels.conv import conv_backward, conv_forward
from hyperslab.kernels.conv_problem import ConvOptions, Kernels
from hyperslab.kernels.memory_format import compute_dtype, dense, memory_format_of
from hyperslab.tensor import Sharded
from hyperslab.util.torch_internals import version_of

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
        return list(start(dense(x, memory_format_of(x)), self.plan, self.name).wait())

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
        return join_halo(self.x, self.halos, self.plan, window)

    def add(self, gradient: torch.Tensor, window: Box) -> None:
        """Add what one window has."""
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
            arriving = start_adjoint(self.dhalos, self.dx, self.plan, self.name)
            add_returned(self.dx, arriving.wait(), self.plan)
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

    def crop(self, window: Box) -> tuple[Box, Box, ConvOptions, tuple[int, ...]]:
        """Return the window within the volume, the inputs that touch it, and how it is computed."""
        inner = window.intersect(self.volume)
        crops = [
            w.crop(inner.interval(dim), extent)
            for dim, (w, extent) in enumerate(zip(self.windows, self.extents, strict=True), start=2)
        ]
        channels = self.block.plan.own.interval(1)
        inputs = Box.of([window.interval(0), channels, *(crop.inputs for crop in crops)])
        options = replace(self.options, output_padding=tuple(crop.extra for crop in crops))
        return inner, inputs, options, tuple(crop.padding for crop in crops)


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
        inner, inputs, options, padding = self.input.crop(window)
        if inner.empty:  # all of it is padding
            return new_box(window, (), self.block.x)
        block = self.block.read(inputs)
        y = conv_forward(block, self.weight, self.bias, options, padding, self.input.kernels)
        if inner == window:
            return y
        out = new_box(window, (inner,), y)
        copy_overlap(out, window, y, inner)
        return out

    def add(self, gradient: torch.Tensor, window: Box) -> None:
        inner, inputs, options, padding = self.input.crop(window)
        if inner.empty or not any(self.needs):
            return
        block = self.block.read(inputs)
        g = gradient[inner.slices(window)].to(self.weight.dtype)
        kernels = self.input.kernels
        dx, dw, db = conv_backward(g, block, self.weight, options, padding, self.needs, kernels)
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


class JoinedWindows:
    """Joins windows; deals the channels of their gradients to the inputs that were joined."""

    def __init__(
        self, parts: Sequence[BlockWindows | UpsampledWindows], channels: list[int]
    ) -> None:
        self.parts = parts
        self.channels = channels

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
    """Return what tells if one of the operands is changed in place later."""
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
    """Return the most that a rank has of each dim."""
    return [
        extent if cut is None else max(hi - lo for lo, hi in cut.intervals)
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
        """Compute the block.

        Raises:
            LayoutError: an operand was changed in place since, where no rule could see it.
        """
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
        """Compute the block.

        Raises:
            LayoutError: an operand was changed in place since, where no rule could see it.
        """
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
