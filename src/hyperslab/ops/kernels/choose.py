"""Which version of a kernel runs, by device, dtype and memory format: decided here alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch

from hyperslab.ops.kernels.fused.compiled.library import library
from hyperslab.ops.kernels.windows.reference import MOST_TAPS

IM2COL = 20480  # below this batch * channels * rows torch 2.13 takes im2col in float32

ConvolutionVersion = Literal["torch", "onednn", "padded"]
AverageVersion = Literal["torch", "tiles"]
MaximumVersion = Literal["torch", "windows"]
MomentsVersion = Literal["torch", "cached"]


_as_if: ContextVar[str | None] = ContextVar("as_if", default=None)


@contextmanager
def as_if_on(kind: str) -> Iterator[None]:
    """Choose as on this kind of device, wherever the tensors are: to trace what it would run."""
    token = _as_if.set(kind)
    try:
        yield
    finally:
        _as_if.reset(token)


def device_kind(x: torch.Tensor) -> str:
    """The kind of device for which versions are chosen: ``x``'s, but for `as_if_on`."""
    return _as_if.get() or x.device.type


def convolution_version(x: torch.Tensor, weight: torch.Tensor) -> ConvolutionVersion:
    """``"onednn"`` names the library instead of leaving the choice to torch.

    For a small input torch takes im2col however many channels come out: two to five times slower
    on the blocks and slabs of a cut volume.
    """
    small = (
        device_kind(x) == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.dim() in (4, 5)
        and x.numel() > 0
        and x.shape[:4].numel() <= IM2COL
        and x.is_contiguous()
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
    )
    return "onednn" if small else "torch"


def differentiable_version(x: torch.Tensor, weight: torch.Tensor) -> ConvolutionVersion:
    """``"padded"`` where the kernel is larger than the volume in some dim.

    There the weight gradient of oneDNN (3.12) in bfloat16 reads, and sometimes writes, foreign
    memory unless the padding is part of ``x``: garbage or NaN, also in a plain torch convolution.
    """
    larger = any(k > e for k, e in zip(weight.shape[2:], x.shape[2:], strict=True))
    broken = larger and device_kind(x) == "cpu" and x.dtype == torch.bfloat16
    return "padded" if broken else "torch"


def gradient_version(
    x: torch.Tensor, weight: torch.Tensor, *, of_weight: bool, with_graph: bool
) -> ConvolutionVersion:
    """As for the two forward passes; the gradients that oneDNN is asked for have no graph."""
    if of_weight and differentiable_version(x, weight) == "padded":
        return "padded"
    return "torch" if with_graph else convolution_version(x, weight)


def maximum_version(x: torch.Tensor, kernel: Sequence[int], dilation: int) -> MaximumVersion:
    """``"windows"`` on the CPU: in contiguous memory torch's own takes 2.6 times as long (2.13).

    It also keeps a byte an element where torch keeps eight, and the input.
    """
    known = x.dtype in (torch.float32, torch.bfloat16, torch.float16) and x.dim() == 5
    plain = dilation == 1 and math.prod(kernel) <= MOST_TAPS
    return "windows" if device_kind(x) == "cpu" and known and plain and library() else "torch"


def average_version(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int]
) -> AverageVersion:
    """``"tiles"`` where windows tile the block and the result has torch's dtype.

    On the CPU torch's own takes three times as long (2.13).
    """
    kind = device_kind(x)
    autocast = torch.is_autocast_enabled(x.device.type)
    widened = x.dtype == torch.bfloat16 and x.dim() == 5 and autocast  # avg_pool3d only
    tiled = (
        kind == "cpu"
        and (x.dtype in (torch.float32, torch.float64) or widened)
        and x.is_contiguous()
        and list(kernel) == list(stride)
        and all(extent % k == 0 for extent, k in zip(x.shape[2:], kernel, strict=True))
    )
    return "tiles" if tiled else "torch"


def moments_version(x: torch.Tensor) -> MomentsVersion:
    """``"cached"`` on the CPU, where `torch.var_mean` takes eight times as long."""
    return "cached" if device_kind(x) == "cpu" else "torch"
