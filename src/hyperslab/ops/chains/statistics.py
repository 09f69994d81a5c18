"""The statistics of a block over several ranks, in one pass and one all-reduce."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hyperslab.comm import Communicator
from hyperslab.comm.collectives import reduce_in_place
from hyperslab.ops.chains.chain import Chain
from hyperslab.ops.chains.function import Links, Statistics
from hyperslab.ops.kernels import fused  # noqa: F401 - registers the operators
from hyperslab.ops.kernels.moments import Moments


@dataclass(frozen=True, slots=True)
class Population:
    """What a mean is taken over: ``count`` values on the ranks of ``group``.

    Of a channel over batch and space; with ``pool``, of so many neighbouring channels of a sample.
    """

    count: int
    group: Communicator | None
    pool: int | None = None


@torch.no_grad()
def moments_of(x: torch.Tensor, over: Population) -> Moments:
    """Mean and biased variance of every channel, (1, C) or (N, C), in float64.

    Sums are of float64, so that E[x²] − E[x]² loses nothing that a block of single or half
    precision resolves.
    """
    channels = x.shape[1]
    sums = torch.ops.hyperslab.channel_sums(x, 0 if over.pool is None else channels // over.pool)
    if over.group is not None:
        sums = reduce_in_place(sums, over.group, "the statistics of a normalisation")
    mean, square = (sums / over.count).unbind()
    var = torch.addcmul(square, mean, mean, value=-1).clamp_min_(0)
    if over.pool is not None and over.pool > 1:
        mean = mean.repeat_interleave(over.pool)
        var = var.repeat_interleave(over.pool)
    return mean.view(-1, channels), var.view(-1, channels)


@torch.no_grad()
def normalised_chain(
    chain: Chain,
    moments: Moments,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    over: Population,
    dtype: torch.dtype | None = None,
) -> Chain:
    """A chain whose first link normalises, with weight and bias (C) in float32.

    ``dtype``: of the result, by default the block's.
    """
    mean, var = moments
    invstd = (var + eps).rsqrt_()
    scale = invstd if weight is None else invstd * weight
    shift = torch.neg(mean * scale) if bias is None else bias - mean * scale
    statistics = Statistics(mean, invstd, over.pool or 1, over.count, eps, over.group)
    links = Links(dtype or chain.dtype, statistics, scale.float(), shift.float())
    return replace(chain, links=links, weight=weight, bias=bias)
