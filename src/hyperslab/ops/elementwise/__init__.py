"""Distributes elementwise operators: pointwise ones, activations, dropout, creation of tensors."""

from hyperslab.ops.elementwise import pointwise, random

__all__ = [
    "pointwise",
    "random",
]
