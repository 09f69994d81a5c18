"""Shares the filters of a layer that is not cut among the ranks that would all repeat it.

Deep layers are small in space and large in weights. Where they are gathered, or are linear,
ranks of a replica that all computed all of them would be as slow as one. This is the filter
parallelism of Dryden et al. 2019 ("Channel and filter parallelism for large-scale CNN
training"), for the one layer: its input lies whole on all ranks, and so does its result. First
the parameters as a layer takes them, a share of their rows in another dtype; then the share.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import Node

from hyperslab.comm import ExchangePlan, Grid, per_grid, plan_exchange
from hyperslab.geometry import Cut, Partition
from hyperslab.kernels import registry
from hyperslab.kernels.memory_format import CHANNELS_LAST
from hyperslab.tensor import Sharded
from hyperslab.tensor.gradient_buffers import GradientBuffers
from hyperslab.util.torch_internals import (
    BlockFunction,
    autocast_anywhere,
    dispatch_modes_active,
)

reorder = registry.OPERATORS["reorder"]
reorder_into = registry.OPERATORS["reorder_into"]

MADE_AT_HOME = 1 << 17
"""Limits from how many elements on an uncast parameter's gradient is made in its buffer."""


@dataclass(frozen=True, slots=True, eq=False)
class TakenRows:
    """Casts rows of a parameter; makes the gradient where it is averaged, if that is possible.

    A `hyperslab.kernels.conv.TakenWeight`. ``rows`` is a cut of the parameter's first dim, of which
    this rank takes the interval from ``begin`` to ``end``; without one it takes all of them.
    """

    begin: int
    end: int
    dtype: torch.dtype
    rows: Cut | None
    homes: GradientBuffers | None
    last: bool

    def take(self, parameter: torch.Tensor) -> torch.Tensor:
        rows = parameter if self.rows is None else parameter[self.begin : self.end]
        return _cast(rows, self.dtype, self.last)

    def gradient_with_graph(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        beside = [0] * (2 * parameter.dim() - 2) + [self.begin, parameter.shape[0] - self.end]
        gradient = gradient.to(parameter.dtype)
        return gradient if self.rows is None else F.pad(gradient, beside)

    def gradient(
        self, parameter: torch.Tensor, gradient: torch.Tensor, accumulating: Node
    ) -> torch.Tensor:
        home = None if self.homes is None else self.homes.lend(parameter, accumulating)
        whole = torch.empty_like(parameter) if home is None else home
        rows = whole
        if self.rows is not None:
            rows = whole[self.begin : self.end]
            _set_to_zero(whole[: self.begin])
            _set_to_zero(whole[self.end :])
        if gradient.dim() in CHANNELS_LAST and not gradient.is_contiguous():
            # Into another type, and from channels last, as convolutions make it, in one pass.
            reorder_into(gradient, rows)
        else:
            rows.copy_(gradient)
        if home is not None:
            assert self.homes is not None
            self.homes.made(parameter, whole, self.rows)
        return whole


class _ShardParameter(BlockFunction):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, taken: TakenRows) -> torch.Tensor:
        ctx.parameter = parameter  # a leaf: it keeps no graph
        ctx.taken = taken
        return taken.take(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            return ctx.taken.gradient_with_graph(ctx.parameter, gradient), None
        ((accumulating, _), *_) = ctx.next_functions
        return ctx.taken.gradient(ctx.parameter, gradient, accumulating), None


def _cast(parameter: torch.Tensor, dtype: torch.dtype, last: bool) -> torch.Tensor:
    return reorder(parameter, True, dtype) if last else parameter.to(dtype)


def _set_to_zero(rows: torch.Tensor) -> None:
    """Set to zero; by the C library, which does not read memory that it overwrites."""
    real = rows.device.type == "cpu" and dispatch_modes_active() == 0
    if real and rows.is_contiguous():
        ctypes.memset(rows.data_ptr(), 0, rows.nbytes)
    else:
        rows.zero_()


def shard_parameter(
    parameter: torch.Tensor,
    dtype: torch.dtype,
    homes: GradientBuffers | None,
    rows: Cut | None = None,
    index: int = 0,
    *,
    last: bool = False,
) -> torch.Tensor:
    """Casts a parameter; with ``rows``, a cut of its first dim, only the interval ``index``.

    ``last``: to channels last. Differentiable. The gradient is zero in the rows of other ranks.
    """
    found, taken = take_parameter(parameter, dtype, homes, rows, index, last=last)
    return found if taken is None else _ShardParameter.apply(found, taken)


def take_parameter(
    parameter: torch.Tensor,
    dtype: torch.dtype,
    homes: GradientBuffers | None,
    rows: Cut | None = None,
    index: int = 0,
    *,
    last: bool = False,
) -> tuple[torch.Tensor, TakenRows | None]:
    """Returns what `shard_parameter` does; or the parameter itself, and what is to be taken of it.

    That is left to the layer, whose one node of the graph then does both.
    """
    plain = rows is None and dtype == parameter.dtype
    if plain and (homes is None or parameter.numel() < MADE_AT_HOME):
        return parameter, None
    begin, end = (0, parameter.shape[0]) if rows is None else rows.interval(index)
    plain = homes is None and parameter.device.type != "cpu"
    if not parameter.requires_grad:
        return _cast(parameter if rows is None else parameter[begin:end], dtype, last), None
    if plain or not parameter.is_leaf:
        return (parameter if rows is None else parameter[begin:end]).to(dtype), None
    return parameter, TakenRows(begin, end, dtype, rows, homes, last)


def operand_type(x: torch.Tensor) -> torch.dtype:
    """Returns the type in which a layer with filters takes ``x``: autocast may lower it."""
    return lowered(x.dtype, autocast_type(x.device.type))


def autocast_type(kind: str) -> torch.dtype | None:
    """Returns the type to which autocast lowers operands on a kind of device; None: it is off."""
    if not autocast_anywhere():  # nearly always; of a device it takes several times as long to ask
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def lowered(dtype: torch.dtype, autocast: torch.dtype | None) -> torch.dtype:
    """Returns the type in which a layer with filters takes operands of a ``dtype``."""
    if autocast is None or dtype == torch.float64 or not dtype.is_floating_point:
        return dtype
    return autocast


PRODUCTS_PER_WEIGHT = 64
"""Counts the products that cost as much as moving one weight: cast, reorder, sum its gradient."""

SHARED_FROM = 1 << 18
"""Limits from how many weights (or equal products) on sharing saves ten times the messages."""


LEAST_FILTERS = 2
"""Limits the filters of a rank: one channel alone has no memory format, unlike the others'."""


@dataclass(frozen=True, slots=True)
class FilterShare:
    """Describes one rank's share of a layer's filters.

    It is the interval ``index`` of ``rows``, a cut of the weight's first dim, see
    `shard_parameter`. Its gradient comes from the losses of all ranks that share the layer, so that
    the average over ranks is the serial gradient. ``plan`` gathers the result with all channels,
    from what every rank computed.
    """

    rows: Cut
    index: int
    plan: ExchangePlan


def filter_share(
    x: Sharded, weight: torch.Tensor, output: Partition, dim: int
) -> FilterShare | None:
    """Finds this rank's share of a layer's filters; None where it computes all of them.

    Distribution scheme: 1. compute some channels of the result from the whole input, 2. gather
    them. Backward: 1. add up the gradients of these channels that the ranks have, 2. gradients of
    the share's weight and of the input, which sums over ranks as any gradient of equal copies.

    Args:
        x: the input, not cut in space.
        weight: (filters, ...), whole.
        output: what the layer makes; its ``dim`` are the filters.
    """
    scope = x.policy.scope
    if scope is None or not scope.is_open or registry.device_kind(x) != "cpu":
        return None  # a GPU computes such a layer in less time than a message takes
    return _lay_out_share(x.grid, output, dim, weight.shape)


@per_grid
def _lay_out_share(
    grid: Grid, output: Partition, dim: int, weight: torch.Size
) -> FilterShare | None:
    """Lays out the share along the axis with most ranks; the data axis has other samples."""
    products = output.box(grid.coords).size * math.prod(weight[1:])
    if weight.numel() + products // PRODUCTS_PER_WEIGHT < SHARED_FROM:
        return None
    free = [name for name in grid.extents if name != "data" and name not in output.axes]
    axis = max(free, key=lambda name: grid.extents[name], default=None)
    if axis is None or grid.extents[axis] == 1:
        return None
    cut = Cut.balanced(axis, output.shape[dim], grid.extents[axis])
    if min(hi - lo for lo, hi in cut.intervals) < LEAST_FILTERS:
        return None
    shared = output.with_dim(dim, output.shape[dim], cut)
    return FilterShare(cut, grid.coords[axis], plan_exchange(shared, output.cover, grid))
