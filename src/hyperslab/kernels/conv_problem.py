"""Describes one pass of a convolution over one shape, and the memory format it computes in.

`Problem` is all that the choice of an implementation depends on; then the rules by which a
convolution computes in channels last, and conversions to the format that it wants.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from hyperslab.kernels.memory_format import CHANNELS_LAST, dense, strides_in
from hyperslab.util.torch_internals import is_view

Kernels = Literal["measure", "fixed", "torch"]
"""How kernels are chosen: by the rule of `registry`, or as torch does.

``"measure"`` is a word of before measuring went; it means the same as ``"fixed"``.
"""

KERNELS: tuple[Kernels, ...] = ("measure", "fixed", "torch")

Task = Literal["forward", "input", "weight"]
"""The convolution, the gradient of its input, that of its weight."""


HEAVY_WEIGHT = 8  # times both volumes: a weight whose order in memory counts more than theirs
PROBLEMS = 4096

IM2COL = 20480  # up to this batch * channels * rows torch 2.13 takes im2col in float32

CACHES = (1 << 19, 1 << 20, 2 << 20, 4 << 20)
"""[B] Second-level caches: processors with AMX have the third, virtual machines say others."""

WINOGRAD_KERNEL = (3, 3, 3)
"""Extents of the windows that Winograd's filtering is for."""

WINOGRAD_DTYPES = (torch.float32, torch.bfloat16)


class ConvOptions(NamedTuple):
    """Holds what a convolution takes besides its tensors.

    ``output_padding``: of a transposed convolution; None for a plain one.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...] | None = None

    @property
    def aten_arguments(self) -> tuple[Any, ...]:
        """Returns them in the order in which torch's own operators take them."""
        more = self.output_padding
        transposed = (more is not None, more or [0] * len(self.padding))
        return self.stride, self.padding, self.dilation, *transposed, self.groups

    @property
    def margins(self) -> list[int]:
        """Returns the padding as ``F.pad`` takes it."""
        return [p for p in reversed(self.padding) for _ in range(2)]

    @property
    def without_padding(self) -> ConvOptions:
        return self._replace(padding=(0,) * len(self.padding))


def aten_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: ConvOptions
) -> torch.Tensor:
    """Convolves by torch's own operator, plain or transposed; differentiable."""
    return torch.convolution(x, weight, bias, *options.aten_arguments)


