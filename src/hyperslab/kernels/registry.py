"""Declares the operators to torch and chooses the version of a kernel by device, dtype and format.

An operator is declared once, as a `KernelOperator`: its schema, its plain reference, its form
on the meta device (so that a step can be traced) and its compiled version for the CPU.
Registration goes to the dispatcher by `torch.library.Library`: plain functions, without the
checks that `torch.library.custom_op` makes at every call. On a CUDA device Triton's version
runs, where Triton is installed (PyTorch for CUDA brings it); it is imported at the first call.

In reading order: forms on the meta device, declarations, Triton's versions, and the rules that
choose between torch's own operators and ours. Importing this module registers all operators.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch

from hyperslab.kernels import (
    direct_bf16,
    epilogue,
    max_pool,
    normalization,
    reorder,
    resample,
    winograd,
)
from hyperslab.kernels import reorder as transposition
from hyperslab.kernels.compile import library
from hyperslab.kernels.max_pool import MOST_TAPS
from hyperslab.kernels.memory_format import (
    CHANNELS_LAST,
    bit_bytes,
    memory_format_by_strides,
    pooled_shape,
    winner_bytes,
)
from hyperslab.kernels.reorder import wanted_format


def channel_sums_form(x: torch.Tensor, groups: int) -> torch.Tensor:
    slices = x.shape[0] * groups if groups else x.shape[1]
    return x.new_empty((3, slices), dtype=torch.float64)


def chain_forward_form(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    mark: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    nbytes = bit_bytes(x.shape, slope, norm is not None) + winner_bytes(x.shape, pool, maximum)
    y = torch.empty(
        pooled_shape(x.shape, pool),
        dtype=dtype,
        device=x.device,
        memory_format=memory_format_by_strides(x),
    )
    return y, x.new_empty(nbytes if mark else 0, dtype=torch.uint8)


def chain_forward_into_form(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    mark: bool,
    y: torch.Tensor,
) -> torch.Tensor:
    return chain_forward_form(x, norm, slope, pool, maximum, mark, y.dtype)[1]


def chain_backward_sums_form(
    g: torch.Tensor,
    marks: torch.Tensor,
    x: torch.Tensor,
    norm: torch.Tensor,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
) -> torch.Tensor:
    return x.new_empty((2, *norm.shape[1:]), dtype=torch.float64)


def chain_backward_form(
    g: torch.Tensor,
    marks: torch.Tensor,
    x: torch.Tensor | None,
    norm: torch.Tensor | None,
    through: torch.Tensor | None,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    memory_format = memory_format_by_strides(g if x is None else x)
    return torch.empty(list(shape), dtype=dtype, device=g.device, memory_format=memory_format)


def normalisation_form(
    sums: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    count: int,
    eps: float,
    channels: int,
    pool: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = sums.shape[1] * pool // channels
    norm = sums.new_empty((3, rows, channels), dtype=torch.float32)
    return norm, sums.new_empty((4, rows, channels))


def parameter_gradients_form(
    sums: torch.Tensor, norm: torch.Tensor, moments: torch.Tensor, pool: int
) -> tuple[torch.Tensor, torch.Tensor]:
    _, rows, channels = sums.shape
    parameters = sums.new_empty((2, channels), dtype=torch.float32)
    return parameters, sums.new_empty((2, rows * channels // pool))


def through_statistics_form(
    shared: torch.Tensor, norm: torch.Tensor, moments: torch.Tensor, count: int, pool: int
) -> torch.Tensor:
    return norm.new_empty((2, *norm.shape[1:]))


def reorder_into_form(x: torch.Tensor, y: torch.Tensor) -> None:
    return


def reorder_form(x: torch.Tensor, channels_last: bool, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=wanted_format(x, channels_last))


@dataclass(frozen=True, slots=True)
class KernelOperator:
    """One of them, by its schema.

    ``form`` gives shapes and strides on the meta device, ``compiled`` runs on the CPU, and
    ``reference`` everywhere else; ``on_gpu``: there is a version for GPUs.
    """

    schema: str
    reference: Callable[..., Any]
    form: Callable[..., Any]
    compiled: Callable[..., Any]
    on_gpu: bool = True

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


FUSED_OPERATORS = (
    KernelOperator(
        # (3, K) in float64, of which parts and ranks each have their own, to be added up: the sum
        # of x, its square by the number of values, and the sum of squares around their mean.
        # groups 0: K = C, over batch and space; else K = N * groups, over space and the channels of
        # a group.
        "channel_sums(Tensor x, int groups) -> Tensor",
        epilogue.channel_sums_reference,
        channel_sums_form,
        epilogue.compiled_channel_sums,
    ),
    KernelOperator(
        # y in `dtype` and in x's memory format, and its marks (uint8; empty without `mark`).
        # norm: (3, 1 or N, C), mean, scale and shift. Computed in float32, of float64 in float64.
        "chain_forward(Tensor x, Tensor? norm, float slope, int[] pool, bool maximum, bool mark, "
        "ScalarType dtype) -> (Tensor, Tensor)",
        epilogue.chain_forward_reference,
        chain_forward_form,
        epilogue.compiled_chain_forward,
    ),
    KernelOperator(
        # The same into `y`, of the result's shape and memory format; the marks.
        "chain_forward_into(Tensor x, Tensor? norm, float slope, int[] pool, bool maximum, "
        "bool mark, Tensor(a!) y) -> Tensor",
        epilogue.chain_forward_into_reference,
        chain_forward_into_form,
        epilogue.compiled_chain_forward_into,
        on_gpu=False,
    ),
    KernelOperator(
        # (2, 1 or N, C) as norm, in float64: sums of du and of du * (x - mean). g: gradient of y.
        # marks: winners or nothing.
        "chain_backward_sums(Tensor g, Tensor marks, Tensor x, Tensor norm, float slope, "
        "int[] pool, bool maximum) -> Tensor",
        epilogue.chain_backward_sums_reference,
        chain_backward_sums_form,
        epilogue.compiled_chain_backward_sums,
    ),
    KernelOperator(
        # scale * du + b * (x - mean) + c, of x's `shape`, in `dtype` and x's memory format; without
        # x in g's, which must then be that of the forward pass, by its strides. through: (2, 1 or
        # N, C), b and c; without it scale * du, and without norm du.
        "chain_backward(Tensor g, Tensor marks, Tensor? x, Tensor? norm, Tensor? through, "
        "float slope, int[] pool, bool maximum, int[] shape, ScalarType dtype) -> Tensor",
        epilogue.chain_backward_reference,
        chain_backward_form,
        epilogue.compiled_chain_backward,
    ),
    KernelOperator(
        # norm (3, R, C) in float32 and moments (4, R, C) of sums (3, R * C / pool) over `count`
        # values; weight, bias: (C) in float32.
        "normalisation(Tensor sums, Tensor? weight, Tensor? bias, int count, float eps, "
        "int channels, int pool) -> (Tensor, Tensor)",
        normalization.normalisation,
        normalisation_form,
        normalization.compiled_normalisation,
    ),
    KernelOperator(
        # Gradients of weight and bias (2, C) in float32, and (2, R * C / pool) in float64, of
        # which the next one takes the sum over all ranks; from the sums of a backward pass.
        "parameter_gradients(Tensor sums, Tensor norm, Tensor moments, int pool) "
        "-> (Tensor, Tensor)",
        normalization.parameter_gradients,
        parameter_gradients_form,
        normalization.compiled_parameter_gradients,
    ),
    KernelOperator(
        # What `chain_backward` takes: (2, R, C) in float32.
        "through_statistics(Tensor shared, Tensor norm, Tensor moments, int count, int pool) "
        "-> Tensor",
        normalization.through_statistics,
        through_statistics_form,
        normalization.compiled_through_statistics,
    ),
    KernelOperator(
        "reorder(Tensor x, bool channels_last, ScalarType dtype) -> Tensor",
        reorder.reorder_reference,
        reorder_form,
        transposition.compiled_reorder,
    ),
    KernelOperator(
        # The values of x in the type and memory format of `y`.
        "reorder_into(Tensor x, Tensor(a!) y) -> ()",
        reorder.reorder_into_reference,
        reorder_into_form,
        transposition.compiled_reorder_into,
        on_gpu=False,
    ),
)


def register_operators(
    operators: Sequence[KernelOperator], kind: Literal["DEF", "FRAGMENT"] = "FRAGMENT"
) -> torch.library.Library:
    """Make operators known to torch for as long as the returned library lives."""
    library = torch.library.Library("hyperslab", kind)
    for operator in operators:
        library.define(operator.schema)
        library.impl(operator.name, operator.reference, "CompositeExplicitAutograd")
        library.impl(operator.name, operator.form, "Meta")
        library.impl(operator.name, operator.compiled, "CPU")
    return library


FUSED_LIBRARY = register_operators(FUSED_OPERATORS, "DEF")
"""Keeps the registration alive; others add versions for their device by another ``Library``."""


TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types of blocks that the kernels take; of others the reference runs."""


