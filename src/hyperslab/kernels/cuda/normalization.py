"""Computes what a normalisation makes of its sums on a CUDA device, one small kernel an operator.

Legend: R rows of C channels, of which ``pool`` neighbours share their statistics; an element is
one of R * C, a group one of G = R * C / pool.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hyperslab.kernels.cuda.tiles import OPTIONS, pointer
from hyperslab.kernels.normalization import LEFT_BY_ROUNDING, kernels_take, running_statistics
from hyperslab.kernels.registry import Operands

AT_ONCE = 128  # elements or groups of a program


def triton_normalisation(given: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    sums, weight, bias, count, eps, channels, pool = given
    sums = sums.contiguous()
    rows = sums.shape[1] * pool // channels
    norm = sums.new_empty((3, rows, channels), dtype=torch.float32)
    moments = sums.new_empty((4, rows, channels))
    size = rows * channels
    _normalisation[(triton.cdiv(size, AT_ONCE),)](
        sums,
        pointer(weight if weight is None else weight.contiguous(), norm),
        pointer(bias if bias is None else bias.contiguous(), norm),
        norm,
        moments,
        size,
        channels,
        pool,
        count,
        EPS=eps,
        NOISE=LEFT_BY_ROUNDING,
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        SIZE=AT_ONCE,
        **OPTIONS,
    )
    return norm, moments


def triton_running_statistics(given: Operands) -> None:
    moments, running_mean, running_var, momentum, unbiased = given
    if not kernels_take(moments, running_mean, running_var):
        running_statistics(*given)
        return
    channels = moments.shape[2]
    _running_statistics[(triton.cdiv(channels, AT_ONCE),)](
        *given[:3], channels, momentum, unbiased, SIZE=AT_ONCE, **OPTIONS
    )


def triton_parameter_gradients(
    given: Operands,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sums, norm, moments, pool = given
    sums = sums.contiguous()
    _, rows, channels = sums.shape
    size = rows * channels
    weight = sums.new_empty(channels, dtype=torch.float32)
    bias = sums.new_empty(channels, dtype=torch.float32)
    shared = sums.new_empty((2, size // pool))
    _shared_sums[(triton.cdiv(size // pool, AT_ONCE),)](
        sums, norm, moments, shared, size, pool, SIZE=AT_ONCE, **OPTIONS
    )
    _parameter_gradients[(triton.cdiv(channels, AT_ONCE),)](
        sums, norm, moments, weight, bias, rows, channels, SIZE=AT_ONCE, **OPTIONS
    )
    return weight, bias, shared


def triton_through_statistics(given: Operands) -> torch.Tensor:
    shared, norm, moments, count, pool = given
    through = norm.new_empty((2, *norm.shape[1:]))
    size = norm[0].numel()
    _through_statistics[(triton.cdiv(size, AT_ONCE),)](
        shared.contiguous(), norm, moments, through, size, pool, count, SIZE=AT_ONCE, **OPTIONS
    )
    return through


@triton.jit
def _normalisation(  # type: ignore[no-untyped-def]
    sums,
    weight,
    bias,
    norm,
    moments,
    size,
    C,
    pool,
    count,
    EPS: tl.constexpr,
    NOISE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    SIZE: tl.constexpr,
):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    exist = i < size
    many = tl.cast(count, tl.float64)
    mean = tl.load(sums + i // pool, mask=exist, other=0.0) / many
    square = tl.load(sums + size // pool + i // pool, mask=exist, other=0.0) / many
    between = square - mean * mean
    around = tl.load(sums + 2 * (size // pool) + i // pool, mask=exist, other=0.0) / many
    var = tl.where(between <= NOISE * square, 0.0, between) + around
    invstd = 1.0 / tl.sqrt(var + EPS)
    scale = invstd
    if WEIGHT:
        scale = invstd * tl.load(weight + i % C, mask=exist, other=0.0).to(tl.float64)
    rounded = mean.to(tl.float32)
    shift = (rounded.to(tl.float64) - mean) * scale
    if BIAS:
        shift += tl.load(bias + i % C, mask=exist, other=0.0).to(tl.float64)
    tl.store(norm + i, rounded, mask=exist)
    tl.store(norm + size + i, scale.to(tl.float32), mask=exist)
    tl.store(norm + 2 * size + i, shift.to(tl.float32), mask=exist)
    tl.store(moments + i, mean, mask=exist)
    tl.store(moments + size + i, var, mask=exist)
    tl.store(moments + 2 * size + i, invstd, mask=exist)
    tl.store(moments + 3 * size + i, scale, mask=exist)


@triton.jit
def _towards(running, new, c, exist, share):  # type: ignore[no-untyped-def]
    old = tl.load(running + c, mask=exist, other=0.0)
    step = new - old
    moved = tl.where(share < 0.5, old + share * step, new - (1.0 - share) * step)
    tl.store(running + c, moved, mask=exist)


@triton.jit
def _running_statistics(moments, mean, var, C, momentum, unbiased, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    c = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    exist = c < C
    new_mean = tl.load(moments + c, mask=exist, other=0.0).to(tl.float32)
    new_var = tl.load(moments + C + c, mask=exist, other=0.0).to(tl.float32) * unbiased
    _towards(mean, new_mean, c, exist, momentum)
    _towards(var, new_var, c, exist, momentum)


@triton.jit
def _of_element(sums, norm, moments, i, size, exist):  # type: ignore[no-untyped-def]
    """Loads the sums of du and of du * xhat."""
    du = tl.load(sums + i, mask=exist, other=0.0)
    product = tl.load(sums + size + i, mask=exist, other=0.0)
    rounded = tl.load(norm + i, mask=exist, other=0.0).to(tl.float64)
    beside = tl.load(moments + i, mask=exist, other=0.0) - rounded
    return du, (product - du * beside) * tl.load(moments + 2 * size + i, mask=exist, other=0.0)


@triton.jit
def _shared_sums(sums, norm, moments, shared, size, pool, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    group = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    exist = group < size // pool
    of_mean = tl.zeros((SIZE,), tl.float64)
    of_xhat = tl.zeros((SIZE,), tl.float64)
    for j in range(pool):
        i = group * pool + j
        du, xhat = _of_element(sums, norm, moments, i, size, exist)
        scale = tl.load(moments + 3 * size + i, mask=exist, other=0.0)
        of_mean += du * scale
        of_xhat += xhat * scale
    tl.store(shared + group, of_mean, mask=exist)
    tl.store(shared + size // pool + group, of_xhat, mask=exist)


@triton.jit
def _parameter_gradients(sums, norm, moments, weight, bias, rows, C, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    c = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    exist = c < C
    of_weight = tl.zeros((SIZE,), tl.float64)
    of_bias = tl.zeros((SIZE,), tl.float64)
    for row in range(rows):
        du, xhat = _of_element(sums, norm, moments, row * C + c, rows * C, exist)
        of_weight += xhat
        of_bias += du
    tl.store(weight + c, of_weight.to(tl.float32), mask=exist)
    tl.store(bias + c, of_bias.to(tl.float32), mask=exist)


@triton.jit
def _through_statistics(  # type: ignore[no-untyped-def]
    shared, norm, moments, through, size, pool, count, SIZE: tl.constexpr
):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    exist = i < size
    many = tl.cast(count, tl.float64)
    of_mean = tl.load(shared + i // pool, mask=exist, other=0.0) / -many
    of_xhat = tl.load(shared + size // pool + i // pool, mask=exist, other=0.0) / -many
    rounded = tl.load(norm + i, mask=exist, other=0.0).to(tl.float64)
    b = of_xhat * tl.load(moments + 2 * size + i, mask=exist, other=0.0)
    c = of_mean - b * (tl.load(moments + i, mask=exist, other=0.0) - rounded)
    tl.store(through + i, b.to(tl.float32), mask=exist)
    tl.store(through + size + i, c.to(tl.float32), mask=exist)
