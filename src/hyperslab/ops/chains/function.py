"""The links of a chain, applied in one pass; their gradients in one or two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hyperslab.comm import Communicator
from hyperslab.comm.collectives import reduce_in_place
from hyperslab.memory_format import dense, memory_format_of
from hyperslab.ops.chains.affine import Affine
from hyperslab.ops.chains.with_graph import chain_with_graph
from hyperslab.ops.common.room import Room
from hyperslab.ops.kernels import fused  # noqa: F401 - registers the operators
from hyperslab.ops.kernels.fused.layout import pooled_shape

_chain_forward = torch.ops.hyperslab.chain_forward.default
_chain_forward_into = torch.ops.hyperslab.chain_forward_into.default
_chain_backward = torch.ops.hyperslab.chain_backward.default
_chain_backward_sums = torch.ops.hyperslab.chain_backward_sums.default
_parameter_gradients = torch.ops.hyperslab.parameter_gradients.default
_through_statistics = torch.ops.hyperslab.through_statistics.default
_reorder = torch.ops.hyperslab.reorder.default


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Of a normalisation, as `hyperslab.ops.kernels.fused.statistics` has them.

    ``norm`` (3, R, C) and ``moments`` (4, R, C), where R is 1, or N where every sample has its own;
    of ``pool`` neighbouring channels together, over ``count`` values of the ranks of ``group``.
    """

    norm: torch.Tensor
    moments: torch.Tensor
    affine: Affine
    pool: int
    count: int
    eps: float
    group: Communicator | None


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """``pool(activation(normalised x))``, as ``hyperslab::chain_forward`` takes it.

    ``slope``: of the activation below zero; ``pool``: extents of the tiles, of which the mean or
    the maximum is taken; ``dtype``: of the result.
    """

    dtype: torch.dtype
    statistics: Statistics | None = None
    slope: float = 1.0
    pool: tuple[int, ...] = ()
    maximum: bool = False

    def activated(self, slope: float) -> Links:
        """With an activation behind what there is."""
        return Links(self.dtype, self.statistics, slope, self.pool, self.maximum)

    def pooled(self, pool: tuple[int, ...], maximum: bool, dtype: torch.dtype) -> Links:
        """With a pooling behind what there is."""
        return Links(dtype, self.statistics, self.slope, pool, maximum)

    def rounded(self, dtype: torch.dtype) -> Links:
        """With a result of another type."""
        return Links(dtype, self.statistics, self.slope, self.pool, self.maximum)

    def after(self, done: Links) -> Links:
        """The links that are left when those of ``done`` are applied."""
        return Links(
            self.dtype,
            slope=self.slope if done.slope == 1 else 1.0,
            pool=() if done.pool else self.pool,
            maximum=self.maximum and not done.pool,
        )

    def forward(
        self, x: torch.Tensor, *, mark: bool, room: Room | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The result and, with ``mark``, what its gradient needs in place of ``x``.

        With ``room`` it is made there, if it may be.
        """
        norm = None if self.statistics is None else self.statistics.norm
        y = None
        if room is not None:
            y = room.block(pooled_shape(x.shape, self.pool), self.dtype, memory_format_of(x))
        if y is None:
            return _chain_forward(x, norm, self.slope, self.pool, self.maximum, mark, self.dtype)
        return y, _chain_forward_into(x, norm, self.slope, self.pool, self.maximum, mark, y)

    @property
    def leaves_marks(self) -> bool:
        """Whether the gradient needs more than ``x`` and its statistics."""
        return bool(self.pool and self.maximum) or (self.statistics is None and self.slope != 1)


class ChainFunction(torch.autograd.Function):
    """The result of a chain, from the block, weight and bias of its normalisation, and its links.

    Kept are, with a normalisation, the block itself, which serial torch keeps too; without one, a
    bit an element. Distribution scheme of the backward pass: 1. local sums for weight, bias and
    statistics, 2. one all-reduce of them, 3. the block's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        links: Links,
        room: Room | None = None,
    ) -> torch.Tensor:
        marked = links.leaves_marks
        y, marks = links.forward(x, mark=marked and any(ctx.needs_input_grad), room=room)
        ctx.links = links
        ctx.format = memory_format_of(x)
        ctx.shape = x.shape
        ctx.dtype = x.dtype
        ctx.save_for_backward(None if links.statistics is None else x, marks if marked else None)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        statistics = ctx.links.statistics
        if statistics is not None:
            statistics.affine.check_unchanged()
        whole = statistics is None or statistics.group is None
        if torch.is_grad_enabled() and whole:
            return *chain_with_graph(ctx, gradient), None, None
        return *_backward(ctx, gradient), None, None


@once_differentiable
def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    links = ctx.links
    statistics = links.statistics
    x, marks = ctx.saved_tensors
    g = _in_format(gradient, ctx.format)
    marks = g.new_empty(0, dtype=torch.uint8) if marks is None else marks
    options = (links.slope, links.pool, links.maximum)
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    norm = through = dweight = dbias = dx = None
    if statistics is not None:
        norm = statistics.norm
        sums = _chain_backward_sums(g, marks, x, norm, *options)
        numbers = (norm, statistics.moments)
        parameters, shared = _parameter_gradients(sums, *numbers, statistics.pool)
        dweight = parameters[0] if needs_weight else None
        dbias = parameters[1] if needs_bias else None
        if needs_x:
            if statistics.group is not None:
                what = "the gradient of a normalisation"
                shared = reduce_in_place(shared, statistics.group, what)
            through = _through_statistics(shared, *numbers, statistics.count, statistics.pool)
    if needs_x:
        dx = _chain_backward(g, marks, x, norm, through, *options, ctx.shape, ctx.dtype)
    return dx, dweight, dbias


def _in_format(gradient: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    if gradient.is_contiguous(memory_format=memory_format):
        return dense(gradient, memory_format)
    last = memory_format is not torch.contiguous_format
    return _reorder(gradient, last, gradient.dtype)
