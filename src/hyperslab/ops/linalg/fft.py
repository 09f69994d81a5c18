"""Fourier transforms, along dims that are not cut, and complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from types import GetSetDescriptorType
from typing import Any

import torch

from hyperslab.errors import LayoutError
from hyperslab.geometry import Partition
from hyperslab.ops.reductions.sort_scan import require_uncut
from hyperslab.tensor import Sharded, register


def _transform(function: Callable[..., Any], x: Sharded, n: Any, dim: Any, norm: Any) -> Sharded:
    """Of every block; the extents of the dims that are not cut may change."""
    require_uncut(x, dim, f"torch.fft.{function.__name__.removeprefix('fft_')}")
    return _with_whole_dims_of(x, function(x.local, n, dim, norm))


def _with_whole_dims_of(x: Sharded, block: torch.Tensor) -> Sharded:
    cuts = x.partition.cuts
    shape = (block.shape[d] if cut is None else x.shape[d] for d, cut in enumerate(cuts))
    return x.like(block, Partition(tuple(shape), cuts))


def _check_out(out: Any) -> None:
    if out is not None:
        raise LayoutError("torch.fft with out= of a cut tensor has no rule; use its return value")


def _register_one(function: Callable[..., Any]) -> None:
    def rule(input: Any, n: Any = None, dim: int = -1, norm: Any = None, *, out: Any = None) -> Any:
        """Along a dim that is not cut; otherwise refused."""
        _check_out(out)
        return _transform(function, input, n, dim, norm)

    register(function, family="fourier")(rule)


def _register_several(function: Callable[..., Any], default: Any) -> None:
    def rule(
        input: Any, s: Any = None, dim: Any = default, norm: Any = None, *, out: Any = None
    ) -> Any:
        """Along dims that are not cut; otherwise refused."""
        _check_out(out)
        if dim is None:
            count = input.dim() if s is None else len(s)
            dim = tuple(range(input.dim() - count, input.dim()))
        return _transform(function, input, s, dim, norm)

    register(function, family="fourier")(rule)


def _register_shift(function: Callable[..., Any]) -> None:
    def rule(input: Any, dim: Any = None) -> Any:
        """Along dims that are not cut; otherwise refused."""
        require_uncut(input, dim, f"torch.fft.{function.__name__.removeprefix('fft_')}")
        return input.like(function(input.local, dim))

    register(function, family="fourier")(rule)


def _register_all() -> None:
    for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
        _register_one(getattr(torch.fft, kind))
        _register_several(getattr(torch.fft, f"{kind}2"), (-2, -1))
        _register_several(getattr(torch.fft, f"{kind}n"), None)
    for function in (torch.fft.fftshift, torch.fft.ifftshift):
        _register_shift(function)


_register_all()


@register(torch.view_as_real, family="fourier")
def view_as_real(input: Any) -> Any:
    """Real and imaginary part as a new last dim; a view."""
    block = torch.view_as_real(input.local)
    return input.like(block, Partition((*input.shape, 2), (*input.partition.cuts, None)))


@register(torch.view_as_complex, family="fourier")
def view_as_complex(input: Any) -> Any:
    """Of a last dim of 2, which is not cut; a view."""
    require_uncut(input, -1, "view_as_complex")
    block = torch.view_as_complex(input.local)
    return input.like(block, Partition(tuple(input.shape[:-1]), input.partition.cuts[:-1]))


def _register_views() -> None:
    for name in ("real", "imag", "conj", "resolve_conj"):
        function = getattr(torch, name)

        def rule(input: Any, function: Callable[..., Any] = function) -> Any:
            """Of the block; a view."""
            return input.like(function(input.local))

        method = getattr(torch.Tensor, name)
        attribute = isinstance(method, GetSetDescriptorType)
        register(function, method.__get__ if attribute else method, family="fourier")(rule)


_register_views()
