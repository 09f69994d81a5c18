"""Distributes batch, group, instance, layer and local response normalisation.

Batch, instance and group norm run as a fused epilogue where kernels exist, else by torch's own
operators, through which the gradient goes back (`hyperslab.ops.fusion`). Layer and RMS norm over
dims that are cut do the latter.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hyperslab.comm import Grid, all_reduce_sum, per_grid
from hyperslab.errors import LayoutError
from hyperslab.geometry import Partition
from hyperslab.kernels.compile import TYPE_CODES
from hyperslab.kernels.memory_format import (
    HALF,
    as_float32,
    as_result,
    dense,
    memory_format_of,
    with_gradient_in,
)
from hyperslab.ops.fusion import (
    Affine,
    EpilogueOps,
    NoteMoments,
    Population,
    Statistics,
    begin_epilogue,
    epilogue_result,
    has_kernels,
    is_launch_bound,
    moments_over_ranks,
    normalised_with_graph,
    running_statistics,
    statistics_of,
)
from hyperslab.ops.operands import check_cut, without_empty_shards
from hyperslab.ops.overloads import Operator, result_type
from hyperslab.ops.placement import with_whole
from hyperslab.ops.reductions import Dims, group_over, norm_block, reduced_dims
from hyperslab.ops.slabs import SlabEpilogue
from hyperslab.tensor import Sharded, register


@register(F.batch_norm, lazy=True)
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
    x = normalised_input(input, "batch_norm", running_mean, running_var, weight, bias)
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
    partition = x.partition
    over = None
    if training:
        if partition.thin:
            x = without_empty_shards(x, range(x.dim()))
            partition = x.partition
        replica = x.policy.batch_norm == "replica"
        over = _lay_out_batch_norm(x.grid, partition, replica)
    if over is None or (not partition.axes and (is_launch_bound(x) or not has_kernels(x))):
        # By torch: the block has all that its statistics are made of.
        block = x.native_or_block
        kept = memory_format_of(block)
        how = (training, momentum, eps, torch.backends.cudnn.enabled)
        # In channels last torch's backward pass reads them as if they were dense.
        weight = weight if weight is None else weight.contiguous()
        mean, var = running_mean, running_var
        if not training:
            mean, var = (one if one is None else one.contiguous() for one in (mean, var))
        # Not F's, which judges by the block's samples: some ranks would raise and others not.
        y = torch.batch_norm(dense(block, kept), weight, bias, mean, var, *how)
        return x.like(with_gradient_in(y, kept), fresh=training)

    def note(moments: torch.Tensor) -> None:
        if running_mean is None or running_var is None:
            return
        unbiased = over.count / (over.count - 1)
        data = x.grid.group(("data",)) if replica else None
        if data is not None:  # on every rank alike: to the mean of replicas of any size
            both = torch.stack([moments[0], moments[1] * unbiased])
            both = data.sum_in_place(both, "the running statistics of batch_norm")
            moments, unbiased = both / x.grid.data, 1.0
        # Torch, too, counts no change: it keeps them for a backward pass, which would refuse it.
        running_statistics(moments, running_mean.data, running_var.data, momentum, unbiased)

    return _normalised(x, over, Affine.of(weight, bias), eps, note=note)


@per_grid
def _lay_out_batch_norm(grid: Grid, x: Partition, replica: bool) -> Population:
    """Counts the values of a channel over the ranks of the grid, or of a replica."""
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


FEW = 64
"""Limits the values of a normalisation that is left to torch."""


@register(F.instance_norm, lazy=True)
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

    Distribution scheme: as `batch_norm`, over the axes that cut space; then one all-reduce over
    the data axis where there are running statistics.
    """
    x = normalised_input(input, "instance_norm", running_mean, running_var, weight, bias)
    if x.partition.thin:
        x = without_empty_shards(x, range(x.dim()))
    if not use_input_stats:
        given = (running_mean, running_var, weight, bias, False, momentum, eps)
        return x.like(with_gradient_in(F.instance_norm(x.block, *given)))
    over = _lay_out_group_norm(x.grid, x.partition, 1)
    count = over.count
    if count == 1:
        raise ValueError(
            f"Expected more than 1 spatial element when training, got input size {tuple(x.shape)}"
        )
    if running_mean is None and _left_to_torch(x, over):
        return x.like(with_gradient_in(F.instance_norm(x.local, weight=weight, bias=bias, eps=eps)))
    dtype = result_type("instance_norm", x.dtype, x.device)

    def note(moments: torch.Tensor) -> None:
        if running_mean is None or running_var is None:
            return
        # To the mean over all samples, on every rank alike.
        new = torch.stack([moments[0], moments[1] * (count / (count - 1))]).sum(1) / x.shape[0]
        group = group_over(x, [0])
        if group is not None:
            new = group.sum_in_place(new, "the running statistics of instance_norm")
        new = new[:, None]
        running_statistics(new, running_mean.data, running_var.data, momentum, 1.0)  # as above

    return _normalised(x, over, Affine.of(weight, bias, copied=True), eps, dtype, note=note)


