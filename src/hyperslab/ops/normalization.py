"""Distributes batch, group, instance, layer and local response normalisation.

`Normalise` and `combine_moments` merge statistics over several ranks; then come the
operators. Batch, instance and group norm run as a fused epilogue where kernels exist
(`hyperslab.ops.fusion`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.comm import Communicator, Grid, per_grid
from hyperslab.comm.collectives import all_reduce_sum
from hyperslab.errors import LayoutError
from hyperslab.geometry import Partition
from hyperslab.kernels.memory_format import (
    HALF,
    as_float32,
    dense,
    memory_format_of,
    with_gradient_in,
)
from hyperslab.kernels.moments import local_moments
from hyperslab.ops.fusion import (
    EPILOGUE_DTYPES,
    Affine,
    Population,
    Statistics,
    begin_epilogue,
    epilogue_result,
    is_launch_bound,
    moments_with_graph,
    normalised_with_graph,
    statistics_of,
)
from hyperslab.ops.overloads import Operator, result_type
from hyperslab.ops.placement import with_whole
from hyperslab.ops.reductions import (
    Dims,
    group_over,
    norm_block,
    reduced_dims,
    without_empty_shards,
)
from hyperslab.ops.slabs import SlabEpilogue
from hyperslab.tensor import Sharded, register
from hyperslab.util.torch_internals import BlockFunction


class Normalise(BlockFunction):
    """Computes ``(x - mean) / sqrt(var + eps) * weight + bias`` of a block (N, K, ...space).

    The statistics are those of ``over.pool`` neighbouring channels each, over N, space and the
    ranks of ``over.group``. Returns the block, and mean and biased variance (K).

    Distribution scheme: 1. compute local mean and variance, 2. all-reduce both in one message (two
    in float64), 3. normalise the block. Backward: 1. compute the sums of dy and of dy * xhat per
    channel, 2. all-reduce both in one message, 3. compute the block's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        over: Population,
    ) -> tuple[torch.Tensor, ...]:
        x = dense(x, memory_format_of(x))
        pool = over.pool or 1
        mean, var = local_moments(x.unflatten(1, (-1, pool)))
        if over.group is not None:
            share = x.numel() / mean.numel() / over.count
            exact = x.dtype == torch.float64
            mean, var = combine_moments(mean, var, share, over.group, exact=exact)
        mean, var = mean.repeat_interleave(pool), var.repeat_interleave(pool)
        y = F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)
        ctx.eps = eps
        ctx.over = over
        ctx.save_for_backward(x, weight, mean, var)
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor, _mean: torch.Tensor | None, _var: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, var = ctx.saved_tensors
        if torch.is_grad_enabled():  # with create_graph
            y = normalised_with_graph(x, weight, None, ctx.over, ctx.eps, of_batch=True)
            needs = ctx.needs_input_grad[:2]
            wanted = [t for t, needed in zip((x, weight), needs, strict=True) if needed]
            found = iter(torch.autograd.grad(y, wanted, gradient, create_graph=True))
            both = [next(found) if needed else None for needed in needs]
            dbias = gradient.sum([0, *range(2, x.dim())]) if ctx.needs_input_grad[2] else None
            return *both, dbias, None, None
        gradient = dense(gradient, memory_format_of(x))
        # For fixed statistics: the input's gradient and the sums of dy * xhat and of dy.
        scale = weight if weight is not None else torch.ones_like(mean)
        dx, dxhat, db = torch.ops.aten.native_batch_norm_backward(
            gradient, x, scale, mean, var, None, None, False, ctx.eps, [True, True, True]
        )
        if ctx.needs_input_grad[0]:
            sums = torch.stack([db, dxhat]) * (1 if weight is None else weight.to(mean.dtype))
            over = ctx.over
            pool = over.pool or 1
            sums = sums.unflatten(1, (-1, pool)).sum(2)
            if over.group is not None:
                sums = over.group.sum_in_place(sums, "the gradient of a normalisation")
            sums = sums.repeat_interleave(pool, 1) / over.count
            invstd = (var + ctx.eps).rsqrt()
            slope = -invstd.square() * sums[1]
            offset = -invstd * sums[0] - slope * mean
            shape = [1, -1] + [1] * (x.dim() - 2)
            dx.add_(offset.to(dx.dtype).view(shape))
            dx.addcmul_(x, slope.to(dx.dtype).view(shape))
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dweight = dxhat if needs_weight else None
        dbias = db if needs_bias else None
        return dx, dweight, dbias, None, None


