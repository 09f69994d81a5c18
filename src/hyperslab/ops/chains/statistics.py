"""The statistics of a block over several ranks, in one pass and one all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hyperslab.comm import Communicator
from hyperslab.comm.collectives import reduce_in_place
from hyperslab.errors import LayoutError
from hyperslab.ops.chains.affine import Affine
from hyperslab.ops.chains.chain import Chain
from hyperslab.ops.chains.function import Links, Statistics
from hyperslab.ops.kernels import fused  # noqa: F401 - registers the operators

_channel_sums = torch.ops.hyperslab.channel_sums.default
_normalisation = torch.ops.hyperslab.normalisation.default


@dataclass(frozen=True, slots=True)
class Population:
    """What a mean is taken over: ``count`` values on the ranks of ``group``.

    Of a channel over batch and space; with ``pool``, of so many neighbouring channels of a sample.
    """

    count: int
    group: Communicator | None
    pool: int | None = None


def statistics_of(x: torch.Tensor, over: Population, affine: Affine, eps: float) -> Statistics:
    """Of every channel, or of every sample's, with the ``affine`` numbers behind them.

    Sums are of float64, so that E[x²] − E[x]² loses nothing that a block of single or half
    precision resolves.

    Raises:
        LayoutError: weight or bias are not of the block's channels.
    """
    channels = x.shape[1]
    weight = affine.weight
    bias = affine.bias
    for parameter in (weight, bias):
        if parameter is not None and parameter.numel() != channels:
            raise LayoutError(
                f"a normalisation of {channels} channels has a parameter {tuple(parameter.shape)}"
            )
    pool = over.pool or 1
    with torch.no_grad():
        sums = _channel_sums(x, 0 if over.pool is None else channels // pool)
        if over.group is not None:
            sums = reduce_in_place(sums, over.group, "the statistics of a normalisation")
        norm, moments = _normalisation(sums, weight, bias, over.count, eps, channels, pool)
    return Statistics(norm, moments, affine, pool, over.count, eps, over.group)


def normalised_chain(
    chain: Chain,
    over: Population,
    affine: Affine,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[Chain, torch.Tensor]:
    """A chain whose first link normalises, and mean and biased variance (2, 1 or N, C) in float64.

    ``dtype``: of the result, by default the block's.
    """
    statistics = statistics_of(chain.block, over, affine, eps)
    links = Links(dtype or chain.dtype, statistics)
    return chain.linked(links), statistics.moments[:2]
