"""Variances and deviations over dims, cut or not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from hyperslab.comm import AXES
from hyperslab.comm.collectives import stack_ranks
from hyperslab.errors import LayoutError
from hyperslab.ops.common.constants import constant
from hyperslab.ops.common.forms import Operator, register_each
from hyperslab.ops.common.half_precision import wide
from hyperslab.ops.reductions.base import (
    Dims,
    finish,
    group_over,
    reduced_dims,
    without_empty_shards,
)
from hyperslab.tensor import Sharded


@register_each("var", "std", "var_mean", "std_mean", family="reductions", dims=["dim"])
def variance(
    operator: Operator,
    input: Sharded,
    dim: Dims | bool = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Over any dims, around the global mean; true counts where shards are uneven.

    Distribution scheme: 1. local mean and variance, 2. they are stacked from all ranks in one
    message, 3. each rank combines them (Chan et al. 1979), differentiably.
    """
    if isinstance(dim, bool):  # var(x, unbiased)
        unbiased = dim
        dim = None
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    dims = reduced_dims(input, dim)
    x = without_empty_shards(input, dims)
    name = operator.__name__
    if group_over(x, dims) is None:
        found = operator(x.local, dims, correction=correction, keepdim=keepdim)
        blocks = found if isinstance(found, tuple) else (found,)
    else:
        var, mean = _moments(x, dims, correction, keepdim)
        first = _root(var) if name.startswith("std") else var
        blocks = (first, mean) if name.endswith("_mean") else (first,)
    results = tuple(finish(x, block.to(x.dtype), dims, keepdim) for block in blocks)
    return results if len(results) > 1 else results[0]


def _moments(
    x: Sharded, dims: Sequence[int], correction: float, keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Global variance and mean."""
    if x.dtype.is_complex:
        raise LayoutError(
            f"the variance of complex numbers over dims that are cut has no rule: {x.partition}\n"
            "    use hyperslab.gather(x, axes) before it"
        )
    local = torch.var_mean(wide(x.local), tuple(dims), correction=0, keepdim=keepdim)
    stack = stack_ranks(torch.stack(local), group_over(x, dims), "a variance over cut dims")
    variances, means = stack.unbind(1)
    count = math.prod(x.shape[d] for d in dims)
    shares = constant(_counts(x, dims), means.device, means.dtype) / count
    shares = shares.view(-1, *[1] * (means.dim() - 1))
    mean = (means * shares).sum(0)
    var = ((variances + (means - mean).square()) * shares).sum(0)
    left = count - correction
    return var * (count / left if left > 0 else math.inf), mean


def _counts(x: Sharded, dims: Sequence[int]) -> list[int]:
    """How many elements of ``dims`` each rank of `group_over` holds, in the order of ranks."""
    cuts = [cut for d in dims if (cut := x.partition.cuts[d]) is not None]
    cuts.sort(key=lambda cut: AXES.index(cut.axis))
    uncut = math.prod(x.shape[d] for d in dims if x.partition.cuts[d] is None)
    boxes = itertools.product(*(cut.intervals for cut in cuts))
    return [uncut * math.prod(hi - lo for lo, hi in box) for box in boxes]


def _root(var: torch.Tensor) -> torch.Tensor:
    """The square root, whose gradient at zero is zero, as that of torch's deviation."""
    positive = var > 0
    return torch.where(positive, torch.where(positive, var, 1).sqrt(), var)
