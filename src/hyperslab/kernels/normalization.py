"""Computes the few numbers per channel that a normalisation makes of its sums, in float64.

The variance is that around the means of parts (ranks, samples, threads) and that of these
means, E[m²] − E[m]², which rounding alone leaves of equal ones: below `LEFT_BY_ROUNDING` it is
none.

*Moments* are (4, R, C): mean, biased variance, ``invstd`` and scale; R is 1, or N where every
sample has its own. *Parts* of them in float32 are what an epilogue takes: ``norm`` (3, R, C) is
mean, scale and shift, where the shift makes up for the mean's rounding, so that nothing is lost
in channels whose mean is far from zero.

The operators are ``normalisation``, ``parameter_gradients`` and ``through_statistics``: first
their plain references, then the compiled versions.
"""

from __future__ import annotations

import struct

import torch

from hyperslab.kernels.compile import address, as_dense_float32, library
from hyperslab.kernels.registry import KernelOperator, declare

LEFT_BY_ROUNDING = 2.0**-48
"""Times E[m²]: numbers of single precision differ by that in the last bit."""


def normalisation(
    sums: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    count: int,
    eps: float,
    channels: int,
    pool: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns norm and moments from the sums (3, R * C / pool) of all ranks: see the schema."""
    parts = (sums / count).repeat_interleave(pool, 1).view(3, -1, channels)
    mean, square, around = parts.unbind()
    between = square - mean * mean
    var = torch.where(between <= LEFT_BY_ROUNDING * square, 0, between) + around
    invstd = (var + eps).rsqrt()
    scale = invstd if weight is None else invstd * weight
    rounded = mean.float()
    shift = (rounded - mean) * scale
    if bias is not None:
        shift += bias
    norm = torch.stack([rounded, scale.float(), shift.float()])
    return norm, torch.stack([mean, var, invstd, scale])


def parameter_gradients(
    sums: torch.Tensor, norm: torch.Tensor, moments: torch.Tensor, pool: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (2, C) for weight and bias, and (2, R * C / pool) for all ranks to add up."""
    mean, _, invstd, scale = moments.unbind()
    du, product = sums.unbind()
    xhat = (product - du * (mean - norm[0])) * invstd
    parameters = torch.stack([xhat.sum(0), du.sum(0)]).float()
    shared = torch.stack([du, xhat]) * scale
    return parameters, shared.view(2, -1, pool).sum(2)


def through_statistics(
    shared: torch.Tensor, norm: torch.Tensor, moments: torch.Tensor, count: int, pool: int
) -> torch.Tensor:
    """Returns (2, R, C), the ``b`` and ``c`` of the block's gradient: see the schema.

    With v = scale * du, of a mean over ranks: dx = v - mean of v - xhat * mean of v * xhat.
    """
    mean, _, invstd, _ = moments.unbind()
    of_mean, of_xhat = (shared / -count).repeat_interleave(pool, 1).view(2, *mean.shape)
    b = of_xhat * invstd
    return torch.stack([b, of_mean - b * (mean - norm[0])]).float()


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
    """Runs the C kernel; `NotImplemented` for operands that it does not take."""
    functions = library()
    if functions is None:
        return NotImplemented
    rows = sums.shape[1] * pool // channels
    sums = sums.contiguous()
    weight = as_dense_float32(weight)
    bias = as_dense_float32(bias)
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
    """Runs the C kernel; `NotImplemented` for operands that it does not take."""
    functions = library()
    if functions is None:
        return NotImplemented
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
    """Runs the C kernel; `NotImplemented` for operands that it does not take."""
    functions = library()
    if functions is None:
        return NotImplemented
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


declare(
    KernelOperator(
        # norm (3, R, C) in float32 and moments (4, R, C) of sums (3, R * C / pool) over `count`
        # values; weight, bias: (C) in float32.
        "normalisation(Tensor sums, Tensor? weight, Tensor? bias, int count, float eps, "
        "int channels, int pool) -> (Tensor, Tensor)",
        reference=normalisation,
        cpu=compiled_normalisation,
        source="statistics.c",
        cuda="normalization:triton_normalisation",
    )
)


declare(
    KernelOperator(
        # Gradients of weight and bias (2, C) in float32, and (2, R * C / pool) in float64, of
        # which the next one takes the sum over all ranks; from the sums of a backward pass.
        "parameter_gradients(Tensor sums, Tensor norm, Tensor moments, int pool) "
        "-> (Tensor, Tensor)",
        reference=parameter_gradients,
        cpu=compiled_parameter_gradients,
        source="statistics.c",
        cuda="normalization:triton_parameter_gradients",
    )
)


declare(
    KernelOperator(
        # What `chain_backward` takes: (2, R, C) in float32.
        "through_statistics(Tensor shared, Tensor norm, Tensor moments, int count, int pool) "
        "-> Tensor",
        reference=through_statistics,
        cpu=compiled_through_statistics,
        source="statistics.c",
        cuda="normalization:triton_through_statistics",
    )
)
