"""Reading by tensors of positions, along a dim that is not cut."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.geometry import Partition
from hyperslab.ops.common.operands import aligned_but, check_uncut
from hyperslab.ops.views.expand import expanded
from hyperslab.ops.views.slicing import Span, crop, dim_of
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import describe


def _others(tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], *tensor.shape[dim + 1 :])


def shrunk(x: torch.Tensor, index: torch.Tensor, dim: int, name: str) -> torch.Tensor:
    """``x`` without what lies beyond the extents of ``index`` in the other dims."""
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


@register(torch.gather, torch.Tensor.gather, family="lookup")
def gather(
    input: Any, dim: int, index: Any, *, sparse_grad: bool = False, out: Any = None
) -> Sharded:
    """Along a dim that is not cut; the index is cut as the input, or ordinary."""
    if sparse_grad or out is not None:
        raise UnsupportedOp(
            "gather(sparse_grad=True) or gather(out=...) has no rule for a cut tensor"
        )
    d = dim_of(input, dim, "torch.gather")
    x = shrunk(input, index, d, "torch.gather")
    blocks, cuts, like = aligned_but([x, index], d, "torch.gather")
    return like.like(torch.gather(blocks[0], d, blocks[1]), Partition(tuple(index.shape), cuts))


@register(torch.take_along_dim, torch.Tensor.take_along_dim, family="lookup")
def take_along_dim(input: Any, indices: Any, dim: Any = None, *, out: Any = None) -> Sharded:
    """Along a dim that is not cut; the other dims are broadcast."""
    if dim is None or out is not None or input.dim() != indices.dim():
        raise UnsupportedOp(
            "take_along_dim of a cut tensor needs a dim, no out=, and as many dims on both sides\n"
            f"{describe([input, indices])}    flatten x.full() to take from all elements"
        )
    d = dim_of(input, dim, "take_along_dim")
    common = torch.broadcast_shapes(_others(input, d), _others(indices, d))
    shape = (*common[:d], -1, *common[d:])
    return gather(expanded(input, shape), d, expanded(indices, shape))


@register(torch.index_select, torch.Tensor.index_select, family="lookup")
def index_select(input: Any, dim: int, index: Any, *, out: Any = None) -> Sharded:
    """Along a dim that is not cut, by an ordinary tensor of positions."""
    if not isinstance(input, Sharded) or isinstance(index, Sharded) or out is not None:
        raise UnsupportedOp(
            "index_select has a rule for a cut input and ordinary positions, without out=\n"
            f"{describe([input, index])}    use index.full(), or table[index] to look up rows"
        )
    d = dim_of(input, dim, "index_select")
    check_uncut(input, d, "index_select")
    partition = input.partition.with_dim(d, index.numel(), None)
    return input.like(input.local.index_select(d, index), partition)


@register(F.embedding, family="lookup")
def embedding(
    input: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
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


@register(F.one_hot, family="lookup")
def one_hot(input: Any, num_classes: int = -1) -> Sharded:
    """A new last dim that is not cut; the number of classes must be given."""
    if num_classes < 1:
        raise UnsupportedOp(
            f"one_hot of {input.partition} counts the classes of one rank only\n"
            "    give num_classes"
        )
    return input.like(F.one_hot(input.local, num_classes), _with_last(input, num_classes))


def _with_last(x: Sharded, extent: int) -> Partition:
    return Partition((*x.partition.shape, extent), (*x.partition.cuts, None))
