"""The links of a chain, applied in one pass; their gradients in one or two."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hyperslab.comm import Communicator
from hyperslab.comm.collectives import reduce_in_place
from hyperslab.memory_format import dense, memory_format_of
from hyperslab.ops.chains.with_graph import chain_with_graph
from hyperslab.ops.kernels import fused  # noqa: F401 - registers the operators

_run = torch.ops.hyperslab


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Of a normalisation: mean and 1 / sqrt(var + eps) of every channel.

    Each (1, C), or (N, C) where every sample has its own, in float64; of ``pool`` neighbouring
    channels together, over ``count`` values of the ranks of ``group``.
    """

    mean: torch.Tensor
    invstd: torch.Tensor
    pool: int
    count: int
    eps: float
    group: Communicator | None


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """``pool(activation(x * scale + shift))``, as ``hyperslab::chain_forward`` takes it.

    ``slope``: of the activation below zero; ``pool``: extents of the tiles, of which the mean or
    the maximum is taken; ``dtype``: of the result. ``scale`` and ``shift`` are the statistics and
    the parameters of a normalisation.
    """

    dtype: torch.dtype
    statistics: Statistics | None = None
    scale: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    slope: float = 1.0
    pool: tuple[int, ...] = ()
    maximum: bool = False
    tensors: tuple[torch.Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        kept = () if self.scale is None or self.shift is None else (self.scale, self.shift)
        object.__setattr__(self, "tensors", kept)

    def forward(
        self,
        x: torch.Tensor,
        scale: torch.Tensor | None = None,
        shift: torch.Tensor | None = None,
        *,
        mark: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The result and, with ``mark``, what its gradient needs in place of ``x``."""
        return _run.chain_forward(
            x, scale, shift, self.slope, self.pool, self.maximum, mark, self.dtype
        )

    def after(self, done: Links) -> Links:
        """The links that are left when those of ``done`` are applied."""
        return Links(
            self.dtype,
            slope=self.slope if done.slope == 1 else 1.0,
            pool=() if done.pool else self.pool,
            maximum=self.maximum and not done.pool,
        )

    @property
    def leaves_marks(self) -> bool:
        """Whether the gradient needs more than ``x``, scale and shift."""
        return bool(self.pool and self.maximum) or (self.scale is None and self.slope != 1)


class ChainFunction(torch.autograd.Function):
    """The result of a chain, from the block, weight and bias of its normalisation, and its links.

    Kept are, with a normalisation, the block itself, which serial torch keeps too; without one, a
    bit an element. Distribution scheme of the backward pass: 1. local sums for weight, bias and
    statistics, 2. one all-reduce of them, 3. the block's gradient.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, links: Links):  # type: ignore[no-untyped-def]
        y, marks = links.forward(
            x, *links.tensors, mark=links.leaves_marks and any(ctx.needs_input_grad)
        )
        ctx.links = links
        ctx.format = memory_format_of(x)
        ctx.shape = x.shape
        ctx.dtype = x.dtype
        kept = x if links.statistics is not None else None
        ctx.save_for_backward(kept, weight, bias, marks if links.leaves_marks else None)
        return y

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        links = ctx.links
        statistics = links.statistics
        whole = statistics is None or statistics.group is None
        if torch.is_grad_enabled() and whole:
            return *chain_with_graph(ctx, gradient), None
        return *_backward(ctx, gradient), None


@once_differentiable
def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    links = ctx.links
    x, weight, _, marks = ctx.saved_tensors
    g = _in_format(gradient, ctx.format)
    marks = g.new_empty(0, dtype=torch.uint8) if marks is None else marks
    options = (links.slope, links.pool, links.maximum)
    needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
    b = c = dweight = dbias = None
    if links.statistics is not None:
        sums = _run.chain_backward_sums(g, marks, x, links.scale, links.shift, *options)
        of_shift, of_scale = sums_of_normalised(sums, links.statistics)
        dweight = of_scale.sum(0).to(weight.dtype) if needs_weight else None
        dbias = of_shift.sum(0).to(links.scale.dtype) if needs_bias else None
        if needs_x:
            b, c = through_statistics(of_shift, of_scale, weight, links.statistics)
    dx = None
    if needs_x:
        dx = _run.chain_backward(
            g, marks, x, links.scale, links.shift, b, c, *options, ctx.shape, ctx.dtype
        )
    return dx, dweight, dbias


def _in_format(gradient: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    if gradient.is_contiguous(memory_format=memory_format):
        return dense(gradient, memory_format)
    last = memory_format is not torch.contiguous_format
    return _run.reorder(gradient, last, gradient.dtype)


def sums_of_normalised(
    sums: torch.Tensor, statistics: Statistics
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of du and of du * xhat, from those of du and of du * x."""
    of_shift, of_product = sums.unbind()
    return of_shift, (of_product - of_shift * statistics.mean) * statistics.invstd


def through_statistics(
    of_shift: torch.Tensor,
    of_scale: torch.Tensor,
    weight: torch.Tensor | None,
    statistics: Statistics,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``b`` and ``c`` of the gradient ``scale * du + b * x + c``: its way through the statistics.

    With v = w du: dx = invstd * (v - mean of v - xhat * mean of v xhat).
    """
    sums = torch.stack([of_shift, of_scale])
    if weight is not None:
        sums *= weight
    if statistics.pool > 1:
        sums = sums.unflatten(2, (-1, statistics.pool)).sum(3)
    if statistics.group is not None:
        sums = reduce_in_place(sums, statistics.group, "the gradient of a normalisation")
    if statistics.pool > 1:
        sums = sums.repeat_interleave(statistics.pool, 2)
    of_mean, of_xhat = (sums * (statistics.invstd / -statistics.count)).unbind()
    b = of_xhat * statistics.invstd
    c = of_mean - b * statistics.mean
    return b.float(), c.float()
