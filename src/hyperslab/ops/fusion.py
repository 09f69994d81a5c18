"""Defers normalisation, activation and pooling of a tensor until needed, and runs them in one pass.

In reading order: weight and bias of a normalisation, as they were when it was called; the
gradient out of operators that can be differentiated again, for ``create_graph``; `EpilogueOps`,
which `EpilogueFunction` applies in one pass, their gradients in one or two; `FusedEpilogue`,
what is still to be done with a block before somebody looks at it; and the statistics of a block
over several ranks, in one pass and one all-reduce.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.comm import Communicator, all_reduce_sum
from hyperslab.errors import LayoutError
from hyperslab.geometry import Partition
from hyperslab.kernels.compile import TYPE_CODES
from hyperslab.kernels.memory_format import (
    HaloPaddedBuffer,
    as_float32,
    dense,
    dense_as_it_lies,
    memory_format_of,
    pooled_shape,
)
from hyperslab.kernels.registry import OPERATORS, device_kind
from hyperslab.tensor import Sharded
from hyperslab.tensor.deferred import recording
from hyperslab.util.torch_internals import BlockFunction, record_graph, version_of


@dataclass(slots=True, eq=False)
class Affine:
    """Holds weight and bias (C), half precision cast to float32 with graph; each may be None.

    ``given`` is the weight that the caller gave, and ``version`` what its memory had then. Torch
    keeps the weight for the backward pass, and so a caller may not change it before that; where it
    keeps a copy (``copied``: instance norm) he may. It never keeps the bias.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    given: torch.Tensor | None
    version: int
    copied: bool

    @staticmethod
    def of(
        weight: torch.Tensor | None, bias: torch.Tensor | None, *, copied: bool = False
    ) -> Affine:
        version = 0 if weight is None or weight.is_inference() else version_of(weight)
        return Affine(as_float32(weight), as_float32(bias), weight, version, copied)

    @property
    def requires_grad(self) -> bool:
        return any(p is not None and p.requires_grad for p in (self.weight, self.bias))

    @property
    def changed(self) -> bool:
        """Returns whether the weight was changed in place since the call."""
        given = self.given
        return given is not None and not given.is_inference() and version_of(given) != self.version

    def check_unchanged(self) -> None:
        """Refuses to compute a gradient where torch refuses it."""
        if self.copied or not self.changed:
            return
        assert self.given is not None
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: the weight {list(self.given.shape)} of a normalisation is at version "
            f"{version_of(self.given)}; expected version {self.version} instead\n    change it "
            "after the backward pass"
        )


def epilogue_backward_with_graph(ctx: Any, gradient: torch.Tensor) -> Sequence[torch.Tensor | None]:
    """Computes differentiable gradients of block, weight and bias of an `EpilogueFunction`.

    Without a normalisation the result depends on the block by what was marked alone: the gradient
    is linear in ``gradient``, with factors that are the gradient of ones.
    """
    links = ctx.links
    x, marks = ctx.saved_tensors
    if links.statistics is not None:
        # Views, as of parameters themselves the gradient would be that of all ranks.
        weight, bias = (
            None if one is None else one.view_as(one) for one in _parameters_then(links.statistics)
        )
        inputs = [x, weight, bias]
        wanted = [i for i, t in enumerate(inputs) if t is not None and ctx.needs_input_grad[i]]
        y = composite_epilogue(x, weight, bias, links)
        found = torch.autograd.grad(y, [inputs[i] for i in wanted], gradient, create_graph=True)
        return [found[wanted.index(i)] if i in wanted else None for i in range(3)]
    ones = torch.ones_like(gradient, dtype=torch.float32, memory_format=ctx.format)
    marks = ones.new_empty(0, dtype=torch.uint8) if marks is None else marks
    options = (links.slope, links.pool, links.maximum, ctx.shape, torch.float32)
    factors = torch.ops.hyperslab.chain_backward(ones, marks, None, None, None, *options)
    spread = as_float32(gradient)
    for dim, k in enumerate(links.pool, start=2):
        spread = spread.repeat_interleave(k, dim)
    # Torch passes nothing on where the factor is zero, also of infinities.
    return (spread.masked_fill(factors == 0, 0) * factors).to(ctx.dtype), None, None


