"""Variances and deviations over dims, cut or not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyperslab.comm import AXES
from hyperslab.comm.collectives import stack_ranks
from hyperslab.errors import LayoutError
from hyperslab.ops.reductions.sums import (
    finish,
    group_over,
    reduced_dims,
    reduction,
    wide,
    without_empty_shards,
)
from hyperslab.tensor import Sharded


def _register(function: Callable[..., Any], *also: Callable[..., Any]) -> None:
    name = function.__name__

    @reduction(function, *also)
    def rule(
        input: Any,
        dim: Any = None,
        unbiased: bool | None = None,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> Any:
        """Over any dims, around the global mean; true counts where shards are uneven.

        Distribution scheme: 1. local mean and variance, 2. they are stacked from all ranks in one
        message, 3. each rank combines them (Chan et al. 1979), differentiably.
        """
        if isinstance(dim, bool):  # var(x, unbiased)
            dim, unbiased = None, dim
        if correction is None:
            correction = 1 if unbiased is None else int(unbiased)
        dims = reduced_dims(input, dim)
        x = without_empty_shards(input, dims)
        if group_over(x, dims) is None:
            found = function(x.local, dims, correction=correction, keepdim=keepdim)
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
    shares = torch.tensor(counts(x, dims), dtype=means.dtype, device=means.device) / count
    shares = shares.view(-1, *[1] * (means.dim() - 1))
    mean = (means * shares).sum(0)
    var = ((variances + (means - mean).square()) * shares).sum(0)
    left = count - correction
    return var * (count / left if left > 0 else math.inf), mean


def counts(x: Sharded, dims: Sequence[int]) -> list[int]:
    """How many elements of ``dims`` each rank of `group_over` holds, in the order of ranks."""
    cuts = [cut for d in dims if (cut := x.partition.cuts[d]) is not None]
    cuts.sort(key=lambda cut: AXES.index(cut.axis))
    uncut = math.prod(x.shape[d] for d in dims if x.partition.cuts[d] is None)
    places = itertools.product(*(cut.intervals for cut in cuts))
    return [uncut * math.prod(hi - lo for lo, hi in place) for place in places]


def _root(var: torch.Tensor) -> torch.Tensor:
    """The square root, whose gradient at zero is zero, as that of torch's deviation."""
    positive = var > 0
    return torch.where(positive, torch.where(positive, var, 1).sqrt(), var)


_register(torch.var, torch.Tensor.var)
_register(torch.std, torch.Tensor.std)
_register(torch.var_mean)
_register(torch.std_mean)
