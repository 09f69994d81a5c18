"""What a normalisation makes of its sums, by the compiled kernels."""

from __future__ import annotations

import struct

import torch

from hyperslab.ops.kernels.fused import statistics
from hyperslab.ops.kernels.fused.compiled.library import library
from hyperslab.ops.kernels.fused.compiled.tensors import address, ready_numbers

NORMALISATION = struct.Struct("@8q2d")
PARAMETER_GRADIENTS = struct.Struct("@8q")
WAY_THROUGH = struct.Struct("@7qd")
"""The structures of ``statistics.c``."""


def compiled_normalisation(
    sums: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    count: int,
    eps: float,
    channels: int,
    pool: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the schema."""
    functions = library()
    if functions is None:
        return statistics.normalisation(sums, weight, bias, count, eps, channels, pool)
    rows = sums.shape[1] * pool // channels
    sums = sums.contiguous()
    weight = ready_numbers(weight)
    bias = ready_numbers(bias)
    norm = torch.empty((3, rows, channels), dtype=torch.float32)
    moments = torch.empty((4, rows, channels), dtype=torch.float64)
    functions.normalisation(
        NORMALISATION.pack(
            sums.data_ptr(),
            address(weight),
            address(bias),
            norm.data_ptr(),
            moments.data_ptr(),
            rows,
            channels,
            pool,
            count,
            eps,
        )
    )
    return norm, moments


def compiled_parameter_gradients(
    sums: torch.Tensor, norm: torch.Tensor, moments: torch.Tensor, pool: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the schema."""
    functions = library()
    if functions is None:
        return statistics.parameter_gradients(sums, norm, moments, pool)
    _, rows, channels = sums.shape
    sums = sums.contiguous()
    parameters = torch.empty((2, channels), dtype=torch.float32)
    shared = torch.empty((2, rows * channels // pool), dtype=torch.float64)
    functions.parameter_gradients(
        PARAMETER_GRADIENTS.pack(
            sums.data_ptr(),
            norm.data_ptr(),
            moments.data_ptr(),
            parameters.data_ptr(),
            shared.data_ptr(),
            rows,
            channels,
            pool,
        )
    )
    return parameters, shared


def compiled_through_statistics(
    shared: torch.Tensor, norm: torch.Tensor, moments: torch.Tensor, count: int, pool: int
) -> torch.Tensor:
    """See the schema."""
    functions = library()
    if functions is None:
        return statistics.through_statistics(shared, norm, moments, count, pool)
    _, rows, channels = norm.shape
    shared = shared.contiguous()
    through = torch.empty((2, rows, channels), dtype=torch.float32)
    functions.through_statistics(
        WAY_THROUGH.pack(
            shared.data_ptr(),
            norm.data_ptr(),
            moments.data_ptr(),
            through.data_ptr(),
            rows,
            channels,
            pool,
            count,
        )
    )
    return through
