"""Other orders of the dims: every cut goes with its dim, nothing travels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyperslab.errors import LayoutError, UnsupportedOp
from hyperslab.geometry import Partition
from hyperslab.tensor import Sharded, register


def permuted(x: Sharded, dims: Sequence[int]) -> Sharded:
    """The view whose dim ``i`` is dim ``dims[i]`` of ``x``."""
    n = x.dim()
    order = [d % n if -n <= d < n else n for d in dims]
    if sorted(order) != list(range(n)):
        raise LayoutError(f"permute: {tuple(dims)} is no order of the dims of {x.partition}")
    shape, cuts = x.partition.shape, x.partition.cuts
    partition = Partition(tuple(shape[d] for d in order), tuple(cuts[d] for d in order))
    return x.like(x.local.permute(order), partition)


def exchanged(x: Sharded, a: int, b: int) -> Sharded:
    """The view with two dims exchanged."""
    order = list(range(x.dim()))
    if not all(-x.dim() <= d < x.dim() for d in (a, b)):
        raise IndexError(f"dims {a} and {b} of a tensor of {x.dim()} dims")
    order[a], order[b] = order[b], order[a]
    return permuted(x, order)


def moved(x: Sharded, source: Sequence[int], destination: Sequence[int]) -> Sharded:
    """The view in which the dims ``source`` stand at ``destination``, the others in order."""
    n = x.dim()
    for d in (*source, *destination):
        if not -n <= d < n:
            raise IndexError(f"dim {d} of a tensor of {n} dims")
    place = {to % n: at % n for at, to in zip(source, destination, strict=True)}
    if len(place) != len(source) or len(set(place.values())) != len(source):
        raise LayoutError(f"movedim: repeated dims among {tuple(source)} or {tuple(destination)}")
    rest = iter([d for d in range(n) if d not in place.values()])
    return permuted(x, [place[to] if to in place else next(rest) for to in range(n)])


@register(torch.permute, torch.Tensor.permute, family="permutation")
def permute(input: Any, *dims: Any, **kwargs: Any) -> Sharded:
    """Any order of the dims; each cut goes with its dim."""
    given = kwargs.get("dims", dims)
    one = len(given) == 1 and not isinstance(given[0], int)
    return permuted(input, tuple(given[0] if one else given))


def _register_exchange(name: str) -> None:
    def rule(input: Any, *dims: int, **kwargs: int) -> Sharded:
        """Two dims exchanged; each cut goes with its dim."""
        a, b = (*dims, *kwargs.values())
        return exchanged(input, a, b)

    register(getattr(torch, name), getattr(torch.Tensor, name), family="permutation")(rule)


for _name in ("transpose", "swapaxes", "swapdims"):
    _register_exchange(_name)


@register(
    torch.movedim,
    torch.moveaxis,
    torch.Tensor.movedim,
    torch.Tensor.moveaxis,
    family="permutation",
)
def movedim(input: Any, source: Any, destination: Any) -> Sharded:
    """Some dims moved; each cut goes with its dim."""
    one = isinstance(source, int)
    return moved(input, (source,) if one else source, (destination,) if one else destination)


def _register_transposed(*functions: Callable[..., Any], most: int, conjugate: bool) -> None:
    def rule(input: Any, *_: Any) -> Sharded:
        """The last two dims exchanged; each cut goes with its dim."""
        if not 2 <= input.dim() <= most:
            raise UnsupportedOp(
                f"a transpose without dims, of {input.partition}\n    use x.transpose(a, b)"
            )
        y = exchanged(input, -2, -1)
        return y.like(y.local.conj()) if conjugate and y.is_complex() else y

    register(*functions, family="permutation")(rule)


def _getter(name: str) -> Callable[..., Any]:
    getter: Callable[..., Any] = getattr(torch.Tensor, name).__get__
    return getter


_register_transposed(torch.t, torch.Tensor.t, _getter("T"), most=2, conjugate=False)
_register_transposed(_getter("H"), most=2, conjugate=True)
_register_transposed(_getter("mT"), most=sys.maxsize, conjugate=False)
_register_transposed(
    torch.adjoint, torch.Tensor.adjoint, _getter("mH"), most=sys.maxsize, conjugate=True
)
