"""Runs a convolution and what follows it over slabs of a rank's block, one after the other.

The result of a convolution is the widest tensor of most networks, and only the next operators
look at it. Where the policy says so (`Policy.slab`) a convolution is deferred like the epilogue
behind it (`hyperslab.ops.fusion`), and `SlabStage` computes both a few planes at a time. Neither
the convolution's result nor its gradient is ever whole.

In reading order: the geometry of slabs, `SlabGeometry`; the two loops over them, forward and
backward, `SlabStage`; what a deferred convolution is before it runs, `DeferredConv` and
`SlabEpilogue`.

Legend: n a sample, lo and hi planes of the output along the first spatial dim, all in global
indices; a *window* is what the outputs of a slab read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hyperslab.errors import LayoutError
from hyperslab.geometry import Box, Window
from hyperslab.kernels.conv import RecomputedInput, conv_backward, conv_forward, conv_input
from hyperslab.kernels.conv_problem import ConvOptions, Kernels
from hyperslab.kernels.memory_format import (
    HaloPaddedBuffer,
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
from hyperslab.ops.slab_inputs import (
    GradientSum,
    JoinedInput,
    Operands,
    SlabInput,
    SlabWindows,
    versions_of,
)
from hyperslab.util.torch_internals import BlockFunction

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
    along those that are cut; ``padding`` is left to the operator. ``out`` is this rank's box of the
    output. ``run(block, weight, bias, source=...)`` convolves a block at once, with its graph.
    """

    input: SlabInput
    wanted: Box
    out: Box
    window: Window
    options: ConvOptions
    padding: tuple[int, ...]
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
        return conv_forward(window, weight, bias, self.options, self.padding, self.kernels)

    def whole(
        self,
        operands: Operands,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        source: RecomputedInput | None = None,
    ) -> torch.Tensor:
        """Convolves the block at once, with its graph."""
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
    norms = links.parameters
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
            dwindow, dw, db = conv_backward(
                g, window, weight, geometry.options, geometry.padding, needs, geometry.kernels
            )
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
        """Refuse to compute from operands that were changed in place since.

        Raises:
            LayoutError: they were, where no rule could see it.
        """
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
