"""Parameters as a layer takes them: a share of their rows, in another type."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F

from hyperslab.geometry import Cut
from hyperslab.memory_format import CHANNELS_LAST
from hyperslab.ops.kernels import fused  # noqa: F401 - registers the operators
from hyperslab.tensor.gradient_homes import GradientHomes

MADE_AT_HOME = 1 << 17
"""Numbers of a whole parameter whose gradient is made at home though nothing is cast."""


class _Taken(torch.autograd.Function):
    """Rows of a parameter, cast; the gradient is made where it is averaged, if that is possible."""

    @staticmethod
    def forward(
        ctx: Any,
        parameter: torch.Tensor,
        begin: int,
        end: int,
        dtype: torch.dtype,
        rows: Cut | None,
        homes: GradientHomes | None,
    ) -> torch.Tensor:
        ctx.parameter = parameter  # a leaf: it keeps no graph
        ctx.begin = begin
        ctx.end = end
        ctx.rows = rows
        ctx.homes = homes
        return parameter[begin:end].to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parameter = ctx.parameter
        rest = parameter.shape[0] - ctx.end
        if torch.is_grad_enabled():
            beside = [0] * (2 * parameter.dim() - 2) + [ctx.begin, rest]
            return F.pad(gradient.to(parameter.dtype), beside), *[None] * 5
        ((accumulating, _), *_) = ctx.next_functions
        home = None if ctx.homes is None else ctx.homes.free(parameter, accumulating)
        whole = torch.empty_like(parameter) if home is None else home
        _clear(whole[: ctx.begin])
        _write(gradient, whole[ctx.begin : ctx.end])
        _clear(whole[ctx.end :])
        if home is not None:
            ctx.homes.made(parameter, whole, ctx.rows)
        return whole, *[None] * 5


def _clear(rows: torch.Tensor) -> None:
    """Set to zero; by the C library, which does not read memory that it overwrites."""
    real = rows.device.type == "cpu" and torch._C._len_torch_dispatch_stack() == 0
    if real and rows.is_contiguous():
        ctypes.memset(rows.data_ptr(), 0, rows.nbytes)
    else:
        rows.zero_()


def _write(gradient: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy into another type, and from channels last, as convolutions make it, in one pass."""
    if gradient.dim() in CHANNELS_LAST and not gradient.is_contiguous():
        torch.ops.hyperslab.reorder_into(gradient, rows)
    else:
        rows.copy_(gradient)


def taken(
    parameter: torch.Tensor,
    dtype: torch.dtype,
    homes: GradientHomes | None,
    rows: Cut | None = None,
    index: int = 0,
) -> torch.Tensor:
    """A parameter in another type; of ``rows``, a cut of its first dim, the interval ``index``.

    Differentiable. The gradient is zero in the rows of other ranks.
    """
    begin, end = (0, parameter.shape[0]) if rows is None else rows.interval(index)
    plain = rows is None and dtype == parameter.dtype
    plain = plain and (homes is None or parameter.numel() < MADE_AT_HOME)
    plain = plain or (homes is None and parameter.device.type != "cpu")
    if plain or not parameter.is_leaf or not parameter.requires_grad:
        return (parameter if rows is None else parameter[begin:end]).to(dtype)
    return _Taken.apply(parameter, begin, end, dtype, rows, homes)


def operand_type(x: torch.Tensor) -> torch.dtype:
    """The type in which a convolution or a linear layer takes a tensor: autocast may lower it."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(kind) if x.is_floating_point() else x.dtype