@register(F.group_norm, lazy=True)
def group_norm(
    input: Sharded,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Sharded:
    """Takes statistics of each sample and group of channels over cut space.

    Distribution scheme: as `batch_norm`, over the axes that cut space.
    """
    num_groups = operator.index(num_groups)  # of a tensor of one number, too
    x = normalised_input(input, "group_norm", weight, bias)
    if x.partition.thin:
        x = without_empty_shards(x, range(x.dim()))
    samples, channels = x.partition.shape[:2]
    if channels % num_groups:
        raise LayoutError(f"group_norm: {channels} channels do not make {num_groups} groups")
    over = _lay_out_group_norm(x.grid, x.partition, channels // num_groups)
    if samples * over.count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}"
        )
    if _left_to_torch(x, over):
        # Not F's, which judges by the block's samples: some ranks would raise and others not.
        return x.like(with_gradient_in(torch.group_norm(x.local, num_groups, weight, bias, eps)))
    dtype = result_type("group_norm", x.dtype, x.device)
    return _normalised(x, over, Affine.of(weight, bias), eps, dtype)


@per_grid
def _lay_out_group_norm(grid: Grid, x: Partition, pool: int) -> Population:
    """Counts the values of a sample's groups of ``pool`` channels over the ranks that cut space."""
    axes = [cut.axis for cut in x.cuts[2:] if cut is not None]
    return Population(pool * math.prod(x.shape[2:]), grid.group(axes), pool)


def _left_to_torch(x: Sharded, over: Population) -> bool:
    """Returns whether torch's own operator runs: nothing is cut, and no kernel would be faster.

    Of few values there is no gradient but what rounding and eps leave; torch's is torch's.
    """
    if over.group is not None:
        return False
    return over.count <= FEW or x.dtype not in TYPE_CODES or is_launch_bound(x)


def normalised_input(x: object, name: str, *parameters: object) -> Sharded:
    """Returns an input whose channels are whole; refuses cut parameters."""
    if not isinstance(x, Sharded) or Sharded in map(type, parameters):
        raise LayoutError(
            f"{name}: the input is cut, weight, bias and running statistics are ordinary tensors"
        )
    cuts = x.partition.cuts
    if len(cuts) < 2:
        raise LayoutError(f"{name} needs a batch and a channel dim, got {x.partition}")
    return x if cuts[1] is None else with_whole(x, (1,), name)


