"""Describes one pass of a convolution over one shape, and the memory format it computes in.

`Problem` is all that the choice of an implementation depends on; then the rules by which a
convolution computes in channels last, and conversions to the format that it wants.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from hyperslab.kernels.memory_format import CHANNELS_LAST, dense
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

WINOGRAD_KERNEL = (3, 3, 3)
"""Extents of the windows that Winograd's filtering is for."""

WINOGRAD_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class ConvOptions:
    """Holds what a convolution takes besides its tensors and its padding.

    ``output_padding``: of a transposed convolution; None for a plain one.
    """

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...] | None = None


def aten_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: ConvOptions,
    padding: Sequence[int],
) -> torch.Tensor:
    """Convolves by torch's own operator, plain or transposed; differentiable."""
    return torch.convolution(
        x,
        weight,
        bias,
        options.stride,
        padding,
        options.dilation,
        options.output_padding is not None,
        options.output_padding or [0] * len(padding),
        options.groups,
    )


def aten_gradients(
    g: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    options: ConvOptions,
    padding: Sequence[int],
    needs: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Returns the gradients of `aten_convolution`, differentiable; None without ``needs``."""
    return torch.ops.aten.convolution_backward.default(
        g,
        x,
        weight,
        [g.shape[1]],
        options.stride,
        padding,
        options.dilation,
        options.output_padding is not None,
        options.output_padding or [0] * len(padding),
        options.groups,
        list(needs),
    )


def kernel_exceeds_volume(weight: Sequence[int], x: Sequence[int], dtype: torch.dtype) -> bool:
    """Says if a kernel is larger than the volume in some dim, in bfloat16: see `guarded`."""
    if dtype != torch.bfloat16:
        return False
    return any(k > e for k, e in zip(weight[2:], x[2:], strict=True))


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
    padding: tuple[int, ...]

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.weight[2:]

    @cached_property
    def y(self) -> tuple[int, ...]:
        steps = zip(
            self.x[2:],
            self.kernel,
            self.options.stride,
            self.padding,
            self.options.dilation,
            strict=True,
        )
        extents = ((e + 2 * p - d * (k - 1) - 1) // s + 1 for e, k, s, p, d in steps)
        return (self.x[0], self.weight[0], *extents)

    @cached_property
    def left_over(self) -> tuple[int, ...]:
        """Counts the rows of ``x`` beyond all windows: a transposed one's output padding."""
        steps = zip(
            self.x[2:],
            self.y[2:],
            self.kernel,
            self.options.stride,
            self.padding,
            self.options.dilation,
            strict=True,
        )
        return tuple(e - ((y - 1) * s - 2 * p + d * (k - 1) + 1) for e, y, k, s, p, d in steps)

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
        steps = zip(self.kernel, self.padding, self.options.dilation, strict=True)
        if any(p > d * (k - 1) for k, p, d in steps):
            return True
        if self.task == "weight":
            return any(k >= e for k, e in zip(self.kernel, self.x[2:], strict=True))
        return kernel_exceeds_volume(self.weight, self.x, self.dtype)

    @cached_property
    def has_lone_column(self) -> bool:
        """Says if one output in the last dim is made of one channel by a step of several voxels."""
        one = self.y[-1] == 1 and self.weight[1] == 1
        return self.task == "forward" and one and self.options.stride[-1] > 1

    @cached_property
    def weight_to_volumes(self) -> float:
        return math.prod(self.weight) / (math.prod(self.x) + math.prod(self.y))

    @property
    def heavy(self) -> bool:
        """Says if it is the weight whose order in memory counts; parameters are contiguous."""
        return self.weight_to_volumes > HEAVY_WEIGHT

    def of(self, task: Task) -> Problem:
        return problem_for(task, self.x, self.weight, self.dtype, self.options, self.padding)

    def padded(self) -> Problem:
        """Returns the same pass with the padding as a part of ``x``."""
        pairs = zip(self.x[2:], self.padding, strict=True)
        x = (*self.x[:2], *(e + 2 * p for e, p in pairs))
        zero = (0,) * len(self.padding)
        return problem_for(self.task, x, self.weight, self.dtype, self.options, zero)

    def in_steps_of_one(self) -> Problem:
        """Returns the pass without stride in the last dim: its one output is the first one now."""
        options = replace(self.options, stride=(*self.options.stride[:-1], 1))
        return problem_for(self.task, self.x, self.weight, self.dtype, options, self.padding)


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
