"""Batch normalisation with statistics over the whole grid, or per replica."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from hyperslab.comm.reduce import reduce_in_place
from hyperslab.nn.windowed import check_channels
from hyperslab.tensor import Sharded, register


@register(F.batch_norm, family="normalisation")
def batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Sharded:
    """Training and evaluation, with running statistics; over the grid or per replica.

    Distribution scheme: 1. local mean and variance per channel, 2. one all-reduce of both (two
    in float64), 3. normalise the block. Backward: 1. the two per-channel sums, 2. one
    all-reduce of both, 3. the block's gradient.
    """
    x: Sharded = input
    check_channels(x, "batch_norm")
    if not training:
        return x.like(
            F.batch_norm(x.local, running_mean, running_var, weight, bias, False, momentum, eps)
        )
    axes, samples, fewest = x.partition.axes, x.shape[0], x.shape[0]
    batch = x.partition.cuts[0]
    if x.policy.batch_norm == "replica" and batch is not None:
        axes, samples = tuple(axis for axis in axes if axis != "data"), x.local.shape[0]
        fewest = min(hi - lo for lo, hi in batch.intervals)  # all ranks must judge alike
    values = math.prod(x.shape[2:])
    if fewest * values <= 1:
        raise ValueError(
            "Expected more than 1 value per channel when training, got input size "
            f"{(fewest, *x.shape[1:])}"
        )
    count, group = samples * values, x.grid.group(axes)
    weight, bias = _widened(weight), _widened(bias)
    y, mean, var = _BatchNorm.apply(x.local, weight, bias, eps, count, group)
    if running_mean is not None:
        _update(x, running_mean, running_var, mean, var * (count / (count - 1)), momentum)
    return x.like(y)


def _widened(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Parameters of half precision go with statistics of float32."""
    half = parameter is not None and parameter.dtype in (torch.float16, torch.bfloat16)
    return parameter.float() if parameter is not None and half else parameter


def _update(
    x: Sharded,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    mean: torch.Tensor,
    unbiased: torch.Tensor,
    momentum: float,
) -> None:
    """Move the running statistics, on every rank alike: per replica, to the replicas' mean."""
    new = torch.stack([mean, unbiased])
    data = x.grid.group(("data",)) if x.policy.batch_norm == "replica" else None
    if data is not None:
        new = reduce_in_place(new, data, "the running statistics of batch_norm") / x.grid.data
    running_mean.lerp_(new[0].to(running_mean.dtype), momentum)
    running_var.lerp_(new[1].to(running_var.dtype), momentum)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, count, group):  # type: ignore[no-untyped-def]
        mean, var = _statistics(x, count, group)
        y = F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)
        ctx.eps, ctx.count, ctx.group = eps, count, group
        ctx.save_for_backward(x, weight, mean, var)
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, _mean, _var):  # type: ignore[no-untyped-def]
        x, weight, mean, var = ctx.saved_tensors
        invstd = (var + ctx.eps).rsqrt()
        dx, dxhat, db = _eval_backward(gradient, x, weight, mean, var, ctx.eps)
        if ctx.needs_input_grad[0]:
            sums = torch.stack([db, dxhat])
            if ctx.group is not None:
                sums = reduce_in_place(sums.clone(), ctx.group, "the gradient of batch_norm")
            scale = invstd if weight is None else weight.to(invstd.dtype) * invstd
            slope = -scale * invstd * sums[1] / ctx.count
            offset = -scale * sums[0] / ctx.count - slope * mean
            shape = [1, -1] + [1] * (x.dim() - 2)
            dx.add_(offset.to(dx.dtype).view(shape))
            dx.addcmul_(x, slope.to(dx.dtype).view(shape))
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        return dx, dxhat if needs_weight else None, db if needs_bias else None, None, None, None


def _eval_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With statistics held fixed: gradient of the input, and the sums of dy * xhat and dy."""
    scale = weight if weight is not None else torch.ones_like(mean)
    return torch.ops.aten.native_batch_norm_backward(
        gradient, x, scale, mean, var, None, None, False, eps, [True, True, True]
    )


def _statistics(
    x: torch.Tensor, count: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance per channel over all ranks of ``group``.

    The local ones take two passes. The ranks' are combined in float64: for inputs of half or
    single precision as E[x²] − E[x]², whose cancellation there is far below their resolution; for
    float64 around the common mean (Chan et al. 1979), which takes a second all-reduce.
    """
    dims = [0, *range(2, x.dim())]
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    var, mean = torch.var_mean(wide, dims, correction=0)
    if group is None:
        return mean, var
    local = x.numel() // x.shape[1]
    mean64 = mean.double()
    var64, share, what = var.double(), local / count, "the statistics of batch_norm"
    both = torch.stack([mean64, var64 + mean64.square()]) * share
    total, spread = reduce_in_place(both, group, what)
    if x.dtype == torch.float64:
        around = (var64 + (mean64 - total).square()) * share
        spread = reduce_in_place(around, group, what)
    else:
        spread = (spread - total.square()).clamp_min_(0)
    return total.to(mean.dtype), spread.to(mean.dtype)
