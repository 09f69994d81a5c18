"""Instance and group normalisation: statistics of each sample over cut space."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from hyperslab.comm.collectives import reduce_in_place
from hyperslab.errors import LayoutError
from hyperslab.memory_format import dense, memory_format_of
from hyperslab.ops.chains.affine import Affine
from hyperslab.ops.chains.chain import TYPES, begin, result
from hyperslab.ops.chains.statistics import Population, normalised_chain
from hyperslab.ops.common.placement import check_channels
from hyperslab.ops.common.result_type import result_type
from hyperslab.ops.kernels.moments import Moments
from hyperslab.ops.normalization.statistics import Normalise
from hyperslab.ops.reductions.base import group_over, without_empty_shards
from hyperslab.tensor import Sharded, register

FEW = 64
"""Values of one normalisation."""


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
    """Statistics of each sample and channel over cut space; running ones over the global batch.

    Distribution scheme: as `Normalise`, over the axes that cut space; then one all-reduce over
    the data axis where there are running statistics.
    """
    x = input
    check_normalised(x, "instance_norm", weight, bias)
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
        return x.like(_by_rows(F.instance_norm(x.local, weight=weight, bias=bias, eps=eps)))
    dtype = result_type("instance_norm", x.dtype, x.device)
    affine = Affine.of(weight, bias, copied=True)
    y, (mean, var) = normalise_space(x, dtype, affine, eps, 1)
    if running_mean is not None and running_var is not None:
        _update(x, running_mean, running_var, mean, var * (count / (count - 1)), momentum)
    return y


@register(F.group_norm, family="normalization", lazy=True)
def group_norm(
    input: Sharded,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Sharded:
    """Statistics of each sample and group of channels over cut space.

    Distribution scheme: as `Normalise`, over the axes that cut space.
    """
    x = input
    check_normalised(x, "group_norm", weight, bias)
    x = without_empty_shards(x, range(x.dim()))
    if x.shape[1] % num_groups:
        raise LayoutError(f"group_norm: {x.shape[1]} channels do not make {num_groups} groups")
    if x.shape[0] * x.shape[1] // num_groups * math.prod(x.shape[2:]) == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}"
        )
    pool = x.shape[1] // num_groups
    if _left_to_torch(x, pool * math.prod(x.shape[2:])):
        # Not F's, which judges by the block's samples: some ranks would raise and others not.
        return x.like(_by_rows(torch.group_norm(x.local, num_groups, weight, bias, eps)))
    dtype = result_type("group_norm", x.dtype, x.device)
    return normalise_space(x, dtype, Affine.of(weight, bias), eps, pool)[0]


def _left_to_torch(x: Sharded, count: int) -> bool:
    """Whether torch's own operator runs: nothing is cut, and no kernel would be faster.

    Of few values there is no gradient but what rounding and eps leave; torch's is torch's.
    """
    whole = group_over(x, range(2, x.dim())) is None
    return whole and (count <= FEW or x.dtype not in TYPES)


def _by_rows(y: torch.Tensor) -> torch.Tensor:
    """Have the gradient of torch's own result contiguous, as the result is.

    Torch (2.13) computes wrong gradients, silently, of a single sample's instance norm channels
    last.
    """
    if y.requires_grad:
        rows = memory_format_of(y)
        y.register_hook(lambda gradient: dense(gradient.contiguous(memory_format=rows), rows))
    return y


def check_normalised(x: object, name: str, *parameters: object) -> None:
    """Refuse cut parameters and cut channels."""
    if not isinstance(x, Sharded) or any(isinstance(p, Sharded) for p in parameters):
        raise LayoutError(f"{name}: the input is cut, weight and bias are ordinary tensors")
    if x.dim() < 2:
        raise LayoutError(f"{name} needs a batch and a channel dim, got {x.partition}")
    check_channels(x, name)


def normalise_space(
    x: Sharded, dtype: torch.dtype, affine: Affine, eps: float, pool: int
) -> tuple[Sharded, Moments]:
    """Normalise ``pool`` channels of a sample together; also mean and variance (N, C)."""
    group = group_over(x, range(2, x.dim()))
    count = pool * math.prod(x.shape[2:])
    if x.pending is not None:  # a normalisation is the first link of its chain
        x.settle()
    chain = begin(x)
    if chain is not None:
        over = Population(count, group, pool)
        chain, (mean, var) = normalised_chain(chain, over, affine, eps, dtype)
        return result(chain, x, x.partition), (mean, var)
    # As if samples were further channels.
    block = x.block.to(dtype)
    samples, channels = block.shape[:2]
    # Not reshape: torch (2.13) takes a channels-last view with a batch of one for contiguous.
    flat = block.contiguous().view(1, samples * channels, *block.shape[2:])
    parameters = [None if p is None else p.repeat(samples) for p in (affine.weight, affine.bias)]
    y, mean, var = Normalise.apply(flat, *parameters, eps, count, group, pool)
    y = y.view(block.shape)
    if not block.is_contiguous():  # the result is in the input's memory format
        y = torch.empty_like(block).copy_(y)
    return x.like(y), (mean.view(samples, channels), var.view(samples, channels))


def _update(
    x: Sharded,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    mean: torch.Tensor,
    unbiased: torch.Tensor,
    momentum: float,
) -> None:
    """Move the running statistics to the mean over the samples, on every rank alike."""
    new = torch.stack([mean, unbiased]).sum(1) / x.shape[0]
    group = group_over(x, [0])
    if group is not None:
        new = reduce_in_place(new, group, "the running statistics of instance_norm")
    running_mean.lerp_(new[0].to(running_mean.dtype), momentum)
    running_var.lerp_(new[1].to(running_var.dtype), momentum)
