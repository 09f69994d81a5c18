"""Distributes views and copies of elements: reshape, permute, expand, slicing, concatenation."""

from hyperslab.ops.views import concat, reshape, slicing

__all__ = [
    "concat",
    "reshape",
    "slicing",
]
