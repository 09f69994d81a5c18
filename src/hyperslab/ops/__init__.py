"""The rules of torch's operators on cut tensors: one room a family, in torch's own words."""

from hyperslab.ops import (
    autograd,
    convolution,
    elementwise,
    fourier,
    indexing,
    linalg,
    losses,
    normalization,
    pooling,
    reductions,
    spatial,
    views,
)
from hyperslab.ops.kernels import fused
from hyperslab.tensor import attributes, item

__all__ = [
    "attributes",
    "autograd",
    "convolution",
    "elementwise",
    "fourier",
    "fused",
    "indexing",
    "item",
    "linalg",
    "losses",
    "normalization",
    "pooling",
    "reductions",
    "spatial",
    "views",
]
