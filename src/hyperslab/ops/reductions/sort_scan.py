"""Operators along one dim that must not be cut: sorting, ranks, running sums, halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.errors import LayoutError
from hyperslab.ops.reductions.sums import finish, reduced_dims, reduction
from hyperslab.tensor import Sharded, register
from hyperslab.tensor.dispatch import gather_first


def require_uncut(x: Sharded, dim: Any, name: str) -> tuple[int, ...]:
    """The dims, sorted and non-negative.

    Raises:
        LayoutError: one of them is cut.
    """
    dims = reduced_dims(x, dim)
    axes = [cut.axis for d in dims if (cut := x.partition.cuts[d]) is not None]
    if axes:
        raise LayoutError(
            f"{name} needs all of dim {', '.join(map(str, dims))}, which is cut: {x.partition} on "
            f"{x.grid}\n{gather_first(*axes)}"
        )
    return dims


def wrap(x: Sharded, result: torch.Tensor, dim: int, keepdim: bool) -> Any:
    """A block whose extent along ``dim`` may have changed, or that has lost it."""
    if keepdim or result.dim() == x.dim():
        return x.like(result, x.partition.with_dim(dim, result.shape[dim], None))
    return finish(x, result, (dim,), False)


def _register(name: str, position: int, default: int | None = None) -> None:
    """Of ``name``, which has the dim as argument number ``position``; None means all dims."""
    functions = [f for space in (torch, torch.Tensor) if (f := getattr(space, name, None))]

    @reduction(*functions)
    def rule(input: Any, *args: Any, **kwargs: Any) -> Any:
        """Along a dim that is not cut; otherwise refused."""
        given = [arg for arg in args if not isinstance(arg, torch.dtype | bool)]
        dim = kwargs.get("dim", given[position] if len(given) > position else default)
        dims = require_uncut(input, dim, name)
        result = functions[0](input.local, *args, **kwargs)
        if dim is None:
            return finish(input, result, dims, False)
        if isinstance(result, torch.Tensor):
            return wrap(input, result, dims[0], False)
        return type(result)([wrap(input, part, dims[0], False) for part in result])


for _name in ("sort", "argsort", "mode"):
    _register(_name, 0, -1)
_register("msort", 0, 0)
for _name in ("topk", "kthvalue"):
    _register(_name, 1, -1)
for _name in ("median", "nanmedian", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"):
    _register(_name, 0)


@reduction(torch.quantile, torch.Tensor.quantile)
def quantile(input: Any, q: Any, dim: int | None = None, keepdim: bool = False, **how: Any) -> Any:
    """One quantile along a dim that is not cut; otherwise refused."""
    return _quantile(torch.quantile, input, q, dim, keepdim, how)


@reduction(torch.nanquantile, torch.Tensor.nanquantile)
def nanquantile(
    input: Any, q: Any, dim: int | None = None, keepdim: bool = False, **how: Any
) -> Any:
    """One quantile along a dim that is not cut; otherwise refused."""
    return _quantile(torch.nanquantile, input, q, dim, keepdim, how)


def _quantile(
    function: Callable[..., Any], x: Sharded, q: Any, dim: int | None, keepdim: bool, how: Any
) -> Any:
    name = function.__name__
    if isinstance(q, Sharded) or (isinstance(q, torch.Tensor) and q.dim() > 0):
        raise LayoutError(
            f"{name} of a cut tensor {x.partition} takes one q at a time, a number\n"
            "    call it for each q, or use x.full()"
        )
    dims = require_uncut(x, dim, name)
    return finish(x, function(x.local, q, dim, keepdim, **how), dims, keepdim)


@register(F.glu, family="activation")
def glu(input: Any, dim: int = -1) -> Sharded:
    """Halves of a dim that is not cut; otherwise refused."""
    (dim,) = require_uncut(input, dim, "glu")
    return wrap(input, F.glu(input.local, dim), dim, True)
