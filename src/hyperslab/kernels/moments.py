"""Computes mean and biased variance of every slice of dim 1 of a block."""

from __future__ import annotations

import torch

from hyperslab.kernels import registry
from hyperslab.kernels.memory_format import as_float32

CACHED = 1 << 19  # elements that the processor's cache holds

Moments = tuple[torch.Tensor, torch.Tensor]
"""Means and biased variances, one of each for every slice."""


def reference(x: torch.Tensor) -> Moments:
    """Computes mean and variance in one expression, in float64."""
    slices = x.transpose(0, 1).flatten(1).double()
    mean = slices.mean(1)
    var = (slices - mean[:, None]).square().mean(1)
    return mean, var


def local_moments(x: torch.Tensor) -> Moments:
    """Returns mean and biased variance of every slice of dim 1; half precision in float32."""
    return _cached(x) if registry.choose("moments", x) == "cached" else _torch(x)


def _torch(x: torch.Tensor) -> Moments:
    var, mean = torch.var_mean(as_float32(x), _other_dims(x), correction=0)
    return mean, var


def _cached(x: torch.Tensor) -> Moments:
    """Takes two passes, a few slices at a time, which stay in the processor's cache."""
    dims = _other_dims(x)
    step = max(1, CACHED * x.shape[1] // max(1, x.numel()))
    means = []
    variances = []
    for part in x.split(step, 1):
        part = as_float32(part)
        mean = part.mean(dims, keepdim=True)
        means.append(mean.flatten())
        variances.append((part - mean).square_().mean(dims))
    return torch.cat(means), torch.cat(variances)


def _other_dims(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]
