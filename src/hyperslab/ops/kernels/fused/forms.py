"""What the operators return in shape, strides and type: their forms on the meta device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyperslab.ops.kernels.fused.layout import (
    bit_bytes,
    format_of,
    pooled_shape,
    winner_bytes,
)
from hyperslab.ops.kernels.fused.reorder import wanted_format


def channel_sums_form(x: torch.Tensor, groups: int) -> torch.Tensor:
    slices = x.shape[0] * groups if groups else x.shape[1]
    return x.new_empty((3, slices), dtype=torch.float64)


def chain_forward_form(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    mark: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    nbytes = bit_bytes(x.shape, slope, norm is not None) + winner_bytes(x.shape, pool, maximum)
    y = torch.empty(
        pooled_shape(x.shape, pool), dtype=dtype, device=x.device, memory_format=format_of(x)
    )
    return y, x.new_empty(nbytes if mark else 0, dtype=torch.uint8)


def chain_forward_into_form(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    mark: bool,
    y: torch.Tensor,
) -> torch.Tensor:
    return chain_forward_form(x, norm, slope, pool, maximum, mark, y.dtype)[1]


def chain_backward_sums_form(
    g: torch.Tensor,
    marks: torch.Tensor,
    x: torch.Tensor,
    norm: torch.Tensor,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
) -> torch.Tensor:
    return x.new_empty((2, *norm.shape[1:]), dtype=torch.float64)


def chain_backward_form(
    g: torch.Tensor,
    marks: torch.Tensor,
    x: torch.Tensor | None,
    norm: torch.Tensor | None,
    through: torch.Tensor | None,
    slope: float,
    pool: Sequence[int],
    maximum: bool,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    memory_format = format_of(g if x is None else x)
    return torch.empty(list(shape), dtype=dtype, device=g.device, memory_format=memory_format)


def normalisation_form(
    sums: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    count: int,
    eps: float,
    channels: int,
    pool: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = sums.shape[1] * pool // channels
    norm = sums.new_empty((3, rows, channels), dtype=torch.float32)
    return norm, sums.new_empty((4, rows, channels))


def parameter_gradients_form(
    sums: torch.Tensor, norm: torch.Tensor, moments: torch.Tensor, pool: int
) -> tuple[torch.Tensor, torch.Tensor]:
    _, rows, channels = sums.shape
    parameters = sums.new_empty((2, channels), dtype=torch.float32)
    return parameters, sums.new_empty((2, rows * channels // pool))


def through_statistics_form(
    shared: torch.Tensor, norm: torch.Tensor, moments: torch.Tensor, count: int, pool: int
) -> torch.Tensor:
    return norm.new_empty((2, *norm.shape[1:]))


def reorder_into_form(x: torch.Tensor, y: torch.Tensor) -> None:
    return


def reorder_form(x: torch.Tensor, channels_last: bool, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=wanted_format(x, channels_last))
