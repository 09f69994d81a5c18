"""Fourier transforms, along dims that are not cut, and complex numbers."""

from __future__ import annotations

from collections.abc import Sequence
from types import GetSetDescriptorType

import torch

from hyperslab.geometry import Partition
from hyperslab.ops.common.forms import Operator, register_each
from hyperslab.ops.common.operands import check_uncut
from hyperslab.tensor import Sharded, register

KINDS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")


def _check_uncut(operator: Operator, x: Sharded, dims: Sequence[int]) -> None:
    check_uncut(x, dims, f"torch.fft.{operator.__name__.removeprefix('fft_')} needs all of")


def _with_whole_dims_of(x: Sharded, block: torch.Tensor) -> Sharded:
    """Wrap a transform, which may have changed the extents of dims that are not cut."""
    cuts = x.partition.cuts
    shape = (block.shape[d] if cut is None else x.shape[d] for d, cut in enumerate(cuts))
    return x.like(block, Partition(tuple(shape), cuts))


@register_each(*(getattr(torch.fft, kind) for kind in KINDS), family="linalg", dims=["dim"])
def one_dim(
    operator: Operator,
    input: Sharded,
    n: int | None = None,
    dim: int = -1,
    norm: str | None = None,
) -> Sharded:
    """Along a dim that is not cut; otherwise refused."""
    _check_uncut(operator, input, (dim,))
    return _with_whole_dims_of(input, operator(input.local, n, dim, norm))


@register_each(*(getattr(torch.fft, f"{kind}2") for kind in KINDS), family="linalg", dims=["dim"])
def two_dims(
    operator: Operator,
    input: Sharded,
    s: Sequence[int] | None = None,
    dim: int | tuple[int, ...] | None = (-2, -1),
    norm: str | None = None,
) -> Sharded:
    """Along dims that are not cut; otherwise refused."""
    return several_dims(operator, input, s, dim, norm)


@register_each(*(getattr(torch.fft, f"{kind}n") for kind in KINDS), family="linalg", dims=["dim"])
def several_dims(
    operator: Operator,
    input: Sharded,
    s: Sequence[int] | None = None,
    dim: int | tuple[int, ...] | None = None,
    norm: str | None = None,
) -> Sharded:
    """Along dims that are not cut; otherwise refused."""
    if dim is None:
        count = input.dim() if s is None else len(s)
        dim = tuple(range(input.dim() - count, input.dim()))
    _check_uncut(operator, input, (dim,) if isinstance(dim, int) else dim)
    return _with_whole_dims_of(input, operator(input.local, s, dim, norm))


@register_each(torch.fft.fftshift, torch.fft.ifftshift, family="linalg", dims=["dim"])
def shift(operator: Operator, input: Sharded, dim: int | tuple[int, ...] | None = None) -> Sharded:
    """Along dims that are not cut; otherwise refused."""
    dims = (dim,) if isinstance(dim, int) else dim or tuple(range(input.dim()))
    _check_uncut(operator, input, dims)
    return input.like(operator(input.local, dim))


@register(torch.view_as_real, family="linalg")
def view_as_real(input: Sharded) -> Sharded:
    """Real and imaginary part as a new last dim; a view."""
    block = torch.view_as_real(input.local)
    return input.like(block, Partition((*input.shape, 2), (*input.partition.cuts, None)))


@register(torch.view_as_complex, family="linalg")
def view_as_complex(input: Sharded) -> Sharded:
    """Of a last dim of 2, which is not cut; a view."""
    check_uncut(input, (input.dim() - 1,), "view_as_complex needs all of")
    block = torch.view_as_complex(input.local)
    return input.like(block, Partition(input.partition.shape[:-1], input.partition.cuts[:-1]))


def _forms(name: str) -> tuple[Operator, Operator]:
    """As a function, and as a method or an attribute."""
    method = getattr(torch.Tensor, name)
    attribute = isinstance(method, GetSetDescriptorType)
    return getattr(torch, name), method.__get__ if attribute else method


@register_each(*map(_forms, ("real", "imag", "conj", "resolve_conj")), family="linalg")
def complex_view(operator: Operator, input: Sharded, *_: object) -> Sharded:
    """Of the block; a view."""
    return input.like(operator(input.local))