def aten_gradients(
    g: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    options: ConvOptions,
    needs: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Returns the gradients of `aten_convolution`, differentiable; None without ``needs``."""
    run = torch.ops.aten.convolution_backward.default
    return run(g, x, weight, [g.shape[1]], *options.aten_arguments, list(needs))


def kernel_exceeds_volume(weight: Sequence[int], x: Sequence[int], dtype: torch.dtype) -> bool:
    """Says if a kernel is larger than the volume in some dim, in bfloat16: see `guarded`."""
    if dtype != torch.bfloat16:
        return False
    return any(k > e for k, e in zip(weight[2:], x[2:], strict=True))


def _channel_blocks(channels: int, groups: int) -> set[int]:
    """Counts the blocks of 16 channels of a thread, for each number of threads that share them."""
    blocks = -(-channels // groups // 16)
    return {-(-blocks // threads) for threads in range(1, blocks + 1)}


def _whole(count: int, step: int) -> int:
    """Rounds up to whole steps."""
    return -(-count // step) * step


@dataclass(frozen=True)
class Problem:
    """Describes one pass of a convolution of one shape: the choice of its kernel depends on it.

    ``x``: the shape of its input (N, C, *extents); ``weight``: (out, C / groups, *kernel). A
    transposed convolution is the ``"input"`` pass of the convolution whose gradient it is, and its
    ``x`` is what that one makes.
    """

    task: Task
    x: tuple[int, ...]
    weight: tuple[int, ...]
    dtype: torch.dtype
    options: ConvOptions

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, each.name) for each in FIELDS))

    def __hash__(self) -> int:  # every pass of every step looks up its implementation
        return self._hash

    def __reduce__(self) -> Any:  # another process hashes strings otherwise
        return Problem, tuple(getattr(self, each.name) for each in FIELDS)

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.weight[2:]

    @property
    def padding(self) -> tuple[int, ...]:
        return self.options.padding

    @cached_property
    def y(self) -> tuple[int, ...]:
        steps = self._steps
        extents = ((e + 2 * p - d * (k - 1) - 1) // s + 1 for e, k, s, p, d in steps)
        return (self.x[0], self.weight[0], *extents)

    @property
    def _steps(self) -> Iterable[tuple[int, ...]]:
        """Yields extent, taps, stride, padding and dilation of each spatial dim."""
        return zip(self.x[2:], self.kernel, *self.options[:3], strict=True)

    @cached_property
    def left_over(self) -> tuple[int, ...]:
        """Counts the rows of ``x`` beyond all windows: a transposed one's output padding."""
        made = zip(self.y[2:], self._steps, strict=True)
        return tuple(e - ((y - 1) * s - 2 * p + d * (k - 1) + 1) for y, (e, k, s, p, d) in made)

    @cached_property
    def skips_lines(self) -> bool:
        """Says if windows of one channel leave out planes or rows between them, in float32.

        There oneDNN writes beyond its memory.
        """
        of_one = self.weight[1] == self.options.groups == 1 and self.dtype == torch.float32
        if self.task != "forward" or not of_one:
            return False
        return any(k < s for k, s in zip(self.kernel[:-1], self.options.stride[:-1], strict=True))

    @cached_property
    def hangs(self) -> bool:
        """Says if oneDNN's forward pass (3.12) may never end: it generates code for long rows.

        It does for 15 taps or more of a row and some 30 results, where at most 16 channels are
        each convolved by themselves in bfloat16 with AVX-512.
        """
        few = self.weight[:2] == (self.options.groups, 1) and 1 < self.options.groups <= 16
        long = self.kernel[-1] >= 15 and self.y[-1] >= 16
        return self.task == "forward" and self.dtype == torch.bfloat16 and few and long

    @cached_property
    def fills_tiles(self) -> bool:
        """Says if taps of a row or plane, by few channels, fill several tiles of registers.

        As of a patch of 16 voxels of four channels. With AMX oneDNN's forward pass (3.12) leaves
        some out where the channels are even: all rows, or planes of some extents. From 16 channels
        on it does so by some steps of three voxels or more.
        """
        channels = self.weight[1]
        few = channels < 16 or (channels < 32 and self.options.stride[-1] > 2)
        if self.task != "forward" or self.dtype != torch.bfloat16 or not few or channels % 2:
            return False
        rows = channels * self.kernel[-1], channels * math.prod(self.kernel[-2:])
        return any(numbers > 32 and numbers % 32 == 0 for numbers in rows)

    @cached_property
    def gaps(self) -> tuple[int, ...]:
        """Lists the dims but the last in which windows leave out lines, in bfloat16.

        With AMX oneDNN computes some wrong there, or crashes.
        """
        if self.task != "forward" or self.dtype != torch.bfloat16:
            return ()
        steps = zip(self.kernel[:-1], self.options.stride[:-1], strict=True)
        return tuple(dim for dim, (taps, step) in enumerate(steps) if taps < step)

    @cached_property
    def skips_voxels(self) -> bool:
        """Says if the weight's gradient reads single voxels some way apart.

        OneDNN writes beyond its memory where they have fewer channels than it works on at a time.
        """
        apart = max(self.options.stride) > max(self.kernel) == 1
        return self.task == "weight" and apart and not any(self.padding)

    @cached_property
    def planes_beyond(self) -> int:
        """Counts the last planes of ``x`` that no window reads: they get no gradient.

        With AMX oneDNN leaves them as they are, in bfloat16.
        """
        if self.task != "input" or self.dtype != torch.bfloat16:
            return 0
        return max(0, self.left_over[0] - self.padding[0])

    @cached_property
    def products(self) -> int:
        return self.y[0] * math.prod(self.y[2:]) * math.prod(self.weight)

    @cached_property
    def outreaches(self) -> bool:
        """Says if padding must be part of ``x``, see `guarded`.

        Where a window reads nothing but padding. Where the kernel is larger than the volume in
        bfloat16; for the weight's gradient in any type, and also where it is as large.
        """
        if not any(self.padding):
            return False
        if any(map(self._misses, range(len(self.kernel)))):
            return True
        if self.task == "weight":
            return any(k >= e for k, e in zip(self.kernel, self.x[2:], strict=True))
        return kernel_exceeds_volume(self.weight, self.x, self.dtype)

    def _misses(self, dim: int) -> bool:
        """Says if a window reads nothing but padding in a dim; one with dilation may step over."""
        stride, dilation = self.options.stride[dim], self.options.dilation[dim]
        extent, padding = self.x[dim + 2], self.padding[dim]
        last = self.y[dim + 2] - 1
        places = {*range(min(-(-padding // stride), last)), last}
        begins = [place * stride - padding for place in places]
        # The first tap that is not before the volume must be in it.
        taps = [(begin, max(0, -(begin // dilation))) for begin in begins]
        return any(
            tap >= self.kernel[dim] or begin + tap * dilation >= extent for begin, tap in taps
        )

    @cached_property
    def makes_lone_column(self) -> bool:
        """Says if one output in the last dim is made by a step of several voxels."""
        return self.y[-1] == 1 and self.options.stride[-1] > 1

    @cached_property
    def has_lone_column(self) -> bool:
        """Says if oneDNN's forward pass computes a lone column wrong.

        Of one channel it does in any type, of more in bfloat16 with AMX; there is
        one way for all processors, as a column is little work.
        """
        wrong = self.weight[1] == 1 or self.dtype == torch.bfloat16
        return self.task == "forward" and wrong and self.makes_lone_column

    @cached_property
    def weight_to_volumes(self) -> float:
        return math.prod(self.weight) / (math.prod(self.x) + math.prod(self.y))

    @property
    def heavy(self) -> bool:
        """Says if it is the weight whose order in memory counts; parameters are contiguous."""
        return self.weight_to_volumes > HEAVY_WEIGHT

    @cached_property
    def overruns_tiles(self) -> bool:
        """Says if oneDNN's weight gradient with AMX may write beyond its memory (3.12 to 3.14).

        It turns some rows of some planes of both volumes into a buffer that has as many rows of
        every plane, but counts rows from the volume's first. That is right where all rows fit, and
        does no harm where planes of the buffer that are not in use are behind.
        """
        if self.task != "weight" or self.dtype != torch.bfloat16 or len(self.kernel) != 3:
            return False
        inputs, outputs = (_channel_blocks(c, self.options.groups) for c in (self.x[1], self.y[1]))
        columns = {_whole(self.y[-1], lanes) for lanes in (2, 32)}
        cases = itertools.product(inputs, outputs, columns, CACHES)
        return not all(self._fits_tiles(*case) for case in cases)

    def _fits_tiles(self, inputs: int, outputs: int, columns: int, cache: int) -> bool:
        """Says if all rows fit, by how oneDNN cuts for so many blocks of channels a thread."""
        (depth, height, width), (planes, rows, _) = self.x[2:], self.y[2:]
        spans = [d * (k - 1) + 1 for k, d in zip(self.kernel, self.options.dilation, strict=True)]

        def most(steps: int, taps: int, in_bytes: int, out_bytes: int) -> int:
            free = 3 * cache // 5 - taps * in_bytes
            blocks = -(-steps // max(1, free // (in_bytes + out_bytes)))
            return -(-steps // blocks)

        stride = self.options.stride[2]
        in_row = 64 * inputs * stride * _whole(-(-(width + 2 * self.padding[2]) // stride), 32)
        out_row = 64 * outputs * columns
        some_rows = most(rows, self.kernel[1], in_row, out_row)
        some_planes = most(planes, self.kernel[0], in_row * depth, out_row * planes)
        in_rows = min(height, (some_rows - 1) * self.options.stride[1] + spans[1])
        in_planes = min(depth, (some_planes - 1) * self.options.stride[0] + spans[0])
        fits = (planes - some_planes + 1) * some_rows >= rows
        return fits and (depth - in_planes + 1) * in_rows >= height

    @cached_property
    def needs_guard(self) -> bool:
        """Says if oneDNN gets this pass wrong, see `guarded`."""
        voxels = self.has_lone_column or self.skips_lines or self.skips_voxels
        beyond = self.outreaches or self.planes_beyond > 0
        return voxels or beyond or self.fills_tiles or bool(self.gaps)

    def of(self, task: Task) -> Problem:
        return problem_for(task, self.x, self.weight, self.dtype, self.options)

    def but(self, **changes: Any) -> Problem:
        """Returns the pass with other fields, of its options too."""
        names = changes.keys() & {"stride", "padding", "dilation"}
        options = {name: changes.pop(name) for name in names}
        if options:
            changes["options"] = self.options._replace(**options)
        return problem_for(*(changes.get(each.name, getattr(self, each.name)) for each in FIELDS))

    @cached_property
    def padded(self) -> Problem:
        """Returns the same pass with the padding as a part of ``x``."""
        pairs = zip(self.x[2:], self.padding, strict=True)
        x = (*self.x[:2], *(e + 2 * p for e, p in pairs))
        return self.but(x=x, options=self.options.without_padding)

    @cached_property
    def turned(self) -> Problem:
        """Returns the same pass in three dims with depth and height exchanged."""

        def swapped(sizes: tuple[int, ...]) -> tuple[int, ...]:
            *before, depth, height, width = sizes
            return (*before, height, depth, width)

        stride, padding, dilation = map(swapped, self.options[:3])
        options = {"stride": stride, "padding": padding, "dilation": dilation}
        return self.but(x=swapped(self.x), weight=swapped(self.weight), **options)

    @cached_property
    def with_empty_channel(self) -> Problem:
        """Returns the pass over one more channel, in every group."""
        x = (self.x[0], self.x[1] + self.options.groups, *self.x[2:])
        return self.but(x=x, weight=(self.weight[0], self.weight[1] + 1, *self.weight[2:]))

    @cached_property
    def of_lines_read(self) -> Problem:
        """Returns the pass over only those planes and rows that are read, see `lines_read`."""
        x = list(self.x)
        stride, padding, dilation = map(list, self.options[:3])
        for dim in self.gaps:
            x[dim + 2] = self.kernel[dim] * self.y[dim + 2]
            stride[dim], padding[dim], dilation[dim] = self.kernel[dim], 0, 1
        options = {"stride": tuple(stride), "padding": tuple(padding), "dilation": tuple(dilation)}
        return self.but(x=tuple(x), **options)

    def lines_read(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the planes and rows that windows read, one window after the other: see `gaps`."""
        last = x.movedim(1, -1)
        for dim in self.gaps:
            if self.padding[dim]:
                margins = [0, 0] * (len(self.kernel) - dim) + [self.padding[dim]] * 2
                last = F.pad(last, margins)
            starts = torch.arange(self.y[dim + 2], device=x.device) * self.options.stride[dim]
            taps = torch.arange(self.kernel[dim], device=x.device) * self.options.dilation[dim]
            last = last.index_select(dim + 1, (starts.unsqueeze(1) + taps).flatten())
        return in_channels_last(last.movedim(-1, 1))

    @cached_property
    def of_voxels_read(self) -> Problem:
        """Returns the pass over only those voxels that are read, see `skips_voxels`."""
        one = (1,) * len(self.kernel)
        return self.but(x=(*self.x[:2], *self.y[2:]), stride=one, dilation=one)

    @cached_property
    def in_steps_of_one(self) -> Problem:
        """Returns the pass without stride in the last dim: its one output is the first one now."""
        return self.but(stride=(*self.options.stride[:-1], 1))


FIELDS = fields(Problem)

problem_for = functools.lru_cache(PROBLEMS)(Problem)
"""One object for each problem, with what was worked out for it."""


def torch_uses_im2col(x: Sequence[int], weight: Sequence[int], options: ConvOptions) -> bool:
    """Says if torch (2.13) convolves a volume of float32 on the CPU without oneDNN.

    By the shapes of the whole input and of the weight, transposed or not. The result is then
    contiguous, whatever its operands are.
    """
    if len(x) != 5:
        return False
    batch = x[0]
    steps = {*options.stride, *options.dilation}
    lines = weight[-1] == weight[-2] == 1 and steps == {1} and batch < 16
    narrow = min(weight[-2:]) <= 3 and options.groups == 1
    small = batch <= 1 and math.prod(x[:4]) <= IM2COL
    return (narrow and small) or (lines and torch.get_num_threads() == 1)


def in_channels_last(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` channels last, with the strides that say so also where an extent is one."""
    last = CHANNELS_LAST[x.dim()]
    if x.stride() == strides_in(x.shape, last):  # nearly always
        return x
    if x.is_contiguous(memory_format=last):
        return dense(x, last)
    return torch.ops.hyperslab.reorder(x, True, x.dtype)


def in_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_contiguous() else torch.ops.hyperslab.reorder(x, False, x.dtype)


def no_view(x: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as a tensor of its own, which autograd lets a user change in place.

    What a `torch.autograd.Function` returns must be one.
    """
    return x.data if is_view(x) else x
