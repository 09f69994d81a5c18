"""What batch, instance and group norm share: normalise by statistics over several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from hyperslab.comm import Communicator
from hyperslab.comm.collectives import reduce_in_place
from hyperslab.memory_format import dense, memory_format_of
from hyperslab.ops.kernels.moments import local_moments


class Normalise(torch.autograd.Function):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` of a block (N, K, ...space).

    The statistics are those of ``pool`` neighbouring channels each, over N, space and the ranks of
    ``group``, ``count`` values in all. Returns the block, and mean and biased variance (K).

    Distribution scheme: 1. local mean and variance, 2. one all-reduce of both (two in float64), 3.
    normalise the block. Backward: 1. the sums of dy and of dy * xhat per channel, 2. one
    all-reduce of both, 3. the block's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        count: int,
        group: Communicator | None,
        pool: int = 1,
    ) -> tuple[torch.Tensor, ...]:
        x = dense(x, memory_format_of(x))
        mean, var = _statistics(x, count, group, pool)
        y = F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)
        ctx.eps = eps
        ctx.count = count
        ctx.group = group
        ctx.pool = pool
        ctx.save_for_backward(x, weight, mean, var)
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: torch.Tensor, _mean: torch.Tensor | None, _var: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, var = ctx.saved_tensors
        gradient = dense(gradient, memory_format_of(x))
        dx, dxhat, db = _eval_backward(gradient, x, weight, mean, var, ctx.eps)
        if ctx.needs_input_grad[0]:
            sums = torch.stack([db, dxhat]) * (1 if weight is None else weight.to(mean.dtype))
            sums = sums.unflatten(1, (-1, ctx.pool)).sum(2)
            if ctx.group is not None:
                sums = reduce_in_place(sums, ctx.group, "the gradient of a normalisation")
            sums = sums.repeat_interleave(ctx.pool, 1) / ctx.count
            invstd = (var + ctx.eps).rsqrt()
            slope = -invstd.square() * sums[1]
            offset = -invstd * sums[0] - slope * mean
            shape = [1, -1] + [1] * (x.dim() - 2)
            dx.add_(offset.to(dx.dtype).view(shape))
            dx.addcmul_(x, slope.to(dx.dtype).view(shape))
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dweight = dxhat if needs_weight else None
        dbias = db if needs_bias else None
        return dx, dweight, dbias, None, None, None, None


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
    x: torch.Tensor, count: int, group: Communicator | None, pool: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance (K) of every ``pool`` channels together."""
    mean, var = local_moments(x.unflatten(1, (-1, pool)))
    if group is not None:
        share = x.numel() / mean.numel() / count
        mean, var = combine(mean, var, share, group, exact=x.dtype == torch.float64)
    return mean.repeat_interleave(pool), var.repeat_interleave(pool)


def combine(
    mean: torch.Tensor, var: torch.Tensor, share: float, group: Communicator, *, exact: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance over all ranks of ``group`` from those of this rank.

    This rank has ``share`` of the values. They are combined in float64: for inputs of half or
    single precision as E[x²] − E[x]², whose cancellation there is far below their resolution; to
    be ``exact``, as float64 needs it, around the common mean (Chan et al. 1979), which takes a
    second all-reduce.
    """
    mean64 = mean.double()
    var64 = var.double()
    what = "the statistics of a normalisation"
    both = torch.stack([mean64, var64 + mean64.square()]) * share
    total, spread = reduce_in_place(both, group, what)
    if exact:
        around = (var64 + (mean64 - total).square()) * share
        spread = reduce_in_place(around, group, what)
    else:
        spread = (spread - total.square()).clamp_min_(0)
    return total.to(mean.dtype), spread.to(var.dtype)
