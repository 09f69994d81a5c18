"""Interpolation weights along one dim, of which every output has a few; asked of torch itself.

Where torch samples, and how it weighs, follows from rounded arithmetic that differs between types,
devices and modes. None of it is repeated here: torch's own operator answers to combs of ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hyperslab.geometry import Cut, Interval, scale_cut

REACH = 5
"""How far an output reads to each side, in inputs or, where the map shrinks, in outputs: at most.

The widest filter of torch, Lanczos, has 3; half an output more is the alignment of the corners.
"""


@dataclass(frozen=True, slots=True, eq=False)
class InterpolationWeights:
    """Output ``o`` is the sum over ``k`` of ``weight[k, o] * input[index[k, o]]``.

    Without ``weight`` it is the copy of one input. ``back`` has the inputs that the gradient goes
    to: ``index``, but for the rare copies where torch rounds otherwise in its backward pass. All
    are of shape (taps, outputs). Weights of zero are those that torch multiplies by, too: they
    make NaN of infinities.
    """

    index: torch.Tensor
    back: torch.Tensor
    weight: torch.Tensor | None

    def of(self, out: Interval, origin: int) -> InterpolationWeights:
        """Those of the outputs ``out``, for a block that begins at the input ``origin``."""
        these = (slice(None), slice(*out))
        weight = self.weight if self.weight is None else self.weight[these]
        return InterpolationWeights(self.index[these] - origin, self.back[these] - origin, weight)

    def copies_as(self, other: InterpolationWeights) -> bool:
        """Whether both copy the same inputs."""
        return (
            self.weight is None
            and other.weight is None
            and torch.equal(self.index, other.index)
            and torch.equal(self.back, other.back)
        )


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """The window map of an interpolation: the ``first`` and the ``last`` input of every output.

    Of several taps it spans all that any of them touches. Blocks of one tensor may lie in memory
    in different ways, and so have different taps, but all ranks must expect the same messages.
    Of none it stands for a dim that is not cut.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]

    @staticmethod
    def of(several: Sequence[InterpolationWeights]) -> ReadSpan:
        if not several:
            return ReadSpan((), ())
        touched = torch.cat([t for taps in several for t in (taps.index, taps.back)])
        return ReadSpan(tuple(touched.amin(0).tolist()), tuple(touched.amax(0).tolist()))

    def reads(self, out: Interval) -> Interval:
        """Inputs that the outputs ``out`` read, or that get their gradient."""
        return min(self.first[slice(*out)]), max(self.last[slice(*out)]) + 1

    def cut_outputs(self, cut: Cut, outputs: int) -> Cut:
        """The cut of the outputs, in proportion."""
        return scale_cut(cut, outputs)


RowOperator = Callable[[torch.Tensor], torch.Tensor]
"""Of rows, one by one."""


def find_weights(
    operator: RowOperator, within: RowOperator, like: torch.Tensor, outputs: int
) -> InterpolationWeights:
    """The taps of an operator from (N, inputs) to (N, outputs), for rows like ``like`` (inputs).

    A comb has a tooth at every ``period``-th input, so far apart that an output meets one of them
    at most. ``within``: the operator on rows in a volume of zeros, times any number but zero.
    """
    extent = like.shape[0]
    reach = math.ceil(REACH * max(1.0, extent / outputs)) + 1
    period = 2 * reach + 1
    residues = torch.arange(extent, device=like.device) % period
    combs = torch.nn.functional.one_hot(residues, period).T.to(like.dtype)
    infinite = within(combs.masked_fill(combs > 0, math.inf))
    index, weight = _teeth(operator(combs), infinite.isnan(), extent, reach)
    if weight.shape[0] > 1 or not bool((weight == 1).all()):
        return InterpolationWeights(index, index, weight)
    return InterpolationWeights(index, _where_gradients_go(operator, like), None)


def _teeth(
    answer: torch.Tensor, void: torch.Tensor, extent: int, reach: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which teeth the outputs of an ``answer`` (period, outputs) met, and with which weights.

    ``void``: where infinite teeth became NaN, which is where one was multiplied by zero.
    """
    period, outputs = answer.shape
    o = torch.arange(outputs, device=answer.device)
    near = o * extent // outputs
    inputs = near + torch.arange(-reach, reach + 1, device=answer.device)[:, None]
    inside = (inputs >= 0) & (inputs < extent)
    weights = answer[inputs % period, o] * inside
    assert torch.allclose(weights.sum(0), answer.sum(0)), "an output reads beyond the reach"
    used = torch.cat([weights != 0, void[inputs % period, o] & inside])
    order = torch.argsort(used.int(), dim=0, descending=True, stable=True)
    count = used.sum(0)
    order = order[: int(count.max())]
    index = torch.cat([inputs, inputs]).gather(0, order)
    weight = torch.cat([weights, torch.zeros_like(weights)]).gather(0, order)
    for tap in range(1, len(order)):  # who has fewer gets its last one in two halves
        split = tap >= count
        index[tap] = torch.where(split, index[tap - 1], index[tap])
        half = weight[tap - 1] / 2
        weight[tap] = torch.where(split, half, weight[tap])
        weight[tap - 1] = torch.where(split, half, weight[tap - 1])
    return index, weight


def _where_gradients_go(operator: RowOperator, like: torch.Tensor) -> torch.Tensor:
    """The input that gets each output's gradient, in order: (1, outputs)."""
    with torch.inference_mode(False), torch.enable_grad():
        row = torch.zeros_like(like)[None].requires_grad_()
        (counts,) = torch.autograd.grad(operator(row).sum(), row)
    inputs = torch.arange(like.shape[0], device=like.device)
    return inputs.repeat_interleave(counts[0].long())[None]


class ApplyWeights(torch.autograd.Function):
    """Apply them along one dim of a block: a pass over the output for every tap."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, taps: InterpolationWeights) -> torch.Tensor:
        ctx.dim = dim
        ctx.taps = taps
        ctx.extent = x.shape[dim]
        if taps.weight is None:
            return x.index_select(dim, taps.index[0])
        first, *others = zip(taps.index, _along(taps.weight, dim, x.dim()), strict=True)
        out = x.index_select(dim, first[0]).mul_(first[1])
        for index, weight in others:
            out.addcmul_(x.index_select(dim, index), weight)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _ApplyAdjoint.apply(gradient, ctx.dim, ctx.taps, ctx.extent), None, None


class _ApplyAdjoint(torch.autograd.Function):
    """The adjoint of `ApplyWeights`: an output's gradient, weighted, goes to its inputs."""

    @staticmethod
    def forward(
        ctx: Any, gradient: torch.Tensor, dim: int, taps: InterpolationWeights, extent: int
    ) -> torch.Tensor:
        ctx.dim = dim
        ctx.taps = taps
        shape = list(gradient.shape)
        shape[dim] = extent
        out = gradient.new_zeros(shape)
        if taps.weight is None:
            return out.index_add_(dim, taps.back[0], gradient)
        for index, weight in zip(taps.back, _along(taps.weight, dim, out.dim()), strict=True):
            out.index_add_(dim, index, gradient * weight)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ApplyWeights.apply(gradient, ctx.dim, ctx.taps), None, None, None


def _along(weight: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """Weights (taps, outputs) for one dim of ``n``: (taps, 1, ..., outputs, ..., 1)."""
    return weight.view(-1, *(weight.shape[1] if d == dim else 1 for d in range(n)))
