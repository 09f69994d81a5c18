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

from hyperslab.kernels import registry
from hyperslab.kernels.memory_format import CHANNELS_LAST, dense
from hyperslab.util.torch_internals import onednn_enabled, onednn_has_bfloat16

Kernels = Literal["measure", "fixed", "torch"]
"""How kernels are chosen: by measurement, by a rule from the shapes alone, or as torch does."""

KERNELS: tuple[Kernels, ...] = ("measure", "fixed", "torch")

Task = Literal["forward", "input", "weight"]
"""The convolution, the gradient of its input, that of its weight."""


HEAVY = 8  # times as large as both volumes: a weight whose order in memory counts more than theirs
PROBLEMS = 4096


@dataclass(frozen=True, slots=True)
class ConvOptions:
    """What a convolution takes besides its tensors and its padding."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def kernel_exceeds_volume(weight: Sequence[int], x: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether a kernel is larger than the volume in some dim, in bfloat16: see `guards`."""
    if dtype != torch.bfloat16:
        return False
    return any(k > e for k, e in zip(weight[2:], x[2:], strict=True))


@dataclass(frozen=True)
class Problem:
    """One pass of a convolution of one shape: what the choice of its kernel depends on.

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
    def text(self) -> str:
        """In words that are the same in every process."""
        shapes = (list(v) for v in (self.x, self.weight, self.padding))
        return f"{self.task} {' '.join(map(str, shapes))} {self.dtype} {self.options}"

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.weight[2:]

    @cached_property
    def y(self) -> tuple[int, ...]:
        """The shape of what the convolution makes."""
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
        """Rows at the end of ``x`` that no window reaches: a transposed one's output padding."""
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
        """Multiplications of two numbers."""
        return self.y[0] * math.prod(self.y[2:]) * math.prod(self.weight)

    @cached_property
    def outreaches(self) -> bool:
        """Whether padding must be part of ``x``, see `guards`.

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
        """Whether one output in the last dim is made of one channel by a step of several voxels."""
        one = self.y[-1] == 1 and self.weight[1] == 1
        return self.task == "forward" and one and self.options.stride[-1] > 1

    @cached_property
    def heavy(self) -> bool:
        """Whether the weight is much larger than the volumes.

        Then it is the weight whose order in memory counts, and parameters are contiguous.
        """
        return math.prod(self.weight) > HEAVY * (math.prod(self.x) + math.prod(self.y))

    def of(self, task: Task) -> Problem:
        """Another pass of the same convolution."""
        return problem_for(task, self.x, self.weight, self.dtype, self.options, self.padding)

    def padded(self) -> Problem:
        """The same pass where the padding is part of ``x``."""
        pairs = zip(self.x[2:], self.padding, strict=True)
        x = (*self.x[:2], *(e + 2 * p for e, p in pairs))
        zero = (0,) * len(self.padding)
        return problem_for(self.task, x, self.weight, self.dtype, self.options, zero)

    def in_steps_of_one(self) -> Problem:
        """With no stride in the last dim: where there was one output it is the first one now."""
        options = replace(self.options, stride=(*self.options.stride[:-1], 1))
        return problem_for(self.task, self.x, self.weight, self.dtype, options, self.padding)


problem_for = functools.lru_cache(PROBLEMS)(Problem)
"""One object for each problem, with what was worked out for it."""


assert registry  # registers the operator reorder


def computes_last(x: torch.Tensor, weight: torch.Tensor, kernels: Kernels) -> bool:
    """Whether a convolution of ``x`` computes, and returns its result, in channels last.

    On the CPU wherever oneDNN computes it: in channels last it is faster in all three passes,
    conversions of the first layer's few channels included, and needs no copy of its operands. It
    depends on nothing in which ranks of one grid could differ.
    """
    return (
        kernels != "torch"
        and x.dtype == weight.dtype
        and x.dim() in CHANNELS_LAST
        and registry.device_kind(x) == "cpu"
        and weight.device == x.device
        and onednn_enabled()
        and onednn_supports(x.dtype)
    )


def torch_uses_im2col(x: Sequence[int], weight: Sequence[int], options: ConvOptions) -> bool:
    """Whether torch (2.13) convolves a volume of float32 on the CPU without oneDNN.

    By the shapes of the whole input and of the weight, transposed or not. The result is then
    contiguous, whatever its operands are.
    """
    if len(x) != 5:
        return False
    batch = x[0]
    steps = {*options.stride, *options.dilation}
    lines = weight[-1] == weight[-2] == 1 and steps == {1} and batch < 16
    narrow = min(weight[-2:]) <= 3 and options.groups == 1
    small = batch <= 1 and math.prod(x[:4]) <= registry.IM2COL
    return (narrow and small) or (lines and torch.get_num_threads() == 1)


@functools.cache
def onednn_supports(dtype: torch.dtype) -> bool:
    """Whether oneDNN convolves in this type on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return onednn_has_bfloat16()
    return dtype == torch.float32


def in_channels_last(x: torch.Tensor) -> torch.Tensor:
    """``x`` channels last, with the strides that say so also where an extent is one."""
    last = CHANNELS_LAST[x.dim()]
    if x.is_contiguous(memory_format=last):
        return dense(x, last)
    return torch.ops.hyperslab.reorder(x, True, x.dtype)


def in_preferred_format(x: torch.Tensor, weight: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """``x`` in the format in which the device's own convolution computes; differentiable."""
    if kernels == "torch" or not registry.cudnn_takes_last(x, weight):
        return x
    return x.contiguous(memory_format=CHANNELS_LAST[x.dim()])


def in_contiguous(x: torch.Tensor) -> torch.Tensor:
    """``x`` contiguous."""
    return x if x.is_contiguous() else torch.ops.hyperslab.reorder(x, False, x.dtype)


def no_view(x: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of its own, which autograd lets a user change in place.

    What a `torch.autograd.Function` returns must be one.
    """
    return x.data if x._is_view() else x
