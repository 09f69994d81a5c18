"""What a normalisation makes of its sums: a few numbers for each channel, in float64.

The variance is that around the means of parts (ranks, samples, threads) and that of these means,
E[m²] − E[m]², which rounding alone leaves of equal ones: below `LEFT_BY_ROUNDING` it is none.

*Moments* are (4, R, C): mean, biased variance, ``invstd`` and scale; R is 1, or N where every
sample has its own. *Parts* of them in float32 are what a chain takes: ``norm`` (3, R, C) is mean,
scale and shift, where the shift makes up for the mean's rounding, so that nothing is lost in
channels whose mean is far from zero.
"""

from __future__ import annotations

import torch

LEFT_BY_ROUNDING = 2.0**-48
"""Of E[m²]: what numbers of single precision in the last bit differ by."""


def normalisation(
    sums: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    count: int,
    eps: float,
    channels: int,
    pool: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and moments of the sums (3, R * C / pool) of all ranks: see the schema."""
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
    """(2, C) of weight and bias, and (2, R * C / pool) for all ranks to add up: see the schema."""
    mean, _, invstd, scale = moments.unbind()
    du, product = sums.unbind()
    xhat = (product - du * (mean - norm[0])) * invstd
    parameters = torch.stack([xhat.sum(0), du.sum(0)]).float()
    shared = torch.stack([du, xhat]) * scale
    return parameters, shared.view(2, -1, pool).sum(2)


def through_statistics(
    shared: torch.Tensor, norm: torch.Tensor, moments: torch.Tensor, count: int, pool: int
) -> torch.Tensor:
    """(2, R, C), the ``b`` and ``c`` of the block's gradient: see the schema.

    With v = scale * du, of a mean over ranks: dx = v - mean of v - xhat * mean of v * xhat.
    """
    mean, _, invstd, _ = moments.unbind()
    of_mean, of_xhat = (shared / -count).repeat_interleave(pool, 1).view(2, *mean.shape)
    b = of_xhat * invstd
    return torch.stack([b, of_mean - b * (mean - norm[0])]).float()
