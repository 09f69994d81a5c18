"""Softmax and its logarithm over a dim, cut or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from hyperslab.comm.collectives import reduce_in_place, stack_ranks
from hyperslab.ops.reductions.sums import group_over, reduced_dims, wide, without_empty_shards
from hyperslab.tensor import Sharded, register


class _Softmax(torch.autograd.Function):
    """Softmax over a cut dim, or its logarithm; saves its output, as torch does.

    Distribution scheme: 1. the local maximum and the sum of exponentials below it, 2. they are
    stacked from all ranks, 3. the block. Backward: 1. the local sum, 2. its all-reduce, 3. the
    block's gradient.
    """

    @staticmethod
    def forward(ctx, x, dim, group, log):  # type: ignore[no-untyped-def]
        largest, sums = _largest_and_sum(x, dim, group)
        y = x - largest
        y = y.sub_(sums.log_()) if log else y.exp_().div_(sums)
        ctx.dim, ctx.group, ctx.log = dim, group, log
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (y,) = ctx.saved_tensors
        part = gradient if ctx.log else gradient * y
        total = part.sum(ctx.dim, keepdim=True).contiguous()
        total = reduce_in_place(total, ctx.group, "the gradient of softmax")
        dx = gradient - y.exp() * total if ctx.log else (gradient - total) * y
        return dx, None, None, None


def _largest_and_sum(
    x: torch.Tensor, dim: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The global maximum, and the global sum of exp(x - maximum)."""
    largest = x.amax(dim, keepdim=True)
    # A shard of -inf alone adds nothing; if all are, the result is NaN, as it is in torch.
    sums = (x - largest.masked_fill(largest == -torch.inf, 0)).exp_().sum(dim, keepdim=True)
    stack = stack_ranks(torch.stack([largest, sums]), group, "softmax over a cut dim")
    all_largest, all_sums = stack.unbind(1)
    total = all_largest.amax(0)
    return total, (all_sums * (all_largest - total).exp_()).sum(0)


def _register(function: Callable[..., Any], *also: Callable[..., Any], log: bool) -> Any:
    """The rule of functions whose second argument is the dim; F's third is a ``_stacklevel``."""

    def rule(input: Any, dim: Any = None, *args: Any, dtype: Any = None, **_: Any) -> Sharded:
        """Over one dim, cut or not."""
        dtype = next((arg for arg in args if isinstance(arg, torch.dtype)), dtype)
        if dim is None:
            dim = 0 if input.dim() in (0, 1, 3) else 1
        (dim,) = reduced_dims(input, int(dim))
        x = without_empty_shards(input, [dim])
        group = group_over(x, [dim])
        if group is None:
            return x.like(function(x.local, dim, dtype=dtype))
        whole = function(x.local.new_zeros(1), 0, dtype=dtype).dtype  # autocast may choose one
        y = _Softmax.apply(wide(x.local.to(whole)), dim, group, log)
        return x.like(y.to(whole))

    return register(function, *also, family="softmax")(rule)


softmax = _register(
    F.softmax, torch.softmax, torch.Tensor.softmax, torch.special.softmax, log=False
)
_register(
    F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax, torch.special.log_softmax, log=True
)


@register(F.softmin, family="softmax")
def softmin(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Sharded:
    """Over one dim, cut or not."""
    return softmax(input.like(-input.local), dim, dtype=dtype)