@cache
def triton_versions() -> dict[str, Callable[..., Any]]:
    """By the operator's name."""
    from hyperslab.kernels.cuda import epilogue, normalization, reorder

    return {
        "channel_sums": epilogue.triton_channel_sums,
        "chain_forward": epilogue.triton_chain_forward,
        "chain_backward_sums": epilogue.triton_chain_backward_sums,
        "chain_backward": epilogue.triton_chain_backward,
        "normalisation": normalization.triton_normalisation,
        "parameter_gradients": normalization.triton_parameter_gradients,
        "through_statistics": normalization.triton_through_statistics,
        "reorder": reorder.triton_reorder,
    }


def _triton_version(operator: KernelOperator) -> Callable[..., Any]:
    def run(block: torch.Tensor, *rest: Any) -> Any:
        others = [value for value in rest if isinstance(value, torch.Tensor | torch.dtype)]
        types = {value if isinstance(value, torch.dtype) else value.dtype for value in others}
        if not {block.dtype, *types} <= {*TRITON_DTYPES, torch.uint8}:
            return operator.reference(block, *rest)
        with torch.cuda.device(block.device):  # Triton starts its kernels on the current one
            return triton_versions()[operator.name](block, *rest)

    return run


def _register_triton() -> torch.library.Library | None:
    if importlib.util.find_spec("triton") is None:
        return None
    library = torch.library.Library("hyperslab", "IMPL")
    for operator in (operator for operator in FUSED_OPERATORS if operator.on_gpu):
        library.impl(operator.name, _triton_version(operator), "CUDA")
    return library


