"""Permutations of the dims: every cut goes with its dim, nothing travels."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.geometry import Partition
from hyperslab.ops.common.arguments import Integers, integers
from hyperslab.ops.common.forms import Operator, register_each
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.signature import read_dims


def permuted(x: Sharded, dims: Sequence[int]) -> Sharded:
    """The view whose dim ``i`` is dim ``dims[i]`` of ``x``."""
    n = x.dim()
    order = [d % n if -n <= d < n else n for d in dims]
    if sorted(order) != list(range(n)):
        raise LayoutError(f"permute: {tuple(dims)} is no order of the dims of {x.partition}")
    shape = x.partition.shape
    cuts = x.partition.cuts
    partition = Partition(tuple(shape[d] for d in order), tuple(cuts[d] for d in order))
    return x.like(x.local.permute(order), partition)


def exchanged(x: Sharded, a: int, b: int) -> Sharded:
    """The view with two dims exchanged."""
    order = list(range(x.dim()))
    a, b = read_dims((a, b), x.dim(), "transpose")
    order[a], order[b] = order[b], order[a]
    return permuted(x, order)


def moved(x: Sharded, source: Sequence[int], destination: Sequence[int]) -> Sharded:
    """The view in which the dims ``source`` stand at ``destination``, the others in order."""
    origin = dict(zip(destination, source, strict=True))
    if len(origin) != len(source) or len(set(origin.values())) != len(source):
        raise LayoutError(f"movedim: repeated dims among {tuple(source)} or {tuple(destination)}")
    others = iter([d for d in range(x.dim()) if d not in origin.values()])
    return permuted(x, [origin[to] if to in origin else next(others) for to in range(x.dim())])


@register(torch.permute, torch.Tensor.permute, family="views")
def permute(input: Sharded, *dims: Integers, **named: Integers) -> Sharded:
    """Any order of the dims; each cut goes with its dim."""
    return permuted(input, integers(*dims, *named.values()))


@register(torch.channel_shuffle, torch.native_channel_shuffle, family="views")
def channel_shuffle(input: Sharded, groups: int) -> Sharded:
    """Of channels that are not cut: block by block."""
    if input.dim() < 3 or input.shape[1] % groups or input.partition.cuts[1] is not None:
        raise LayoutError(
            f"channel_shuffle in {groups} groups: {input.partition} has to have channels in dim 1 "
            "that are not cut\n    and whose number is a multiple of the groups"
        )
    return input.like(torch.channel_shuffle(input.local, groups))


@register_each("transpose", "swapaxes", "swapdims", family="views")
def transpose(_: Operator, input: Sharded, *dims: int, **named: int) -> Sharded:
    """Two dims exchanged; each cut goes with its dim."""
    a, b = (*dims, *named.values())
    return exchanged(input, a, b)


@register(
    torch.movedim,
    torch.moveaxis,
    torch.Tensor.movedim,
    torch.Tensor.moveaxis,
    family="views",
    dims=["source", "destination"],
)
def movedim(input: Sharded, source: Integers, destination: Integers) -> Sharded:
    """Some dims moved; each cut goes with its dim."""
    return moved(input, integers(source), integers(destination))


def _getter(name: str) -> Operator:
    getter: Operator = getattr(torch.Tensor, name).__get__
    return getter


def _transposed(input: Sharded, most: int) -> Sharded:
    if not 2 <= input.dim() <= most:
        raise UnsupportedOp(
            f"a transpose without dims, of {input.partition}\n    use x.transpose(a, b)"
        )
    return exchanged(input, -2, -1)


@register(torch.t, torch.Tensor.t, _getter("T"), family="views")
def t(input: Sharded, *_: object) -> Sharded:
    """The last two dims exchanged; each cut goes with its dim."""
    return _transposed(input, 2)


@register(_getter("mT"), family="views")
def matrix_transpose(input: Sharded, *_: object) -> Sharded:
    """The last two dims exchanged; each cut goes with its dim."""
    return _transposed(input, sys.maxsize)


@register(_getter("H"), family="views")
def conjugate_transpose(input: Sharded, *_: object) -> Sharded:
    """The last two dims exchanged; each cut goes with its dim."""
    return _conjugate(_transposed(input, 2))


@register(torch.adjoint, torch.Tensor.adjoint, _getter("mH"), family="views")
def adjoint(input: Sharded, *_: object) -> Sharded:
    """The last two dims exchanged; each cut goes with its dim."""
    return _conjugate(_transposed(input, sys.maxsize))


def _conjugate(x: Sharded) -> Sharded:
    return x.like(x.local.conj()) if x.is_complex() else x