def _normalised(
    x: Sharded,
    over: Population,
    affine: Affine,
    eps: float,
    dtype: torch.dtype | None = None,
    *,
    note: NoteMoments | None = None,
) -> Sharded:
    """Normalise, in a fused epilogue if a kernel takes the block.

    ``note`` gets the moments, mean and biased variance first, (..., 1, C) or, with ``over.pool``
    channels of each sample together, (..., N, C).
    """
    if x.pending is not None and not _is_deferred_conv(x):
        x.force()  # a normalisation is the first link of its chain
    chain = begin_epilogue(x)
    if chain is not None:
        statistics = statistics_of(chain.block, over, affine, eps, note)
        kind = dtype or chain.dtype
        if x.pending is None and is_launch_bound(x):  # what could join takes less time by itself
            return x.like(chain.computed(EpilogueOps(kind, statistics)), fresh=True)
        return epilogue_result(chain.linked(dtype=kind, statistics=statistics), x, x.partition)
    block = x.block if dtype is None else x.block.to(dtype)
    parameters = (affine.weight, affine.bias)
    of_batch = over.pool is None
    y = normalised_with_graph(
        as_float32(block), *parameters, over, eps, of_batch=of_batch, note=note
    )
    return x.like(y.to(block.dtype), fresh=True)


def _is_deferred_conv(x: Sharded) -> bool:
    """Tell if a convolution is deferred, with nothing behind it, and its sums may be taken."""
    pending = x.pending
    if not isinstance(pending, SlabEpilogue) or not pending.goes_on:
        return False
    return pending.links.empty and pending.dtype in TYPE_CODES


@register(F.layer_norm, merged=True)
def layer_norm(
    input: Sharded,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Sharded:
    """Runs over the last dims, cut or not; each rank takes its part of elementwise parameters."""
    return _normalise_last_dims(F.layer_norm, input, normalized_shape, (weight, bias), eps)


@register(F.rms_norm, merged=True)
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
    check_cut(name, x, *parameters)
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
    """Applies torch's operator where the last dims are whole.

    Distribution scheme over dims that are cut: 1. compute the mean and the variance of the block,
    or the mean square of RMS norm, 2. all-reduce them in one message (two in float64), 3. normalise
    the block. The backward pass is that of these operators; a message's adjoint is as large.
    """
    shape = _check_normalized_shape(x, operator.__name__, normalized_shape, *parameters)
    dims = range(x.dim() - len(shape), x.dim())
    x = without_empty_shards(x, dims)
    group = group_over(x, dims)
    if group is None:
        return x.like(operator(x.local, shape, *parameters, eps))
    dtype = operator(x.local.new_zeros(1), (1,)).dtype  # autocast may choose another
    block = as_result(x.local).to(dtype)
    if eps is None:
        eps = torch.finfo(torch.float32 if block.dtype in HALF else block.dtype).eps
    y = as_float32(block)
    over = Population(math.prod(shape), group)
    if operator is F.layer_norm:
        mean, var = moments_over_ranks(y, dims, over)
        y = y - mean
    else:
        share = math.prod(y.shape[d] for d in dims) / over.count
        wide = torch.promote_types(y.dtype, torch.float64)  # complex ones stay complex
        square = y.square().mean(list(dims), keepdim=True).to(wide) * share
        var = all_reduce_sum(square, group, "the mean square of rms_norm").to(y.dtype)
    y = y * (var + eps).rsqrt()
    part = tuple(slice(*x.box.interval(dim)) for dim in dims)
    weight, bias, *_ = [*(p if p is None else p[part] for p in parameters), None]
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return x.like(y.to(block.dtype), fresh=True)


@register(F.local_response_norm)
def local_response_norm(
    input: Sharded, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Sharded:
    """Runs block by block, across neighbouring channels, which are not cut."""
    x = with_whole(input, (1,), "local_response_norm")
    return x.like(F.local_response_norm(x.local, size, alpha, beta, k))


@register(F.normalize, dims=["dim"])
def normalize(input: Sharded, p: float = 2.0, dim: Dims = 1, eps: float = 1e-12) -> Sharded:
    """Divides by the norm over any dims, cut or not."""
    dims = reduced_dims(input, dim)
    x = without_empty_shards(input, dims)
    return x.like(x.local / norm_block(x, float(p), dims, True, None).clamp_min(eps))
