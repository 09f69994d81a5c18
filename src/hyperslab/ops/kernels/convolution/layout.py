"""The memory format in which a convolution computes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from hyperslab.memory_format import CHANNELS_LAST, dense
from hyperslab.ops.kernels import choose, fused
from hyperslab.ops.kernels.convolution.options import ConvOptions, Kernels

assert fused  # registers the operator reorder


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
        and choose.device_kind(x) == "cpu"
        and weight.device == x.device
        and torch._C._get_mkldnn_enabled()
        and onednn_has(x.dtype)
    )


def torch_makes_columns(x: Sequence[int], weight: Sequence[int], options: ConvOptions) -> bool:
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
    small = batch <= 1 and math.prod(x[:4]) <= choose.IM2COL
    return (narrow and small) or (lines and torch.get_num_threads() == 1)


@functools.cache
def onednn_has(dtype: torch.dtype) -> bool:
    """Whether oneDNN convolves in this type on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def in_channels_last(x: torch.Tensor) -> torch.Tensor:
    """``x`` channels last, with the strides that say so also where an extent is one."""
    last = CHANNELS_LAST[x.dim()]
    if x.is_contiguous(memory_format=last):
        return dense(x, last)
    return torch.ops.hyperslab.reorder(x, True, x.dtype)


def as_wanted(x: torch.Tensor, weight: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """``x`` in the format in which the device's own convolution computes; differentiable."""
    if kernels == "torch" or not choose.cudnn_takes_last(x, weight):
        return x
    return x.contiguous(memory_format=CHANNELS_LAST[x.dim()])


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` contiguous."""
    return x if x.is_contiguous() else torch.ops.hyperslab.reorder(x, False, x.dtype)


def no_view(x: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of its own, which autograd lets a user change in place.

    What a `torch.autograd.Function` returns must be one.
    """
    return x.data if x._is_view() else x
