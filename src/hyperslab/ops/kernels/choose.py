"""Which version of a kernel runs, by device, dtype and memory format: decided here alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch

from hyperslab.memory_format import CHANNELS_LAST
from hyperslab.ops.kernels.fused.compiled.library import library
from hyperslab.ops.kernels.windows.reference import MOST_TAPS

IM2COL = 20480  # below this batch * channels * rows torch 2.13 takes im2col in float32

AverageVersion = Literal["torch", "tiles"]
MaximumVersion = Literal["torch", "windows"]
MomentsVersion = Literal["torch", "cached"]
ResampleVersion = Literal["torch", "sparse"]


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


def maximum_version(x: torch.Tensor, kernel: Sequence[int], dilation: int) -> MaximumVersion:
    """``"windows"`` on the CPU: in contiguous memory torch's own takes 2.6 times as long (2.13).

    It also keeps a byte an element where torch keeps eight, and the input.
    """
    known = x.dtype in (torch.float32, torch.bfloat16, torch.float16) and x.dim() == 5
    plain = dilation == 1 and math.prod(kernel) <= MOST_TAPS
    return "windows" if device_kind(x) == "cpu" and known and plain and library() else "torch"


def resample_version(x: torch.Tensor) -> ResampleVersion:
    """``"sparse"`` on the CPU: torch's own takes several times as long, in float32 only (2.13)."""
    known = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return "sparse" if device_kind(x) == "cpu" and known and library() else "torch"


def cudnn_takes_last(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a convolution of ``x`` computes in channels last because it is on a GPU.

    cuDNN's kernels for half precision are written for that; contiguous operands are turned for
    every pass. In float32, TF32 or not, there are kernels for both: it is left to torch.
    """
    return (
        device_kind(x) == "cuda"
        and x.dim() in CHANNELS_LAST
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
    )


def is_traced() -> bool:
    """Whether a device is only chosen for, see `as_if_on`."""
    return _as_if.get() is not None


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