CUDA_LIBRARY = _register_triton()
"""Keeps the registration alive; None without Triton."""


def resample_form(
    x: torch.Tensor, maps: Sequence[torch.Tensor], extents: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    shape = (*x.shape[:2], *extents)
    return torch.empty(
        shape, dtype=dtype, device=x.device, memory_format=memory_format_by_strides(x)
    )


RESAMPLE = KernelOperator(
    # y (N, C, *extents) in `dtype` and in x's memory format; summed in float32, of float64 in
    # float64. maps: begin, source (int64) and weight (float32) of a `SparseMap` for each dim.
    "resample(Tensor x, Tensor[] maps, int[] extents, ScalarType dtype) -> Tensor",
    resample.resample_by_dims,
    resample_form,
    resample.compiled_resample,
)


RESAMPLE_LIBRARY = register_operators((RESAMPLE,))
"""Keeps the registration alive."""


def window_maximum_form(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    extents: Sequence[int],
    mark: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:2], *extents)
    y = torch.empty(shape, dtype=dtype, device=x.device, memory_format=memory_format_by_strides(x))
    return y, torch.empty_like(y, dtype=torch.uint8) if mark else y.new_empty(0, dtype=torch.uint8)


def window_maximum_backward_form(
    g: torch.Tensor,
    winners: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    shape: Sequence[int],
    channels_last: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    memory_format = CHANNELS_LAST[len(shape)] if channels_last else torch.contiguous_format
    return torch.empty(list(shape), dtype=dtype, device=g.device, memory_format=memory_format)


WINDOW_OPERATORS = (
    KernelOperator(
        # y (N, C, *extents) in `dtype` and in x's memory format, and its winners (uint8, as y;
        # empty without `mark`). Window o begins at o * stride - padding; what lies beyond the
        # block is left out. Every window meets the block.
        "window_maximum(Tensor x, int[] kernel, int[] stride, int[] padding, int[] extents, "
        "bool mark, ScalarType dtype) -> (Tensor, Tensor)",
        max_pool.window_maximum,
        window_maximum_form,
        max_pool.compiled_window_maximum,
    ),
    KernelOperator(
        # dx of x's `shape`, in `dtype` and in the memory format that is told; summed in float32,
        # of float64 in float64. g: gradient of y.
        "window_maximum_backward(Tensor g, Tensor winners, int[] kernel, int[] stride, "
        "int[] padding, int[] shape, bool channels_last, ScalarType dtype) -> Tensor",
        max_pool.window_maximum_backward,
        window_maximum_backward_form,
        max_pool.compiled_window_maximum_backward,
    ),
)


WINDOW_LIBRARY = register_operators(WINDOW_OPERATORS)
"""Keeps the registration alive."""


def direct_convolution_form(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: Sequence[int],
    adjoint: bool,
) -> torch.Tensor:
    steps = zip(x.shape[2:], weight.shape[2:], padding, strict=True)
    extents = (e + 2 * p - k + 1 for e, k, p in steps)
    shape = (x.shape[0], weight.shape[1 if adjoint else 0], *extents)
    return x.new_empty(shape).contiguous(memory_format=CHANNELS_LAST[x.dim()])


def direct_convolution_gradient_form(
    x: torch.Tensor,
    g: torch.Tensor,
    kernel: Sequence[int],
    padding: Sequence[int],
    with_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    dw = x.new_empty((g.shape[1], x.shape[1], *kernel))
    return dw, g.new_empty(g.shape[1] if with_bias else 0)


DIRECT_OPERATORS = (
    KernelOperator(
        # y, channels last, in x's dtype; summed in float32. Windows go in steps of one and begin
        # at -padding. weight (out, C, *kernel); adjoint: (C, out, *kernel), turned round, which
        # with a padding of kernel - 1 - p is the gradient of the input of a convolution with p.
        "direct_convolution(Tensor x, Tensor weight, Tensor? bias, int[] padding, bool adjoint) "
        "-> Tensor",
        direct_bf16.direct_convolution,
        direct_convolution_form,
        direct_bf16.compiled_direct_convolution,
    ),
    KernelOperator(
        # The gradients of weight (out, C, *kernel), contiguous, and of the bias (empty without
        # `with_bias`). g: gradient of y.
        "direct_convolution_gradient(Tensor x, Tensor g, int[] kernel, int[] padding, "
        "bool with_bias) -> (Tensor, Tensor)",
        direct_bf16.direct_convolution_gradient,
        direct_convolution_gradient_form,
        direct_bf16.compiled_direct_convolution_gradient,
    ),
)


DIRECT_LIBRARY = register_operators(DIRECT_OPERATORS)
"""Keeps the registration alive."""


def winograd_gradient_form(
    x: torch.Tensor, g: torch.Tensor, padding: Sequence[int], with_bias: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dw = x.new_empty((g.shape[1], x.shape[1], *winograd.WINOGRAD_KERNEL))
    return dw, g.new_empty(g.shape[1] if with_bias else 0)


WINOGRAD_OPERATORS = (
    KernelOperator(
        # The gradients of weight (out, C, 3, 3, 3), contiguous, and of the bias (empty without
        # `with_bias`), in x's dtype; summed in float32. Windows go in steps of one and begin at
        # -padding. g: gradient of the result.
        "winograd_gradient(Tensor x, Tensor g, int[] padding, bool with_bias) -> (Tensor, Tensor)",
        winograd.winograd_gradient,
        winograd_gradient_form,
        winograd.compiled_winograd_gradient,
    ),
)

WINOGRAD_LIBRARY = register_operators(WINOGRAD_OPERATORS)
"""Keeps the registration alive."""


IM2COL = 20480  # below this batch * channels * rows torch 2.13 takes im2col in float32

AverageVersion = Literal["torch", "tiles"]
MaximumVersion = Literal["torch", "windows"]
MomentsVersion = Literal["torch", "cached"]
ResampleVersion = Literal["torch", "sparse"]


_as_if: ContextVar[str | None] = ContextVar("as_if", default=None)


@contextmanager
def choose_as_if_on(kind: str) -> Iterator[None]:
    """Choose as on this kind of device, wherever the tensors are: to trace what it would run."""
    token = _as_if.set(kind)
    try:
        yield
    finally:
        _as_if.reset(token)


def device_kind(x: torch.Tensor) -> str:
    """The kind of device for which versions are chosen: ``x``'s, but for `choose_as_if_on`."""
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
    """Whether a device is only chosen for, see `choose_as_if_on`."""
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
