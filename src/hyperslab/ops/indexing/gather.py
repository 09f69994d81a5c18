"""Gather, index_select, embedding and one-hot codes, along a dim that is not cut."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.geometry import Partition
from hyperslab.ops.common.operands import aligned_but, check_uncut, other_extents
from hyperslab.ops.views.expand import expanded
from hyperslab.ops.views.slicing import Span, crop
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe


def shrunk(x: torch.Tensor, index: torch.Tensor, dim: int, name: str) -> torch.Tensor:
    """``x`` without what lies beyond the extents of ``index`` in the other dims."""
    if x.dim() != index.dim():
        raise LayoutError(
            f"{name}: the index has another number of dims\n{describe([x, index])}"
            "    reshape or expand one of them"
        )
    spans = {
        d: Span(0, extent)
        for d, (extent, own) in enumerate(zip(index.shape, x.shape, strict=True))
        if d != dim and extent != own
    }
    if any(span.count > x.shape[d] for d, span in spans.items()):
        raise LayoutError(
            f"{name} along dim {dim}: the index is larger\n{describe([x, index])}    crop the index"
        )
    if isinstance(x, Sharded):
        return crop(x, spans) if spans else x
    return x[tuple(slice(0, spans[d].count) if d in spans else slice(None) for d in range(x.dim()))]


@register(torch.gather, torch.Tensor.gather, family="indexing", dims=["dim"])
def gather_along(
    input: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False
) -> Sharded:
    """Along a dim that is not cut; the index is cut as the input, or ordinary."""
    if sparse_grad:
        raise UnsupportedOp("gather(sparse_grad=True) has no rule for a cut tensor")
    x = shrunk(input, index, dim, "torch.gather")
    blocks, cuts, like = aligned_but([x, index], dim, "torch.gather")
    return like.like(torch.gather(blocks[0], dim, blocks[1]), Partition(tuple(index.shape), cuts))


@register(torch.take_along_dim, torch.Tensor.take_along_dim, family="indexing", dims=["dim"])
def take_along_dim(input: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> Sharded:
    """Along a dim that is not cut; the other dims are broadcast."""
    if dim is None or input.dim() != indices.dim():
        raise UnsupportedOp(
            "take_along_dim of a cut tensor needs a dim, and as many dims on both sides\n"
            f"{describe([input, indices])}    flatten x.full() to take from all elements"
        )
    common = torch.broadcast_shapes(other_extents(input, dim), other_extents(indices, dim))
    shape = (*common[:dim], -1, *common[dim:])
    return gather_along(expanded(input, shape), dim, expanded(indices, shape))


@register(torch.index_select, torch.Tensor.index_select, family="indexing", dims=["dim"])
def index_select(input: torch.Tensor, dim: int, index: torch.Tensor) -> Sharded:
    """Along a dim that is not cut, by an ordinary tensor of positions."""
    if not isinstance(input, Sharded) or isinstance(index, Sharded):
        raise UnsupportedOp(
            "index_select has a rule for a cut input and ordinary positions\n"
            f"{describe([input, index])}    use index.full(), or table[index] to look up rows"
        )
    check_uncut(input, (dim,), "index_select along")
    partition = input.partition.with_dim(dim, index.numel(), None)
    return input.like(input.local.index_select(dim, index), partition)


@register(F.embedding, family="indexing")
def embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Sharded:
    """Rows of an ordinary table for a cut tensor of indices; the new dim is not cut."""
    special = max_norm is not None or scale_grad_by_freq or sparse
    if not isinstance(input, Sharded) or isinstance(weight, Sharded) or special:
        raise UnsupportedOp(
            "embedding has a rule for cut indices and an ordinary table, without max_norm, "
            f"scale_grad_by_freq and sparse\n{describe([input, weight])}    use indices.full()"
        )
    rows = F.embedding(input.local, weight, padding_idx)
    return input.like(rows, _with_last(input, weight.shape[1]))


@register(F.one_hot, family="indexing")
def one_hot(input: Sharded, num_classes: int = -1) -> Sharded:
    """A new last dim that is not cut; the number of classes must be given."""
    if num_classes < 1:
        raise UnsupportedOp(
            f"one_hot of {input.partition} counts the classes of one rank only\n"
            "    give num_classes"
        )
    return input.like(F.one_hot(input.local, num_classes), _with_last(input, num_classes))


def _with_last(x: Sharded, extent: int) -> Partition:
    return Partition((*x.partition.shape, extent), (*x.partition.cuts, None))
