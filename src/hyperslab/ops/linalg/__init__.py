"""Distributes dense layers, matrix products, attention and recurrent layers."""

from hyperslab.ops.linalg import attention, contraction, recurrent

__all__ = [
    "attention",
    "contraction",
    "recurrent",
]
