"""Layer and RMS normalisation over the last dims, cut or not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from hyperslab.comm import Communicator
from hyperslab.comm.collectives import reduce_in_place
from hyperslab.errors import LayoutError
from hyperslab.ops.common.half_precision import HALF, wide
from hyperslab.ops.normalization.statistics import combine
from hyperslab.ops.reductions.base import group_over, without_empty_shards
from hyperslab.tensor import Sharded, register


@register(F.layer_norm, family="normalization")
def layer_norm(
    input: Sharded,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Sharded:
    """Over the last dims, cut or not; of elementwise parameters each rank takes its part."""
    x = input
    shape = _check(x, "layer_norm", normalized_shape, weight, bias)
    x = without_empty_shards(x, range(x.dim() - len(shape), x.dim()))
    if group_over(x, range(x.dim() - len(shape), x.dim())) is None:
        return x.like(F.layer_norm(x.local, shape, weight, bias, eps))
    dtype = F.layer_norm(x.local.new_zeros(1), (1,)).dtype  # autocast may choose another
    return _normalise(x, x.local.to(dtype), shape, weight, bias, eps, centred=True)


@register(F.rms_norm, family="normalization")
def rms_norm(
    input: Sharded,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Sharded:
    """Over the last dims, cut or not; of elementwise weights each rank takes its part."""
    x = input
    shape = _check(x, "rms_norm", normalized_shape, weight)
    x = without_empty_shards(x, range(x.dim() - len(shape), x.dim()))
    if group_over(x, range(x.dim() - len(shape), x.dim())) is None:
        return x.like(F.rms_norm(x.local, shape, weight, eps))
    block = x.local.to(F.rms_norm(x.local.new_zeros(1), (1,)).dtype)
    if eps is None:
        eps = torch.finfo(torch.float32 if block.dtype in HALF else block.dtype).eps
    return _normalise(x, block, shape, weight, None, eps, centred=False)


def _check(
    x: Sharded,
    name: str,
    normalized_shape: int | Sequence[int],
    *parameters: torch.Tensor | None,
) -> tuple[int, ...]:
    """The normalised shape, which is global as all shapes."""
    if not isinstance(x, Sharded) or any(isinstance(p, Sharded) for p in parameters):
        raise LayoutError(f"{name}: the input is cut, its parameters are ordinary tensors")
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        raise LayoutError(
            f"{name} over {shape} needs an input whose last dims are these, got {x.partition}\n"
            "    shapes of a cut tensor are global"
        )
    for parameter in parameters:
        if parameter is not None and tuple(parameter.shape) != shape:
            raise LayoutError(f"{name} over {shape} has a parameter {tuple(parameter.shape)}")
    return shape


def _normalise(
    x: Sharded,
    block: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    centred: bool,
) -> Sharded:
    """By `_LayerNorm`, with this rank's part of weight and bias."""
    first = x.dim() - len(shape)
    part = tuple(slice(*x.box.interval(dim)) for dim in range(first, x.dim()))
    weight, bias = (p if p is None else p[part] for p in (weight, bias))
    group = group_over(x, range(first, x.dim()))
    count = math.prod(shape)
    return x.like(_LayerNorm.apply(block, weight, bias, first, eps, count, group, centred))


class _LayerNorm(torch.autograd.Function):
    """Normalise a block over its dims from ``first`` on and over the ranks of ``group``.

    ``centred`` is layer norm: around the mean; otherwise RMS norm.

    Distribution scheme: 1. local mean and variance, 2. one all-reduce of both (two in float64), 3.
    normalise the block. Backward: 1. the sums of g = dy * weight and of g * xhat, 2. one
    all-reduce of both, 3. the block's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        first: int,
        eps: float,
        count: int,
        group: Communicator,
        centred: bool,
    ) -> torch.Tensor:
        values = wide(x)
        dims = range(first, x.dim())
        mean, var = _statistics(values, dims, count, group, centred)
        invstd = var.add_(eps).rsqrt_()
        ctx.first = first
        ctx.count = count
        ctx.group = group
        ctx.centred = centred
        ctx.save_for_backward(x, weight, mean, invstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        y = (values - mean).mul_(invstd)
        if weight is not None:
            y.mul_(weight)
        if bias is not None:
            y.add_(bias)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        dims = list(range(ctx.first, x.dim()))
        lead = list(range(ctx.first))
        xhat = (x - mean).mul_(invstd)
        dy = gradient.to(mean.dtype)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[1]:
            dweight = _sum(dy * xhat, lead).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            dbias = _sum(dy, lead).to(ctx.bias_dtype)
        if ctx.needs_input_grad[0]:
            g = dy if weight is None else dy * weight
            sums = torch.stack([g.sum(dims, True), (g * xhat).sum(dims, True)])
            sums = reduce_in_place(sums, ctx.group, "the gradient of a layer's normalisation")
            sums /= ctx.count
            g = g - xhat.mul_(sums[1])
            dx = (g - sums[0] if ctx.centred else g).mul_(invstd).to(x.dtype)
        return dx, dweight, dbias, None, None, None, None, None


def _statistics(
    values: torch.Tensor,
    dims: Sequence[int],
    count: int,
    group: Communicator,
    centred: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance over ``dims`` and ranks; not centred: zero and the mean square."""
    share = math.prod(values.shape[d] for d in dims) / count
    if centred:
        var, mean = torch.var_mean(values, list(dims), correction=0, keepdim=True)
        return combine(mean, var, share, group, exact=values.dtype == torch.float64)
    square = values.square().mean(list(dims), keepdim=True).double() * share
    square = reduce_in_place(square, group, "the statistics of rms_norm").to(values.dtype)
    return torch.zeros_like(square), square


def _sum(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return x.sum(dims) if dims else x