def combine_moments(
    mean: torch.Tensor, var: torch.Tensor, share: float, group: Communicator, *, exact: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges mean and biased variance over all ranks of ``group`` from those of this rank.

    This rank has ``share`` of the values. They are combined in float64: for inputs of half or
    single precision as E[x²] − E[x]², whose cancellation there is far below their resolution; to
    be ``exact``, as float64 needs it, around the common mean (Chan et al. 1979), which takes a
    second all-reduce.
    """
    mean64 = mean.double()
    var64 = var.double()
    what = "the statistics of a normalisation"
    both = torch.stack([mean64, var64 + mean64.square()]) * share
    total, spread = group.sum_in_place(both, what)
    if exact:
        around = (var64 + (mean64 - total).square()) * share
        spread = group.sum_in_place(around, what)
    else:
        spread = (spread - total.square()).clamp_min_(0)
    return total.to(mean.dtype), spread.to(var.dtype)


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
    """Trains and evaluates, with running statistics; over the grid or per replica.

    Distribution scheme: 1. compute local mean and variance per channel, 2. all-reduce both in one
    message (two in float64), 3. normalise the block. Backward: 1. compute the two sums per channel,
    2. all-reduce both in one message, 3. compute the block's gradient.
    """
    x = with_whole(input, (1,), "batch_norm")
    alone = not training and not torch.is_grad_enabled() and _is_deferred_conv(x)
    if alone and running_mean is not None and running_var is not None:
        affine = Affine.of(weight, bias)
        scale = (running_var.double() + eps).rsqrt()
        scale = scale if affine.weight is None else scale * affine.weight
        shift = torch.zeros_like(scale) if affine.bias is None else affine.bias
        norm = torch.stack([running_mean.float(), scale.float(), shift.float()])[:, None]
        running = Statistics(norm, norm, affine, Population(1, None), eps)
        chain = begin_epilogue(x)
        assert chain is not None
        return epilogue_result(chain.linked(statistics=running), x, x.partition)
    if not training:
        return _by_torch(x, running_mean, running_var, weight, bias, False, momentum, eps)
    x = without_empty_shards(x, range(x.dim()))
    replica = x.policy.batch_norm == "replica"
    over = _lay_out_batch_norm(x.grid, x.partition, replica)
    if not x.partition.axes and is_launch_bound(x):
        return _by_torch(x, running_mean, running_var, weight, bias, True, momentum, eps)
    y, moments = _normalised(x, over, Affine.of(weight, bias), eps)
    if running_mean is not None and running_var is not None:
        mean, var, *_ = moments[:, 0].unbind()
        unbiased = var * (over.count / (over.count - 1))
        data = x.grid.group(("data",)) if replica else None
        if data is not None:  # on every rank alike: to the replicas' mean
            both = torch.stack([mean, unbiased])
            both = data.sum_in_place(both, "the running statistics of batch_norm")
            mean, unbiased = (both / x.grid.data).unbind()
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return y


@per_grid
def _lay_out_batch_norm(grid: Grid, x: Partition, replica: bool) -> Population:
    """Counts the values of a channel over the ranks of the grid, or of a replica.

    Raises:
        ValueError: a channel has one value.
    """
    axes = tuple(axis for axis in x.axes if not (replica and axis == "data"))
    shape = list(x.shape)
    fewest = list(x.shape)
    for dim, cut in enumerate(x.cuts):  # after a permutation any dim may be the batch
        if cut is not None and cut.axis not in axes:
            shape[dim] = x.box(grid.coords).shape[dim]
            fewest[dim] = min(hi - lo for lo, hi in cut.intervals)  # all ranks judge alike
    if math.prod(fewest) <= fewest[1]:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {tuple(fewest)}"
        )
    return Population(math.prod(shape) // shape[1], grid.group(axes))


def _by_torch(
    x: Sharded,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Sharded:
    """Applies torch's own batch norm to a block that has all that its statistics are made of."""
    block = x.block
    kept = memory_format_of(block)
    statistics = (running_mean, running_var)
    y = F.batch_norm(dense(block, kept), *statistics, weight, bias, training, momentum, eps)
    return x.like(with_gradient_in(y, kept), fresh=training)


FEW = 64
"""Limits the values of a normalisation that is left to torch."""


@register(F.instance_norm, family="normalization", lazy=True)
def instance_norm(
    input: Sharded,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Sharded:
    """Takes statistics of each sample and channel over cut space; running ones of the global batch.

    Distribution scheme: as `Normalise`, over the axes that cut space; then one all-reduce over
    the data axis where there are running statistics.
    """
    x = normalised_input(input, "instance_norm", weight, bias)
    x = without_empty_shards(x, range(x.dim()))
    if not use_input_stats:
        return x.like(
            F.instance_norm(x.block, running_mean, running_var, weight, bias, False, momentum, eps)
        )
    count = math.prod(x.shape[2:])
    if count == 1:
        raise ValueError(
            f"Expected more than 1 spatial element when training, got input size {tuple(x.shape)}"
        )
    if running_mean is None and _left_to_torch(x, count):
        return x.like(with_gradient_in(F.instance_norm(x.local, weight=weight, bias=bias, eps=eps)))
    dtype = result_type("instance_norm", x.dtype, x.device)
    over = Population(count, group_over(x, range(2, x.dim())), 1)
    y, moments = _normalised(x, over, Affine.of(weight, bias, copied=True), eps, dtype)
    if running_mean is not None and running_var is not None:
        # To the mean over all samples, on every rank alike.
        new = torch.stack([moments[0], moments[1] * (count / (count - 1))]).sum(1) / x.shape[0]
        group = group_over(x, [0])
        if group is not None:
            new = group.sum_in_place(new, "the running statistics of instance_norm")
        running_mean.lerp_(new[0].to(running_mean.dtype), momentum)
        running_var.lerp_(new[1].to(running_var.dtype), momentum)
    return y


@register(F.group_norm, family="normalization", lazy=True)
def group_norm(
    input: Sharded,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Sharded:
    """Takes statistics of each sample and group of channels over cut space.

    Distribution scheme: as `Normalise`, over the axes that cut space.
    """
    x = normalised_input(input, "group_norm", weight, bias)
    x = without_empty_shards(x, range(x.dim()))
    if x.shape[1] % num_groups:
        raise LayoutError(f"group_norm: {x.shape[1]} channels do not make {num_groups} groups")
    if x.shape[0] * x.shape[1] // num_groups * math.prod(x.shape[2:]) == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}"
        )
    pool = x.shape[1] // num_groups
    count = pool * math.prod(x.shape[2:])
    if _left_to_torch(x, count):
        # Not F's, which judges by the block's samples: some ranks would raise and others not.
        return x.like(with_gradient_in(torch.group_norm(x.local, num_groups, weight, bias, eps)))
    dtype = result_type("group_norm", x.dtype, x.device)
    over = Population(count, group_over(x, range(2, x.dim())), pool)
    return _normalised(x, over, Affine.of(weight, bias), eps, dtype)[0]


def _left_to_torch(x: Sharded, count: int) -> bool:
    """Returns whether torch's own operator runs: nothing is cut, and no kernel would be faster.

    Of few values there is no gradient but what rounding and eps leave; torch's is torch's.
    """
    whole = group_over(x, range(2, x.dim())) is None
    return whole and (count <= FEW or x.dtype not in EPILOGUE_DTYPES or is_launch_bound(x))


def normalised_input(x: object, name: str, *parameters: object) -> Sharded:
    """Returns an input whose channels are whole; refuses cut parameters."""
    if not isinstance(x, Sharded) or any(isinstance(p, Sharded) for p in parameters):
        raise LayoutError(f"{name}: the input is cut, weight and bias are ordinary tensors")
    if x.dim() < 2:
        raise LayoutError(f"{name} needs a batch and a channel dim, got {x.partition}")
    return with_whole(x, (1,), name)


def _normalised(
    x: Sharded, over: Population, affine: Affine, eps: float, dtype: torch.dtype | None = None
) -> tuple[Sharded, torch.Tensor]:
    """Normalise, in a fused epilogue if a kernel takes the block.

    Also returns the moments, mean and biased variance first, (..., 1, C) or, with ``over.pool``
    channels of each sample together, (..., N, C).
    """
    if x.pending is not None and not _is_deferred_conv(x):
        x.force()  # a normalisation is the first link of its chain
    chain = begin_epilogue(x)
    if chain is not None:
        statistics = statistics_of(chain.block, over, affine, eps)
        chain = chain.linked(dtype=dtype or chain.dtype, statistics=statistics)
        return epilogue_result(chain, x, x.partition), statistics.moments
    if over.pool is None:
        y, mean, var = Normalise.apply(x.block, affine.weight, affine.bias, eps, over)
        return x.like(y, fresh=True), torch.stack([mean, var])[:, None]
    # As if samples were further channels.
    block = x.block if dtype is None else x.block.to(dtype)
    samples, channels = block.shape[:2]
    # Not reshape: torch (2.13) takes a channels-last view with a batch of one for contiguous.
    flat = block.contiguous().view(1, samples * channels, *block.shape[2:])
    parameters = [None if p is None else p.repeat(samples) for p in (affine.weight, affine.bias)]
    y, mean, var = Normalise.apply(flat, *parameters, eps, over)
    y = y.view(block.shape)
    if not block.is_contiguous():  # the result is in the input's memory format
        y = torch.empty_like(block).copy_(y)
    return x.like(y), torch.stack([mean, var]).view(2, samples, channels)


def _is_deferred_conv(x: Sharded) -> bool:
    """Tell if a convolution is deferred, with nothing behind it, and its sums may be taken."""
    pending = x.pending
    if not isinstance(pending, SlabEpilogue) or not pending.goes_on:
        return False
    return pending.links.empty and pending.dtype in EPILOGUE_DTYPES


@register(F.layer_norm, family="normalization", merged=True)
def layer_norm(
    input: Sharded,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Sharded:
    """Runs over the last dims, cut or not; each rank takes its part of elementwise parameters."""
    return _normalise_last_dims(F.layer_norm, input, normalized_shape, (weight, bias), eps)


@register(F.rms_norm, family="normalization", merged=True)
def rms_norm(
    input: Sharded,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Sharded:
    """Runs over the last dims, cut or not; each rank takes its part of elementwise weights."""
    return _normalise_last_dims(F.rms_norm, input, normalized_shape, (weight,), eps)


def _check_normalized_shape(
    x: Sharded,
    name: str,
    normalized_shape: int | Sequence[int],
    *parameters: torch.Tensor | None,
) -> tuple[int, ...]:
    """Reads and checks the normalised shape, which is global as all shapes."""
    if not isinstance(x, Sharded) or any(isinstance(p, Sharded) for p in parameters):
        raise LayoutError(f"{name}: the input is cut, its parameters are ordinary tensors")
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        raise LayoutError(
            f"{name} over {shape} needs an input whose last dims are these, got {x.partition}\n"
            "    shapes of a cut tensor are global"
        )
    for parameter in parameters:
        if parameter is not None and tuple(parameter.shape) != shape:
            raise LayoutError(f"{name} over {shape} has a parameter {tuple(parameter.shape)}")
    return shape


def _normalise_last_dims(
    operator: Operator,
    x: Sharded,
    normalized_shape: int | Sequence[int],
    parameters: Sequence[torch.Tensor | None],
    eps: float | None,
) -> Sharded:
    """Applies torch's operator where the last dims are whole, else `_LayerNorm`."""
    shape = _check_normalized_shape(x, operator.__name__, normalized_shape, *parameters)
    dims = range(x.dim() - len(shape), x.dim())
    x = without_empty_shards(x, dims)
    group = group_over(x, dims)
    if group is None:
        return x.like(operator(x.local, shape, *parameters, eps))
    block = x.local.to(operator(x.local.new_zeros(1), (1,)).dtype)  # autocast may choose another
    if eps is None:
        eps = torch.finfo(torch.float32 if block.dtype in HALF else block.dtype).eps
    part = tuple(slice(*x.box.interval(dim)) for dim in dims)
    weight, bias, *_ = [*(p if p is None else p[part] for p in parameters), None]
    over = Population(math.prod(shape), group)
    options = (dims.start, eps, over, operator is F.layer_norm)
    return x.like(_LayerNorm.apply(block, weight, bias, *options))


class _LayerNorm(BlockFunction):
    """Normalise a block over its dims from ``first`` on and over the ranks of ``over.group``.

    ``centred`` is layer norm: around the mean; otherwise RMS norm.

    Distribution scheme: 1. compute local mean and variance, 2. all-reduce both in one message (two
    in float64), 3. normalise the block. Backward: 1. compute the sums of g = dy * weight and of g *
    xhat, 2. all-reduce both in one message, 3. compute the block's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        first: int,
        eps: float,
        over: Population,
        centred: bool,
    ) -> torch.Tensor:
        values = as_float32(x)
        dims = range(first, x.dim())
        mean, var = _layer_statistics(values, dims, over, centred)
        invstd = var.add_(eps).rsqrt_()
        ctx.first = first
        ctx.eps = eps
        ctx.over = over
        ctx.centred = centred
        ctx.save_for_backward(x, weight, mean, invstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        y = (values - mean).mul_(invstd)
        if weight is not None:
            y.mul_(weight)
        if bias is not None:
            y.add_(bias)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        dims = list(range(ctx.first, x.dim()))
        lead = list(range(ctx.first))
        if torch.is_grad_enabled():  # with create_graph, through the statistics, too
            mean, var = _layer_statistics(as_float32(x), dims, ctx.over, ctx.centred)
            invstd = (var + ctx.eps).rsqrt()
        xhat = (x - mean).mul_(invstd)
        dy = gradient.to(mean.dtype)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[1]:
            dweight = _sum_over(dy * xhat, lead).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            dbias = _sum_over(dy, lead).to(ctx.bias_dtype)
        if ctx.needs_input_grad[0]:
            g = dy if weight is None else dy * weight
            sums = torch.stack([g.sum(dims, True), (g * xhat).sum(dims, True)])
            what = "the gradient of a layer's normalisation"
            sums = all_reduce_sum(sums, ctx.over.group, what) / ctx.over.count
            g = torch.addcmul(g, xhat, sums[1], value=-1)
            dx = (g - sums[0] if ctx.centred else g).mul_(invstd).to(x.dtype)
        return dx, dweight, dbias, None, None, None, None


def _layer_statistics(
    values: torch.Tensor, dims: Sequence[int], over: Population, centred: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes mean and variance over ``dims`` and ranks; not centred: zero and the mean square."""
    assert over.group is not None
    share = math.prod(values.shape[d] for d in dims) / over.count
    if centred and torch.is_grad_enabled():
        return moments_with_graph(values, dims, over)
    if centred:
        var, mean = torch.var_mean(values, list(dims), correction=0, keepdim=True)
        return combine_moments(mean, var, share, over.group, exact=values.dtype == torch.float64)
    square = values.square().mean(list(dims), keepdim=True).double() * share
    square = all_reduce_sum(square, over.group, "the statistics of rms_norm").to(values.dtype)
    return torch.zeros_like(square), square


def _sum_over(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return x.sum(dims) if dims else x


@register(F.local_response_norm, family="normalization")
def local_response_norm(
    input: Sharded, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Sharded:
    """Runs block by block, across neighbouring channels, which are not cut."""
    x = with_whole(input, (1,), "local_response_norm")
    return x.like(F.local_response_norm(x.local, size, alpha, beta, k))


@register(F.normalize, family="normalization", dims=["dim"])
def normalize(input: Sharded, p: float = 2.0, dim: Dims = 1, eps: float = 1e-12) -> Sharded:
    """Divides by the norm over any dims, cut or not."""
    dims = reduced_dims(input, dim)
    x = without_empty_shards(input, dims)
    return x.like(x.local / norm_block(x, float(p), dims, True, None).clamp_min(eps))
