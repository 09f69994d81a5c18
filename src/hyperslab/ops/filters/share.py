"""Filters of a layer that is not cut: each of the ranks that would repeat it computes its share.

Deep layers are small in space and large in weights. Where they are gathered, or are linear, ranks
of a replica that all computed all of them would be as slow as one. This is the filter parallelism
of Dryden et al. 2019 ("Channel and filter parallelism for large-scale CNN training"), for the one
layer: its input lies whole on all ranks, and so does its result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hyperslab.comm import ExchangePlan, Grid, per_grid, plan_exchange
from hyperslab.comm.exchange import fetch
from hyperslab.geometry import Cut, Partition
from hyperslab.ops.filters.parameters import taken
from hyperslab.ops.kernels import choose
from hyperslab.tensor import Sharded
from hyperslab.tensor.gradient_homes import GradientHomes

PRODUCTS_PER_WEIGHT = 64
"""So many products take as long as a weight is under way: cast, reordered, its gradient summed."""

SHARED_FROM = 1 << 18
"""Weights, and products by their equivalent, whose time is ten times that of the messages."""


LEAST_FILTERS = 2
"""Filters of a rank: a result of one channel could lie in memory either way, unlike the others'."""


@dataclass(frozen=True, slots=True)
class FilterShare:
    """One rank's share of a layer's filters.

    It is the interval ``index`` of ``rows``, a cut of the weight's first dim. ``plan`` brings from
    every rank what it computed.
    """

    rows: Cut
    index: int
    plan: ExchangePlan

    def of(
        self, parameter: torch.Tensor, dtype: torch.dtype, homes: GradientHomes | None
    ) -> torch.Tensor:
        """The share of a weight (filters, ...) or a bias (filters) in a type; differentiable.

        Its gradient is zero in the rows of other ranks. Those of this rank come from the losses of
        all ranks that share the layer, so that the average over ranks is the serial gradient.
        """
        return taken(parameter, dtype, homes, self.rows, self.index)

    def whole(self, y: torch.Tensor, what: str) -> torch.Tensor:
        """The result with all channels, from this rank's; differentiable."""
        return fetch(y, self.plan, what=what)


def filter_share(
    x: Sharded, weight: torch.Tensor, output: Partition, dim: int
) -> FilterShare | None:
    """This rank's share of a layer's filters; None where it computes all of them.

    Distribution scheme: 1. compute some channels of the result from the whole input, 2. gather
    them. Backward: 1. add up the gradients of these channels that the ranks have, 2. gradients of
    the share's weight and of the input, which sums over ranks as any gradient of equal copies.

    Args:
        x: the input, not cut in space.
        weight: (filters, ...), whole.
        output: what the layer makes; its ``dim`` are the filters.
    """
    scope = x.policy.scope
    if scope is None or not scope.is_open or choose.device_kind(x) != "cpu":
        return None  # a GPU computes such a layer in less time than a message takes
    products = output.box(x.grid.coords).size * math.prod(weight.shape[1:])
    if weight.numel() + products // PRODUCTS_PER_WEIGHT < SHARED_FROM:
        return None
    return _lay_out(x.grid, output, dim)


@per_grid
def _lay_out(grid: Grid, output: Partition, dim: int) -> FilterShare | None:
    """The axis with most ranks shares them; the data axis has other samples."""
    free = [name for name in grid.extents if name != "data" and name not in output.axes]
    axis = max(free, key=lambda name: grid.extents[name], default=None)
    if axis is None or grid.extents[axis] == 1:
        return None
    cut = Cut.balanced(axis, output.shape[dim], grid.extents[axis])
    if min(hi - lo for lo, hi in cut.intervals) < LEAST_FILTERS:
        return None
    shared = output.with_dim(dim, output.shape[dim], cut)
    return FilterShare(cut, grid.coords[axis], plan_exchange(shared, output.cover, grid))
