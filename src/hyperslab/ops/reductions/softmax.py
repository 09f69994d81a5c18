"""Distributes softmax, its logarithm and log-sum-exp over dims, cut or not."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from hyperslab.comm import Communicator
from hyperslab.comm.collectives import reduce_in_place, stack_ranks
from hyperslab.errors import LayoutError
from hyperslab.kernels.memory_format import as_float32
from hyperslab.ops.elementwise.random import exponential_block
from hyperslab.ops.overloads import Operator, register_each
from hyperslab.ops.reductions.sums import (
    Dims,
    group_over,
    reduced_dims,
    without_empty_shards,
    wrap_reduced,
)
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import gather_first, read_dim


class _Softmax(torch.autograd.Function):
    """Computes softmax over a cut dim, or its logarithm; saves its output, as torch does.

    Distribution scheme: 1. the local maximum and the sum of exponentials below it, 2. they are
    stacked from all ranks, 3. the block. Backward: 1. the local sum, 2. its all-reduce, 3. the
    block's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, group: Communicator, log: bool
    ) -> torch.Tensor:
        largest, sums = _largest_and_sum(x, dim, group)
        y = x - largest
        y = y.sub_(sums.log_()) if log else y.exp_().div_(sums)
        ctx.dim = dim
        ctx.group = group
        ctx.log = log
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        part = gradient if ctx.log else gradient * y
        total = part.sum(ctx.dim, keepdim=True).contiguous()
        total = reduce_in_place(total, ctx.group, "the gradient of softmax")
        dx = gradient - y.exp() * total if ctx.log else (gradient - total) * y
        return dx, None, None, None


def _largest_and_sum(
    x: torch.Tensor, dim: int, group: Communicator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the global maximum, and the global sum of exp(x - maximum)."""
    largest = x.amax(dim, keepdim=True)
    # A shard of -inf alone adds nothing; if all are, the result is NaN, as it is in torch.
    sums = (x - largest.masked_fill(largest == -torch.inf, 0)).exp_().sum(dim, keepdim=True)
    stack = stack_ranks(torch.stack([largest, sums]), group, "softmax over a cut dim")
    all_largest, all_sums = stack.unbind(1)
    total = all_largest.amax(0)
    return total, (all_sums * (all_largest - total).exp_()).sum(0)


@register_each("softmax", "log_softmax", family="reductions", dims=["dim"])
def softmax(
    operator: Operator,
    input: Sharded,
    dim: int | None = None,
    *args: int | torch.dtype | None,
    dtype: torch.dtype | None = None,
    **_: object,
) -> Sharded:
    """Over one dim, cut or not."""
    # The third argument is a type, or a ``_stacklevel`` in torch.nn.functional.
    dtype = next((arg for arg in args if isinstance(arg, torch.dtype)), dtype)
    if dim is None:
        dim = 0 if input.dim() in (0, 1, 3) else 1
    x = without_empty_shards(input, [dim])
    group = group_over(x, [dim])
    if group is None:
        return x.like(operator(x.local, dim, dtype=dtype))
    whole = operator(x.local.new_zeros(1), 0, dtype=dtype).dtype  # autocast may choose one
    log = operator.__name__ == "log_softmax"
    y = _Softmax.apply(as_float32(x.local.to(whole)), dim, group, log)
    return x.like(y.to(whole))


@register(F.softmin, family="reductions", dims=["dim"])
def softmin(
    input: Sharded,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Sharded:
    """Over one dim, cut or not."""
    return softmax(torch.softmax, input.like(-input.local), dim, dtype=dtype)


@register(F.gumbel_softmax, family="reductions")
def gumbel_softmax(
    logits: Sharded, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Sharded:
    """Over one dim, which must not be cut; the same on every grid, as rand_like."""
    dim = read_dim(dim, logits.dim(), "gumbel_softmax")
    if (cut := logits.partition.cuts[dim]) is not None:
        raise LayoutError(
            f"gumbel_softmax over dim {dim}, which is cut: {logits.partition} on {logits.grid}\n"
            f"{gather_first(cut.axis)}"
        )
    noise = exponential_block(logits).log_().neg_()
    soft = torch.softmax((logits.local + noise) / tau, dim)
    if hard:  # the gradient goes straight through
        chosen = soft.argmax(dim, keepdim=True)
        soft = torch.zeros_like(soft).scatter_(dim, chosen, 1.0) - soft.detach() + soft
    return logits.like(soft)


@register(
    torch.logsumexp,
    torch.Tensor.logsumexp,
    torch.special.logsumexp,
    family="reductions",
    dims=["dim"],
)
def logsumexp(input: Sharded, dim: Dims, keepdim: bool = False) -> torch.Tensor:
    """Over any dims: the log-sum-exp of all ranks' log-sum-exps."""
    dims = reduced_dims(input, dim)
    x = without_empty_shards(input, dims)
    group = group_over(x, dims)
    if group is None:
        return wrap_reduced(x, torch.logsumexp(x.local, dims, keepdim), dims, keepdim)
    local = torch.logsumexp(as_float32(x.local), dims, keepdim)
    whole = torch.logsumexp(stack_ranks(local, group, "a log-sum-exp over cut dims"), 0)
    return wrap_reduced(x, whole.to(torch.logsumexp(x.local.new_zeros(1), 0).dtype), dims, keepdim)
