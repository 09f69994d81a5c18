"""Similarity and distance of two tensors, over dims that may be cut."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hyperslab.ops.common.forms import Operator
from hyperslab.ops.common.half_precision import wide
from hyperslab.ops.common.operands import common_partition, operand_block
from hyperslab.ops.reductions.base import (
    finish,
    group_over,
    total,
    without_empty_shards,
)
from hyperslab.ops.reductions.norms import norm_block, vector_norm
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.signature import read_dim


def _broadcast(function: Operator, *operands: torch.Tensor) -> list[Sharded]:
    """The operands, cut alike and expanded to their common global shape."""
    target = common_partition(operands, function)
    like = next(value for value in operands if isinstance(value, Sharded))
    shape = target.box(like.grid.coords).shape
    blocks = [operand_block(value, target=target, like=like) for value in operands]
    return [like.like(block.expand(shape), target) for block in blocks]


@register(F.cosine_similarity, family="reductions")
def cosine_similarity(
    x1: torch.Tensor, x2: torch.Tensor, dim: int = 1, eps: float = 1e-8
) -> torch.Tensor:
    """Over one dim, cut or not: the sum of products of what is normalised."""
    a, b = _broadcast(F.cosine_similarity, x1, x2)
    dims = (read_dim(dim, a.dim(), "cosine_similarity"),)
    a = without_empty_shards(a, dims)
    b = without_empty_shards(b, dims)
    if group_over(a, dims) is None:
        return finish(a, F.cosine_similarity(a.local, b.local, dims[0], eps), dims, False)
    probes = (value.local.new_zeros(1) for value in (a, b))
    dtype = F.cosine_similarity(next(probes), next(probes), 0).dtype  # autocast may choose another
    first, second = (_unit(value.like(wide(value.local.to(dtype))), dims, eps) for value in (a, b))
    return total(a, (first * second).sum(dims), dims, False, dtype)


def _unit(x: Sharded, dims: tuple[int, ...], eps: float) -> torch.Tensor:
    """Divided by its norm, which is at least ``eps``; torch lets the gradient pass that limit."""
    norm = norm_block(x, 2.0, dims, True, None)
    return x.local / (norm + (norm.clamp_min(eps) - norm).detach())


@register(F.pairwise_distance, family="reductions")
def pairwise_distance(
    x1: torch.Tensor,
    x2: torch.Tensor,
    p: float = 2.0,
    eps: float = 1e-6,
    keepdim: bool = False,
) -> torch.Tensor:
    """Over the last dim, cut or not."""
    a, b = _broadcast(F.pairwise_distance, x1, x2)
    return vector_norm(a.like(a.local - b.local + eps), p, a.dim() - 1, keepdim)


@register(torch.dist, torch.Tensor.dist, family="reductions")
def dist(input: torch.Tensor, other: torch.Tensor, p: float = 2) -> torch.Tensor:
    """Over all dims, cut or not."""
    a, b = _broadcast(torch.dist, input, other)
    return vector_norm(a.like(a.local - b.local), p)
