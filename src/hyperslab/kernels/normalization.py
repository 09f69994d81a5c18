"""Computes the few numbers per channel that a normalisation makes of its sums, in float64.

The variance is that around the means of parts (ranks, samples, threads) and that of these
means, E[m²] − E[m]², which rounding alone leaves of equal ones: below `LEFT_BY_ROUNDING` it is
none.

*Moments* are (4, R, C): mean, biased variance, ``invstd`` and scale; R is 1, or N where every
sample has its own. *Parts* of them in float32 are what an epilogue takes: ``norm`` (3, R, C) is
mean, scale and shift, where the shift makes up for the mean's rounding, so that nothing is lost
in channels whose mean is far from zero.

The operators are ``normalisation``, ``running_statistics``, ``parameter_gradients`` and
``through_statistics``: first their plain references, then the compiled versions.
"""

from __future__ import annotations

import struct

import torch

from hyperslab.kernels.compile import Library, as_dense_float32
from hyperslab.kernels.memory_format import new_contiguous
from hyperslab.kernels.registry import Operands, declare

LEFT_BY_ROUNDING = 2.0**-48
"""Times E[m²]: numbers of single precision differ by that in the last bit."""

NORMALISATION = struct.Struct("@8q2d")
RUNNING_STATISTICS = struct.Struct("@4q2d")
PARAMETER_GRADIENTS = struct.Struct("@9q")
THROUGH_STATISTICS = struct.Struct("@7qd")
"""The structures in ``statistics.c``."""


def normalisation(
    sums: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    count: int,
    eps: float,
    channels: int,
    pool: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns norm (3, R, C) in float32 and moments from the sums (3, R * C / pool) of all ranks.

    They are of ``count`` values; ``weight`` and ``bias`` are (C) in float32.
    """
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


def running_statistics(
    moments: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    unbiased: float,
) -> None:
    """Moves running statistics (C) towards the moments of one row by a share, the ``momentum``.

    ``unbiased`` times the biased variance is the unbiased one.
    """
    mean, var, *_ = moments[:, 0].to(torch.promote_types(running_mean.dtype, torch.float32))
    running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    running_var.lerp_((var * unbiased).to(running_var.dtype), momentum)


def parameter_gradients(
    sums: torch.Tensor, norm: torch.Tensor, moments: torch.Tensor, pool: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns gradients of weight and bias (C) in float32, and what all ranks add up.

    That is (2, R * C / pool) in float64, from the sums of a backward pass.
    """
    mean, _, invstd, scale = moments.unbind()
    du, product = sums.unbind()
    xhat = (product - du * (mean - norm[0])) * invstd
    shared = torch.stack([du, xhat]) * scale
    return xhat.sum(0).float(), du.sum(0).float(), shared.view(2, -1, pool).sum(2)


def through_statistics(
    shared: torch.Tensor, norm: torch.Tensor, moments: torch.Tensor, count: int, pool: int
) -> torch.Tensor:
    """Returns (2, R, C) in float32, the ``b`` and ``c`` that `chain_backward` takes.

    With v = scale * du, of a mean over ranks: dx = v - mean of v - xhat * mean of v * xhat.
    """
    mean, _, invstd, _ = moments.unbind()
    of_mean, of_xhat = (shared / -count).repeat_interleave(pool, 1).view(2, *mean.shape)
    b = of_xhat * invstd
    return torch.stack([b, of_mean - b * (mean - norm[0])]).float()


def compiled_normalisation(
    functions: Library, given: Operands
) -> tuple[torch.Tensor, torch.Tensor]:
    sums, weight, bias, count, eps, channels, pool = given
    rows = sums.shape[1] * pool // channels
    sums = sums.contiguous()
    weight = as_dense_float32(weight)
    bias = as_dense_float32(bias)
    norm = new_contiguous((3, rows, channels), torch.float32)
    moments = new_contiguous((4, rows, channels), torch.float64)
    functions.normalisation(
        NORMALISATION.pack(
            sums.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
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


def kernels_take(moments: torch.Tensor, *running: torch.Tensor) -> bool:
    if moments.dtype != torch.float64 or moments.shape[1] != 1 or not moments.is_contiguous():
        return False
    for x in running:
        if x.dtype != torch.float32 or x.device != moments.device:
            return False
        if x.shape != moments.shape[2:] or not x.is_contiguous():
            return False
    return True


def compiled_running_statistics(functions: Library, given: Operands) -> None:
    moments, running_mean, running_var, momentum, unbiased = given
    if not kernels_take(moments, running_mean, running_var):
        return NotImplemented
    addresses = moments.data_ptr(), running_mean.data_ptr(), running_var.data_ptr()
    numbers = RUNNING_STATISTICS.pack(*addresses, moments.shape[2], momentum, unbiased)
    functions.running_statistics(numbers)
    return None


def compiled_parameter_gradients(
    functions: Library, given: Operands
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sums, norm, moments, pool = given
    _, rows, channels = sums.shape
    sums = sums.contiguous()
    weight = new_contiguous((channels,), torch.float32)
    bias = new_contiguous((channels,), torch.float32)
    shared = new_contiguous((2, rows * channels // pool), torch.float64)
    functions.parameter_gradients(
        PARAMETER_GRADIENTS.pack(
            sums.data_ptr(),
            norm.data_ptr(),
            moments.data_ptr(),
            weight.data_ptr(),
            bias.data_ptr(),
            shared.data_ptr(),
            rows,
            channels,
            pool,
        )
    )
    return weight, bias, shared


def compiled_through_statistics(functions: Library, given: Operands) -> torch.Tensor:
    shared, norm, moments, count, pool = given
    _, rows, channels = norm.shape
    shared = shared.contiguous()
    through = new_contiguous((2, rows, channels), torch.float32)
    read = shared.data_ptr(), norm.data_ptr(), moments.data_ptr()
    written = through.data_ptr(), rows, channels, pool
    functions.through_statistics(THROUGH_STATISTICS.pack(*read, *written, count))
    return through


_SOURCE, _TRITON = "statistics.c", "normalization"
_CHANGED = ("running_mean", "running_var")

declare(normalisation, compiled_normalisation, _SOURCE, _TRITON, doubles=True)
declare(
    running_statistics,
    compiled_running_statistics,
    _SOURCE,
    _TRITON,
    writes=_CHANGED,
    doubles=True,
)
declare(parameter_gradients, compiled_parameter_gradients, _SOURCE, _TRITON, doubles=True)
declare(through_statistics, compiled_through_statistics, _SOURCE, _TRITON, doubles=True)
