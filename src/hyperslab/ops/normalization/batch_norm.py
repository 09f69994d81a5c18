"""Batch normalisation with statistics over the whole grid, or per replica."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from hyperslab.comm.collectives import reduce_in_place
from hyperslab.memory_format import dense, memory_format_of
from hyperslab.ops.chains.affine import Affine
from hyperslab.ops.chains.chain import begin, result
from hyperslab.ops.chains.statistics import Population, normalised_chain
from hyperslab.ops.common.placement import check_channels
from hyperslab.ops.normalization.statistics import Normalise
from hyperslab.ops.reductions.base import without_empty_shards
from hyperslab.tensor import Sharded, register


@register(F.batch_norm, family="normalization", lazy=True)
def batch_norm(
    input: Sharded,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Sharded:
    """Training and evaluation, with running statistics; over the grid or per replica.

    Distribution scheme: 1. local mean and variance per channel, 2. one all-reduce of both (two
    in float64), 3. normalise the block. Backward: 1. the two per-channel sums, 2. one
    all-reduce of both, 3. the block's gradient.
    """
    x = input
    check_channels(x, "batch_norm")
    if not training:
        kept = memory_format_of(x.block)
        block = dense(x.block, kept)
        y = F.batch_norm(block, running_mean, running_var, weight, bias, False, momentum, eps)
        if y.requires_grad:
            y.register_hook(lambda gradient: dense(gradient, kept))
        return x.like(y)
    x = without_empty_shards(x, range(x.dim()))
    axes = x.partition.axes
    shape = list(x.shape)
    fewest = list(x.shape)
    if x.policy.batch_norm == "replica" and "data" in axes:
        axes = tuple(axis for axis in axes if axis != "data")
        for dim, cut in enumerate(x.partition.cuts):  # after a permutation any dim may be the batch
            if cut is not None and cut.axis == "data":
                shape[dim] = x.block.shape[dim]
                fewest[dim] = min(hi - lo for lo, hi in cut.intervals)  # all ranks judge alike
    if math.prod(fewest) <= fewest[1]:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {tuple(fewest)}"
        )
    count = math.prod(shape) // shape[1]
    group = x.grid.group(axes)
    if x.pending is not None:  # a normalisation is the first link of its chain
        x.settle()
    affine = Affine.of(weight, bias)
    chain = begin(x)
    if chain is None:
        block = x.block
        y, mean, var = Normalise.apply(block, affine.weight, affine.bias, eps, count, group)
        normalised = x.like(y, fresh=True)
    else:
        chain, moments = normalised_chain(chain, Population(count, group), affine, eps)
        mean, var = moments[:, 0].unbind()
        normalised = result(chain, x, x.partition)
    if running_mean is not None and running_var is not None:
        _update(x, running_mean, running_var, mean, var * (count / (count - 1)), momentum)
    return normalised


def _update(
    x: Sharded,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    mean: torch.Tensor,
    unbiased: torch.Tensor,
    momentum: float,
) -> None:
    """Move the running statistics, on every rank alike: per replica, to the replicas' mean."""
    data = x.grid.group(("data",)) if x.policy.batch_norm == "replica" else None
    if data is not None:
        both = torch.stack([mean, unbiased])
        both = reduce_in_place(both, data, "the running statistics of batch_norm") / x.grid.data
        mean, unbiased = both.unbind()
    running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    running_var.lerp_(unbiased.to(running_var.dtype), momentum)