def _parameters_then(statistics: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Restores weight and bias as they were at the call, whatever became of them since.

    The weight with its graph; no gradient of a gradient depends on the bias.
    """
    mean, _, invstd, scale = statistics.moments[:, 0].unbind()
    rounded, _, shift = statistics.norm[:, 0].unbind()
    weight = statistics.affine.weight
    bias = statistics.affine.bias
    if weight is not None and statistics.affine.changed:
        weight = weight + ((scale / invstd).to(weight.dtype) - weight).detach()
    if bias is not None:
        bias = (shift + (mean - rounded) * scale).to(bias.dtype).requires_grad_()
    return weight, bias


def composite_epilogue(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, links: Any
) -> torch.Tensor:
    """Computes the epilogue by torch's own operators, statistics included."""
    s = links.statistics
    of_batch = s.norm.shape[1] == 1 and s.over.pool in (None, 1)
    y = normalised_with_graph(as_float32(x), weight, bias, s.over, s.eps, of_batch=of_batch)
    if links.slope != 1:
        y = F.relu(y) if links.slope == 0 else F.leaky_relu(y, links.slope)
    if links.pool:
        pool = getattr(F, f"{'max' if links.maximum else 'avg'}_pool{len(links.pool)}d")
        y = pool(y, links.pool)
    return y.to(links.dtype)


NoteMoments = Callable[[torch.Tensor], None]
"""Takes moments, mean and biased variance first: to running statistics."""


def normalised_with_graph(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    over: Population,
    eps: float,
    *,
    of_batch: bool,
    note: NoteMoments | None = None,
) -> torch.Tensor:
    """Normalises groups of channels, of each sample or ``of_batch``, by torch's own operators.

    ``note`` gets the means and the biased variances, (2, 1 or N, groups), before anything is
    normalised: a checkpoint may go no further when it runs this again.
    """
    groups = x.unflatten(1, (-1, over.pool or 1))
    dims = list(range(2, groups.dim()))
    mean, var = moments_over_ranks(groups, [0, *dims] if of_batch else dims, over)
    if note is not None:
        note(torch.stack([mean.flatten(1), var.flatten(1)]).detach())
    y = ((groups - mean) * (var + eps).rsqrt()).flatten(1, 2)
    shape = [1, -1] + [1] * (x.dim() - 2)
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


def moments_over_ranks(
    x: torch.Tensor, dims: Sequence[int], over: Population
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes mean and biased variance over dims and ranks, which stay as extents of 1.

    Differentiable. Ranks add up in float64: for blocks of single precision E[x²] − E[x]², whose
    cancellation there is far below their resolution; for those of float64 squares around the common
    mean (Chan et al. 1979), which takes a second all-reduce.
    """
    if adds_up_moments(x, dims):
        mean, var = _BlockMoments.apply(x, tuple(dims))
    else:
        var, mean = torch.var_mean(x, list(dims), correction=0, keepdim=True)
    if over.group is None:
        return mean, var
    share = math.prod(x.shape[dim] for dim in dims) / over.count
    what = "the mean and the variance over ranks"
    wide = mean.double()
    if x.dtype == torch.float64:
        total = all_reduce_sum(wide * share, over.group, what)
        spread = all_reduce_sum((var + (wide - total).square()) * share, over.group, what)
    else:
        both = torch.stack([wide, var.double() + wide.square()]) * share
        total, square = all_reduce_sum(both, over.group, what)
        spread = (square - total.square()).clamp_min(0)
    return total.to(x.dtype), spread.to(x.dtype)


def adds_up_moments(x: torch.Tensor, dims: Sequence[int]) -> bool:
    """Tells if `channel_sums` makes the moments of a block: over all but channels or the last dims.

    In C on the CPU, where torch's ``var_mean`` goes from element to element, as Welford has it, and
    takes up to thirty times as long. Both are alike exact up to means of a thousand deviations.
    """
    if not (x.is_cpu and x.dtype == torch.float32 and x.numel() and len(dims)):
        return False
    if not channel_sums.runs_in_c():
        return False
    if x.dim() > 2 and tuple(dims) == (0, *range(2, x.dim())):
        return True
    return tuple(dims) == tuple(range(x.dim() - len(dims), x.dim())) and x.is_contiguous()


class _BlockMoments(BlockFunction):
    """Computes mean and biased variance of a block, see `adds_up_moments`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dims: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        shape = [1 if dim in dims else extent for dim, extent in enumerate(x.shape)]
        rows = math.prod(shape)
        ctx.count = x.numel() // rows
        of_rows = dims[-1] - dims[0] < len(dims)
        sums = channel_sums(x.view(rows, 1, -1), 1) if of_rows else channel_sums(x, 0)
        mean, square, around = sums / ctx.count
        # Of the means of parts, each of which has its own sums; rounding alone where there is one.
        between = square - mean.square()
        var = torch.where(between > 2**-48 * square, around + between, around)
        mean, var = torch.stack([mean, var]).to(x.dtype).view(2, *shape)
        ctx.save_for_backward(x, mean)
        return mean, var

    @staticmethod
    def backward(ctx: Any, of_mean: Any, of_var: Any) -> tuple[torch.Tensor, None]:
        x, mean = ctx.saved_tensors
        slope = of_var * (2 / ctx.count)
        return torch.addcmul(of_mean / ctx.count, x - mean, slope), None


chain_forward = OPERATORS["chain_forward"]
chain_forward_into = OPERATORS["chain_forward_into"]
chain_backward = OPERATORS["chain_backward"]
chain_backward_sums = OPERATORS["chain_backward_sums"]
channel_sums = OPERATORS["channel_sums"]
normalisation = OPERATORS["normalisation"]
running_statistics = OPERATORS["running_statistics"]
parameter_gradients = OPERATORS["parameter_gradients"]
through_statistics = OPERATORS["through_statistics"]
reorder = OPERATORS["reorder"]


@dataclass(frozen=True, slots=True)
class Population:
    """Describes the values of one mean: ``count`` values on the ranks of ``group``.

    Of a channel over batch and space; with ``pool``, of so many neighbouring channels of a sample.
    """

    count: int
    group: Communicator | None
    pool: int | None = None


@dataclass(slots=True, eq=False)
class Statistics:
    """Holds a normalisation's statistics as `hyperslab.kernels.normalization` computes them.

    ``norm`` (3, R, C) and ``moments`` (4, R, C), where R is 1, or N where every sample has its own.
    """

    norm: torch.Tensor
    moments: torch.Tensor
    affine: Affine
    over: Population
    eps: float

    def gradients(
        self, sums: torch.Tensor | None, needs_x: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns the gradients of weight and bias, and what goes to the block, if it is needed.

        ``sums`` are those of this rank's backward pass; those of all ranks take one all-reduce.
        """
        pool = self.over.pool or 1
        weight, bias, shared = parameter_gradients(sums, self.norm, self.moments, pool)
        if not needs_x:
            return weight, bias, None
        if self.over.group is not None:
            shared = self.over.group.sum_in_place(shared, "the gradient of a normalisation")
        count = self.over.count
        return weight, bias, through_statistics(shared, self.norm, self.moments, count, pool)


@dataclass(slots=True, eq=False)
class EpilogueOps:
    """Describes ``pool(activation(normalised x))`` as ``hyperslab::chain_forward`` takes it.

    ``slope``: of the activation below zero; ``pool``: extents of the tiles, of which the mean or
    the maximum is taken; ``dtype``: of the result.
    """

    dtype: torch.dtype
    statistics: Statistics | None = None
    slope: float = 1.0
    pool: tuple[int, ...] = ()
    maximum: bool = False

    @property
    def parameters(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self.statistics is None:
            return None, None
        return self.statistics.affine.weight, self.statistics.affine.bias

    @property
    def empty(self) -> bool:
        """Returns whether nothing is done but, perhaps, a change of type."""
        return self.statistics is None and self.takes_activation

    @property
    def takes_activation(self) -> bool:
        return self.slope == 1 and not self.pool

    def rounded(self, dtype: torch.dtype) -> EpilogueOps:
        return EpilogueOps(dtype, self.statistics, self.slope, self.pool, self.maximum)

    def after(self, done: EpilogueOps) -> EpilogueOps:
        """Returns the operators that are left when those of ``done`` are applied."""
        return EpilogueOps(
            self.dtype,
            self.statistics if done.statistics is None else None,
            slope=self.slope if done.slope == 1 else 1.0,
            pool=() if done.pool else self.pool,
            maximum=self.maximum and not done.pool,
        )

    def forward(
        self,
        x: torch.Tensor,
        memory_format: torch.memory_format,
        *,
        mark: bool,
        padded: HaloPaddedBuffer | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the result and, with ``mark``, what its gradient needs in place of ``x``.

        ``memory_format`` is that of ``x``. With ``padded`` it is made there, if it may be.
        """
        norm = None if self.statistics is None else self.statistics.norm
        y = None
        if padded is not None:
            y = padded.block(pooled_shape(x.shape, self.pool), self.dtype, memory_format)
        if y is None:
            return chain_forward(x, norm, self.slope, self.pool, self.maximum, mark, self.dtype)
        return y, chain_forward_into(x, norm, self.slope, self.pool, self.maximum, mark, y)

    @property
    def leaves_marks(self) -> bool:
        """Returns whether the gradient needs more than ``x`` and its statistics."""
        return bool(self.pool and self.maximum) or (self.statistics is None and self.slope != 1)


class EpilogueFunction(BlockFunction):
    """Applies an epilogue to a block with the weight and bias of its normalisation.

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
        links: EpilogueOps,
        padded: HaloPaddedBuffer | None = None,
    ) -> torch.Tensor:
        marked = links.leaves_marks
        ctx.format = kept = memory_format_of(x)
        y, marks = links.forward(x, kept, mark=marked and any(ctx.needs_input_grad), padded=padded)
        ctx.links = links
        ctx.shape = x.shape
        ctx.dtype = x.dtype
        ctx.unmarked = None if marked else marks  # nothing
        ctx.save_for_backward(None if links.statistics is None else x, marks if marked else None)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        links = ctx.links
        statistics = links.statistics
        if statistics is not None:
            statistics.affine.check_unchanged()
        if torch.is_grad_enabled():
            return *epilogue_backward_with_graph(ctx, gradient), None, None
        x, marks = ctx.saved_tensors
        g = in_format(gradient, ctx.format)
        marks = ctx.unmarked if marks is None else marks
        options = (links.slope, links.pool, links.maximum)
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        norm = through = dweight = dbias = dx = None
        if statistics is not None:
            norm = statistics.norm
            sums = chain_backward_sums(g, marks, x, norm, *options)
            weight, bias, through = statistics.gradients(sums, needs_x)
            dweight = weight if needs_weight else None
            dbias = bias if needs_bias else None
        if needs_x:
            dx = chain_backward(g, marks, x, norm, through, *options, ctx.shape, ctx.dtype)
        return dx, dweight, dbias, None, None


def in_format(gradient: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """Returns a gradient as kernels take it that are told the format beside it."""
    if gradient.is_contiguous(memory_format=memory_format):
        return dense(gradient, memory_format)
    last = memory_format is not torch.contiguous_format
    return reorder(gradient, last, gradient.dtype)


def has_kernels(x: Sharded) -> bool:
    """Returns whether there are fused kernels for tensors of this type and so many dims."""
    return x.dtype in TYPE_CODES and 3 <= len(x.partition.shape) <= 5


KEPT_UP_TO = 1 << 16
"""Limits the elements of a block that is saved although it could be recomputed."""


@dataclass(slots=True, eq=False)
class FusedEpilogue:
    """Defers operators on the block of ``source``; see the note in `hyperslab.tensor.deferred`.

    ``version``: that of the block when the chain was begun; ``with_graph``: whether gradients were
    wanted then.
    """

    source: Sharded
    block: Any
    version: int
    links: EpilogueOps
    with_graph: bool
    padded: HaloPaddedBuffer | None = None
    """Receives the result, if set."""
    parents: tuple[tuple[weakref.ref[Sharded], EpilogueOps], ...] = ()
    """Lists the tensors that this epilogue continues, with their operators."""

    # Constructors are called as they are, and nothing here is frozen: `dataclasses.replace` takes
    # three times as long, a frozen class four times, and every layer of a network comes by here.
    def linked(
        self,
        *,
        dtype: torch.dtype | None = None,
        statistics: Statistics | None = None,
        slope: float = 1.0,
        pool: tuple[int, ...] = (),
        maximum: bool = False,
    ) -> FusedEpilogue:
        """Appends operators to those that are deferred, which have none of this kind yet."""
        old = self.links
        self.links = EpilogueOps(
            dtype or old.dtype,
            statistics or old.statistics,
            old.slope if slope == 1 else slope,
            pool or old.pool,
            maximum or old.maximum,
        )
        return self

    def taken_over(self, x: Sharded) -> FusedEpilogue:
        """Continues the epilogue of ``x`` for the next tensor."""
        parents = (*self.parents, (weakref.ref(x), self.links))
        return type(self)(
            self.source, self.block, self.version, self.links, self.with_graph, None, parents
        )

    @property
    def sources(self) -> list[Sharded]:
        """Lists the tensors it is computed from: the source, or a parent that is still held."""
        if not self.parents:
            return [self.source]
        return [self.source, *[parent for parent, _ in self._alive()]]

    def _alive(self) -> list[tuple[Sharded, EpilogueOps]]:
        return [(parent, links) for ref, links in self.parents if (parent := ref()) is not None]

    @property
    def dtype(self) -> torch.dtype:
        return self.links.dtype

    @property
    def wants_gradient(self) -> bool:
        if not self.with_graph:
            return False
        if self.block.requires_grad:
            return True
        statistics = self.links.statistics
        return statistics is not None and statistics.affine.requires_grad

    @property
    def goes_on(self) -> bool:
        """Returns whether the next operator may join, which wants gradients as this one does."""
        return self.with_graph == torch.is_grad_enabled()

    @property
    def can_wait(self) -> bool:
        """Returns whether nobody can change the source unnoticed until the result is computed."""
        return self.source.private and self.wants_gradient

    @property
    def recomputable(self) -> bool:
        """Returns whether the result may be recomputed from what its normalisation saves anyway.

        But for a small one, which is kept in less time.
        """
        links = self.links
        large = self.block.numel() > KEPT_UP_TO
        return large and links.statistics is not None and not links.pool and not self._alive()

    def value(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Computes the result with its graph; in another type it is rounded once, to that one."""
        self.check_unchanged()
        links = self.links if dtype is None else self.links.rounded(dtype)
        with recording(self.with_graph):
            for parent, done in reversed(self._alive() if self.parents else ()):
                # Who holds it may watch its gradient, or ask for it: it has to be in the graph.
                rest = links.after(done)
                block = dense_as_it_lies(parent.block)
                return EpilogueFunction.apply(block, *rest.parameters, rest, self.padded)
            return self.computed(links)

    def check_unchanged(self) -> None:
        if not self.block.is_inference() and version_of(self.block) != self.version:
            raise LayoutError(
                f"{self.source.partition} was changed in place after an operator had read it whose "
                "result was not computed yet\n    change x.local, or a clone(), instead of an "
                "alias that was taken before"
            )

    def computed(self, links: EpilogueOps) -> torch.Tensor:
        return EpilogueFunction.apply(self.block, *links.parameters, links, self.padded)


@dataclass(frozen=True, slots=True, eq=False)
class RecomputedEpilogue:
    """Saves an operand for the backward pass as the tensors it is recomputed from.

    ``tensors``: the block that a normalisation keeps, too.
    """

    tensors: tuple[torch.Tensor | None, ...]
    links: EpilogueOps

    def value(
        self, tensors: tuple[torch.Tensor | None, ...], padded: HaloPaddedBuffer | None = None
    ) -> torch.Tensor:
        """Computes the operand once more; with a graph where one is recorded."""
        (block,) = tensors
        assert block is not None
        if torch.is_grad_enabled():
            return EpilogueFunction.apply(block, *self.links.parameters, self.links)
        y, _ = self.links.forward(block, memory_format_of(block), mark=False, padded=padded)
        return y


LAUNCH_BOUND = 1 << 17
"""Limits the elements of a rank's block for which a GPU starts kernels longer than it runs them."""


def is_launch_bound(x: Sharded) -> bool:
    """Returns whether torch's own operators take less time than an epilogue; all ranks say so.

    On a GPU the host is then the limit, and an epilogue with its statistics takes it several times
    as long.
    """
    if device_kind(x) != "cuda":
        return False
    return math.prod(x.partition.shape) <= LAUNCH_BOUND * x.grid.size


def begin_epilogue(x: Sharded) -> FusedEpilogue | None:
    """Returns the epilogue that an operator on ``x`` continues; None where no kernel takes it.

    The one that is pending there, or a new one without links. All ranks decide alike: a node of
    the graph that is made at another time would let them send in another order.
    """
    if isinstance(x.pending, FusedEpilogue):
        if x.pending.goes_on:
            return x.pending.taken_over(x)
        x.force()  # what goes on without gradients must not have the graph of what is pending
    partition = x.partition
    if partition.thin or 0 in partition.shape or not has_kernels(x):
        return None
    block = dense_as_it_lies(x.block)
    version = 0 if block.is_inference() else version_of(block)
    return FusedEpilogue(x, block, version, EpilogueOps(block.dtype), torch.is_grad_enabled())


def epilogue_result(chain: FusedEpilogue, like: Sharded, partition: Partition) -> Sharded:
    """Defers a rule's result where nobody can change the source unnoticed, else computes it."""
    if chain.can_wait:
        return like.will_be(chain, partition)
    return like.like(chain.value(), partition, fresh=True)


def conv_operand(
    x: Sharded, dtype: torch.dtype, padded: HaloPaddedBuffer | None = None
) -> tuple[torch.Tensor, RecomputedEpilogue | None]:
    """Returns the block as a convolution takes it, and how to recompute it for the backward pass.

    What is pending is computed in ``dtype`` at once where there is a ``padded`` buffer.
    """
    chain = x.recipe
    if not isinstance(chain, FusedEpilogue):
        return x.block, None
    if x.pending is None:
        block = x.block
    elif dtype != chain.dtype:
        chain.padded = padded
        block = chain.value(dtype)
        x.mark_as_bypassed("an operator under autocast took in another type")
    else:
        chain.padded = padded
        block = x.block
    if not chain.recomputable:
        return block, None
    return block, RecomputedEpilogue((chain.block,), chain.links.rounded(block.dtype))


def statistics_of(
    x: Any, over: Population, affine: Affine, eps: float, note: NoteMoments | None = None
) -> Statistics:
    """Computes the statistics of every channel, or of every sample's, with ``affine`` after them.

    ``x`` is a block, or one that has not been computed and knows its ``channel_sums`` all the same.
    Sums are of float64, so that E[x²] − E[x]² loses nothing that a block of single or half
    precision resolves. ``note`` gets the moments.
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
    graph = torch.is_grad_enabled()
    record_graph(False)
    try:
        groups = 0 if over.pool is None else channels // pool
        sums = channel_sums(x, groups) if isinstance(x, torch.Tensor) else x.channel_sums(groups)
        if over.group is not None:
            sums = over.group.sum_in_place(sums, "the statistics of a normalisation")
        norm, moments = normalisation(sums, weight, bias, over.count, eps, channels, pool)
        if note is not None:
            note(moments)
    finally:
        record_graph(graph)
    return Statistics(norm, moments, affine, over, eps)
